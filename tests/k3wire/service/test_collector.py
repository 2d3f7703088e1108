"""What start-up made is not looked at again, and cycles of requests are still found."""

import gc
import weakref
from collections.abc import Generator

import pytest

from k3wire.service.collector import settle_memory


class Node:
    """Something that can be in a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector_as_before() -> Generator[None, None, None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_start_up_is_frozen_and_later_cycles_are_freed() -> None:
    settle_memory()
    assert gc.get_freeze_count() > 1000
    assert gc.isenabled()
    found = weakref.ref(Node())
    gc.collect()
    assert found() is None
