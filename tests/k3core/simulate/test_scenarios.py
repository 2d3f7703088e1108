"""Every case of tests/scenarios, run as `k3 simulate --scenario` runs it."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3core.simulate.scenario_file import Case, Step, read_cases
from k3core.simulate.steps import run_case

_FOLDER = Path(__file__).parents[2] / "scenarios"
# Which of the six jitters each case gets in the usual run, in turn; all of them at night.
_JITTERS = ("1", "-1", "U", "-U", "B", "-B")


# Cases of more tokens than this run at other lengths at night only: seconds each.
_LONG = 1_000_000


def _cases() -> list[Case]:
    paths = sorted(_FOLDER.glob("*.json"))
    return [case for path in paths for case in read_cases(json.loads(path.read_text()))]


_CASES = _cases()


def test_every_group_has_cases() -> None:
    assert {path.stem[0] for path in _FOLDER.glob("*.json")} >= set("abcdefgjk")
    assert len({case.name for case in _CASES}) == len(_CASES) > 100


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_the_case_holds(case: Case) -> None:
    result = run_case(case)
    assert result["failures"] == []


@pytest.mark.parametrize("number", range(len(_CASES)), ids=lambda n: _CASES[n].name)
def test_the_case_keeps_outputs_and_pages_at_other_lengths(number: int) -> None:
    case = _CASES[number]
    if not os.environ.get("K3_NIGHTLY") and sum(map(_num_tokens, case.steps)) > _LONG:
        pytest.skip("K3_NIGHTLY is not set")
    usual = (_JITTERS[number % len(_JITTERS)],)
    for jitter in _JITTERS if os.environ.get("K3_NIGHTLY") else usual:
        sizes = {"1": 1, "U": case.cache.unit_tokens, "B": case.cache.grid}
        change = sizes[jitter.lstrip("-")] * (-1 if jitter.startswith("-") else 1)
        steps = tuple(_stretched(step, change) for step in case.steps if step.verb != "expect")
        assert run_case(replace(case, steps=steps))["failures"] == [], jitter


def _num_tokens(step: Step) -> int:
    """Tokens of all prompts that a step submits."""
    prompt: list[Any] = list(step.options.get("prompt", []))
    once = sum(segment[2] for segment in prompt if isinstance(segment, list))
    return once * int(step.options.get("times", 1))


def _stretched(step: Step, change: int) -> Step:
    """The step with the last slice of its prompt longer, or shorter down to one token."""
    # JSON, as the file gave it.
    prompt: list[Any] = list(step.options.get("prompt", []))
    slices = [place for place, segment in enumerate(prompt) if isinstance(segment, list)]
    if not slices:
        return step
    stream, start, length = prompt[slices[-1]]
    prompt[slices[-1]] = [stream, start, max(1, length + change)]
    return replace(step, options={**step.options, "prompt": prompt})
