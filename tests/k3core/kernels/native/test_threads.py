"""The helpers: many callers, more threads than processors, forks, limits that change."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from k3core.kernels.cpu_native import native_library
from k3core.kernels.linear.native import NativeLinear
from k3core.kernels.native.compiled import NativeLibrary

CHILD_TIMEOUT_S = 5


@pytest.fixture
def library() -> Iterator[NativeLibrary]:
    library = native_library()
    before = library.get_threads()
    yield library
    library.set_threads(before)


def _work() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 96, generator=generator), torch.randn(333, 96, generator=generator)


def test_callers_at_the_same_time_get_their_own_results(library: NativeLibrary) -> None:
    library.set_threads(4)
    linear, (x, weight) = NativeLinear(library), _work()
    inputs = [x * (i + 1) for i in range(6)]
    expected = [linear.run(mine, weight) for mine in inputs]

    def call(which: int) -> bool:
        return all(
            torch.equal(linear.run(inputs[which], weight), expected[which]) for _ in range(80)
        )

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(call, range(6)))


def test_thousands_of_short_calls_on_more_threads_than_processors_all_end(
    library: NativeLibrary,
) -> None:
    linear, (x, weight) = NativeLinear(library), _work()
    library.set_threads(1)
    expected = linear.run(x, weight)
    for number in range(2000):
        library.set_threads(1 + number % 7)
        assert torch.equal(linear.run(x, weight), expected)


def test_the_limit_is_kept_at_one_at_least(library: NativeLibrary) -> None:
    library.set_threads(0)
    assert library.get_threads() == 1
    library.set_threads(3)
    assert library.get_threads() == 3


# The parent has helpers of its own while it forks: that is the case under test.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_helpers_of_its_own(library: NativeLibrary) -> None:
    library.set_threads(3)
    linear, (x, weight) = NativeLinear(library), _work()
    expected = linear.run(x, weight)
    child = os.fork()
    if child == 0:
        # The alarm bounds a hang: it ends the child, and its status shows it.
        signal.alarm(CHILD_TIMEOUT_S)
        same = all(torch.equal(linear.run(x, weight), expected) for _ in range(20))
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert torch.equal(linear.run(x, weight), expected)
