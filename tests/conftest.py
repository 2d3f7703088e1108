"""How `make test` deals the tests to its two workers: by files, long ones first.

Files go out whole and in order, so a long one that comes last is waited for by an idle processor.
Whole stacks of the model follow each other on one worker: two at a time would be ten processes that
load torch on two processors, which makes both slower than one after the other.
"""

from collections import Counter
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

STACKS = (
    "tests/pipeline/test_nano_answers.py",
    "tests/pipeline/test_answers.py",
    "tests/pipeline/test_refusals.py",
    "tests/pipeline/test_killed_workers.py",
    "tests/pipeline/test_picture_faults.py",
    "tests/pipeline/test_picture_tiers.py",
)
"""Files that start the model's whole stack; together they take about as long as a third of all."""

STARTERS = ("tests/pipeline/", "tests/k3ctl/test_up.py")
"""Other files that start processes, and take long for the number of their tests."""

NUM_FEW = 4
"""Files of fewer tests hold long ones: random traces, whole comparisons."""


def unit_of(nodeid: str) -> str:
    """What is given to a worker in one piece: a file, or all stacks."""
    path = nodeid.split("::", 1)[0]
    return "stacks" if path in STACKS else path


class LongFilesFirst(LoadFileScheduling):
    """Deals files in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongFilesFirst | None:
    """Takes the place of `--dist loadfile`, which would begin with the files of most tests."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return LongFilesFirst(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts long files first where tests are dealt to workers; otherwise nothing changes."""
    if not hasattr(config, "workerinput"):
        return
    sizes = Counter(unit_of(item.nodeid) for item in items)
    slow = {unit_of(item.nodeid) for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[int, int]:
        unit = unit_of(item.nodeid)
        if unit == "stacks":
            return 0, 0
        if unit.startswith(STARTERS):
            return 1, 0
        if unit in slow:
            return 2, 0
        # The sort is stable, so the tests of a file stay together.
        return (3 if sizes[unit] < NUM_FEW else 4), -sizes[unit]

    items.sort(key=place)
