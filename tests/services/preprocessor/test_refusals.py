import pytest

from k3_preprocessor.refusals import KEEP_S, MAX_REFUSALS, Refusals
from k3wire.errors import ImageParseError, ImageTooLarge


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_refusal_is_raised_again_until_its_time_is_over() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    refusals.check(b"a")
    refusals.note(b"a", ImageTooLarge("too large", param="somebody's"))
    clock.now_s += KEEP_S - 1
    with pytest.raises(ImageTooLarge) as caught:
        refusals.check(b"a")
    assert (caught.value.message, caught.value.param) == ("too large", None)
    refusals.check(b"b")
    clock.now_s += 1
    refusals.check(b"a")
    assert len(refusals) == 0


def test_the_newest_reason_and_the_newest_pictures_are_kept() -> None:
    refusals = Refusals(Clock())
    refusals.note(b"first", ImageTooLarge("x"))
    refusals.note(b"renewed", ImageTooLarge("x"))
    for number in range(MAX_REFUSALS - 2):
        refusals.note(str(number).encode(), ImageParseError("x"))
    refusals.note(b"renewed", ImageParseError("y"))
    refusals.note(b"one more", ImageParseError("x"))
    assert len(refusals) == MAX_REFUSALS
    refusals.check(b"first")
    with pytest.raises(ImageParseError):
        refusals.check(b"renewed")
