import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3text.stop import StopMatcher, StopStep


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the first stop to be complete, of several the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held_by_definition(stops: list[str], text: str) -> int:
    lengths = [
        length
        for stop in stops
        for length in range(1, min(len(stop), len(text) + 1))
        if text.endswith(stop[:length])
    ]
    return max(lengths, default=0)


def test_a_stop_string_over_many_pieces_is_never_shown() -> None:
    matcher = StopMatcher(["END"])
    steps = [matcher.feed(piece) for piece in ("abE", "N", "DEN", "D!")]
    assert steps == [StopStep("ab"), StopStep(""), StopStep("", "END"), StopStep("")]
    assert (matcher.matched, matcher.finish()) == ("END", "")


def test_a_prefix_that_comes_to_nothing_is_shown_in_full() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.feed("xaaa").text == "xa"
    assert matcher.feed("c").text == "aac"
    assert matcher.feed("a").text == ""
    assert matcher.finish() == "a"


def test_only_the_longest_prefix_is_held_not_the_longest_stop() -> None:
    matcher = StopMatcher(["<|user|>", "\n\n\n\n"])
    assert matcher.feed("hello <|sep").text == "hello <|sep"
    assert matcher.feed("\n").text == ""
    assert matcher.feed("<").text == "\n"


def test_the_first_to_be_complete_wins_and_of_two_the_longer() -> None:
    assert StopMatcher(["abcd", "bc"]).feed("xabcd") == StopStep("xa", "bc")
    assert StopMatcher(["c", "abc"]).feed("xabc") == StopStep("x", "abc")


def test_no_stop_strings_let_all_text_pass() -> None:
    matcher = StopMatcher([])
    assert (matcher.feed("anything").text, matcher.finish()) == ("anything", "")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@given(
    stops=st.lists(st.text("ab|", min_size=1, max_size=4), min_size=1, max_size=5),
    pieces=st.lists(st.text("ab|c", max_size=4), max_size=12),
)
def test_any_chunking_shows_what_the_definition_says(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for at, piece in enumerate(pieces):
        shown += matcher.feed(piece).text
        fed = "".join(pieces[: at + 1])
        if matcher.matched is None:
            assert len(fed) - len(shown) == held_by_definition(stops, fed)
    shown += matcher.finish()
    assert (shown, matcher.matched) == expected(stops, "".join(pieces))
