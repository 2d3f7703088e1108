"""Every case of tests/scenarios, run as `k3 simulate --scenario` runs it."""

import json
from pathlib import Path

import pytest

from k3core.simulate.scenario_file import Case, read_cases
from k3core.simulate.steps import run_case

_FOLDER = Path(__file__).parents[2] / "scenarios"


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
