"""One answer in the making: stop strings, hidden calls, counts and the reason of the end."""

import re

import pytest

from k3_gateway.answer import Answer
from k3text.parsers.assemble import assemble
from k3text.parsers.events import Event, ParsedCall, ParsedMessage
from k3text.parsers.output_parser import OutputParser
from k3text.tokenizer import Tokenizer
from k3wire.messages.base import StageReport
from k3wire.messages.stream import TokenDelta

BYTES = Tokenizer({bytes([byte]): byte for byte in range(256)})
MARKS = {"⟨": "<|open|>", "⟩": "<|sep|>", "⟪": "<|close|>", "■": "<|end_of_msg|>"}
SHOWN = "⟪think⟩⟨response⟩"
CALL = '⟨call tool="f"⟩⟨argument key="a" type="string"⟩v🎈⟪argument⟩⟪call⟩'
WHOLE = f"hm 🤔{SHOWN}yes 你好⟪response⟩⟨tools⟩{CALL}{CALL}⟪tools⟩⟪message⟩■"
SPLITS = (1, 2, 7, 1000)


def ids_of(text: str) -> list[int]:
    ids: list[int] = []
    for piece in re.split("([⟨⟩⟪■])", text):
        is_mark = piece in MARKS
        ids.extend(BYTES.encode_segment(MARKS.get(piece, piece), allow_special=is_mark))
    return ids


def run(
    ids: list[int], end: str = "stop", split: int = 1000, *, stops: tuple[str, ...] = (),
    max_calls: int | None = None,
) -> tuple[Answer, list[Event]]:  # fmt: skip
    """Feeds tokens, the first alone as prefill sends it, and the rest in frames of `split`."""
    answer = Answer(OutputParser(BYTES, "think"), stops, max_calls=max_calls)
    pieces = [ids[:1], *(ids[at : at + split] for at in range(1, len(ids), split))]
    events: list[Event] = []
    for place, piece in enumerate(pieces):
        is_last = place + 1 == len(pieces)
        delta = TokenDelta(
            request_id="r", token_ids=tuple(piece), finish_reason=end if is_last else None
        )
        events += answer.feed(delta)
    assert answer.is_ended
    return answer, events


def calls(count: int) -> tuple[ParsedCall, ...]:
    return (ParsedCall(name="f", arguments='{"a":"v🎈"}'),) * count


@pytest.mark.parametrize("split", SPLITS)
def test_neither_text_nor_counts_depend_on_the_cutting(split: int) -> None:
    answer, events = run(ids_of(WHOLE), split=split)
    assert assemble(events) == ParsedMessage(
        reasoning="hm 🤔", content="yes 你好", tool_calls=calls(2)
    )
    assert answer.finish == "tool_calls"
    assert answer.num_output_tokens == len(ids_of(WHOLE))
    assert answer.num_reasoning_tokens == len("hm 🤔".encode())


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("limit", "finish"), [(0, "stop"), (1, "tool_calls"), (2, "tool_calls")])
def test_hidden_calls_leave_no_trace(split: int, limit: int, finish: str) -> None:
    answer, events = run(ids_of(WHOLE), split=split, max_calls=limit)
    assert assemble(events) == ParsedMessage(
        reasoning="hm 🤔", content="yes 你好", tool_calls=calls(limit)
    )
    assert answer.finish == finish


def test_every_cut_is_a_length_and_the_beginning_of_the_whole() -> None:
    ids = ids_of(WHOLE)
    for limit in range(1, len(ids) + 1):
        found = [run(ids[:limit], "length", split) for split in SPLITS]
        messages = [assemble(events) for _, events in found]
        assert messages.count(messages[0]) == len(SPLITS)
        assert {answer.finish for answer, _ in found} == {"length"}
        assert len({answer.num_reasoning_tokens for answer, _ in found}) == 1
        assert "hm 🤔".startswith(messages[0].reasoning.removesuffix("\ufffd"))
        assert "yes 你好".startswith(messages[0].content.removesuffix("\ufffd"))


def test_only_a_whole_call_makes_the_end_a_call() -> None:
    cut = f'{SHOWN}x⟪response⟩⟨tools⟩⟨call tool="f"⟩⟨argument key="a" type="string"⟩v■'
    answer, events = run(ids_of(cut))
    assert [call.is_complete for call in assemble(events).tool_calls] == [False]
    assert answer.finish == "stop"


@pytest.mark.parametrize("split", SPLITS)
def test_a_stop_string_ends_visible_text_and_nothing_else(split: int) -> None:
    text = f"END{SHOWN}abENENDcd⟪response⟩⟨tools⟩{CALL}⟪tools⟩■"
    answer, events = run(ids_of(text), split=split, stops=("END",))
    assert assemble(events) == ParsedMessage(reasoning="END", content="abEN")
    assert (answer.finish, answer.has_stopped_early) == ("stop", True)


@pytest.mark.parametrize("ending", ["⟪response⟩■", "■", ""])
def test_the_beginning_of_a_stop_string_is_shown_when_no_more_comes(ending: str) -> None:
    answer, events = run(ids_of(f"{SHOWN}abEN{ending}"), "length", 1, stops=("END",))
    assert assemble(events).content == "abEN"
    assert not answer.has_stopped_early


def test_the_first_reported_hit_counts_and_nothing_comes_after_the_end() -> None:
    answer = Answer(OutputParser(BYTES, "response"), ())
    report = StageReport(
        stage="prefill", outcome="miss", worker_id="p", start_unix_ns=0, duration_ns=1
    )
    first = TokenDelta(
        request_id="r", token_ids=(97,), num_cached_tokens=128, reports=(report,)
    )  # fmt: skip
    answer.feed(first)
    last = TokenDelta(
        request_id="r", token_ids=(98,), num_cached_tokens=0, finish_reason="length"
    )  # fmt: skip
    answer.feed(last)
    assert answer.feed(last) == []
    assert (answer.num_cached_tokens, answer.num_output_tokens) == (128, 2)
    assert answer.reports == [report]
