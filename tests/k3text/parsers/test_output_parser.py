"""The parser on outputs written by hand: what models do, and what they should not."""

import json
import re

import pytest

from k3text.parsers.assemble import assemble
from k3text.parsers.events import (
    ContentDelta,
    Event,
    ParsedCall,
    ParsedMessage,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from k3text.parsers.output_parser import OutputParser
from k3text.tokenizer import Tokenizer

BYTES = Tokenizer({bytes([byte]): byte for byte in range(256)})
MARKS = {"⟨": "<|open|>", "⟩": "<|sep|>", "⟪": "<|close|>", "■": "<|end_of_msg|>", "◆": "[EOS]"}
THOUGHT = "hm⟪think⟩⟨response⟩"
CALL = '⟨call tool="f" index="1"⟩⟨argument key="a" type="number"⟩1⟪argument⟩⟪call⟩'


def ids_of(text: str) -> list[int]:
    """Tokens of an output: the marks are the special tokens, everything else is bytes."""
    ids: list[int] = []
    for piece in re.split("([⟨⟩⟪■◆])", text):
        if piece in MARKS:
            ids.extend(BYTES.encode_segment(MARKS[piece], allow_special=True))
        else:
            ids.extend(BYTES.encode_segment(piece))
    return ids


def events_of(text: str, start: str = "think", *, is_cut: bool = False) -> list[Event]:
    """Events of an output, one token at a time."""
    parser = OutputParser(BYTES, "think" if start == "think" else "response")
    events = [event for token in ids_of(text) for event in parser.feed([token])]
    return [*events, *parser.finish(is_cut=is_cut)]


def parse(text: str, start: str = "think", *, is_cut: bool = False) -> ParsedMessage:
    """The message of an output; cutting it into tokens must change nothing."""
    parser = OutputParser(BYTES, "think" if start == "think" else "response")
    at_once = assemble([*parser.feed(ids_of(text)), *parser.finish(is_cut=is_cut)])
    assert assemble(events_of(text, start, is_cut=is_cut)) == at_once
    return at_once


def calls(*found: tuple[str, str]) -> tuple[ParsedCall, ...]:
    return tuple(ParsedCall(name=name, arguments=arguments) for name, arguments in found)


def test_reasoning_content_and_calls_are_told_apart() -> None:
    text = f"{THOUGHT}yes⟪response⟩⟨tools⟩{CALL}⟪tools⟩⟪message⟩■"
    assert parse(text) == ParsedMessage(
        reasoning="hm", content="yes", tool_calls=calls(("f", '{"a":1}'))
    )


def test_an_answer_without_thinking_begins_as_content() -> None:
    assert parse("yes⟪response⟩⟪message⟩■", "response") == ParsedMessage(content="yes")


def test_whitespace_around_tag_names_and_between_elements_is_layout() -> None:
    text = (
        "hm⟪ think\n⟩\n\n⟨ response ⟩yes⟪\tresponse⟩\n⟨tools ⟩\n"
        '⟨ call  tool = "f"  index="1" ⟩\n⟨argument\nkey="a"\ttype="number"⟩ 1 ⟪argument ⟩\n'
        "⟪call⟩\n⟪tools⟩\n⟪message⟩\n■"
    )
    assert parse(text) == ParsedMessage(
        reasoning="hm", content="yes", tool_calls=calls(("f", '{"a":1}'))
    )


@pytest.mark.parametrize(
    "text",
    [
        "hm⟨response⟩yes⟪response⟩⟨tools⟩" + CALL + "⟪tools⟩⟪message⟩■",
        "hm⟪think⟩⟨response⟩yes⟨tools⟩" + CALL + "⟪tools⟩⟪message⟩■",
        "hm⟪think⟩yes⟨tools⟩" + CALL + "⟪message⟩■",
        "hm⟪think⟩⟨response⟩yes⟪response⟩" + CALL + "■",
        "hm⟪think⟩⟨response⟩yes⟪response⟩⟨tools⟩" + CALL.removesuffix("⟪call⟩") + "⟪tools⟩■",
        "hm⟪think⟩⟨response⟩yes⟪response⟩⟨tools⟩" + CALL.removesuffix("⟪call⟩") + "■",
        "⟨think⟩hm⟪think⟩⟨response⟩⟨response⟩yes⟪response⟩⟨tools⟩⟨tools⟩" + CALL + "◆",
        '⟨message role="assistant"⟩hm⟪tools⟩⟪think⟩⟨response⟩yes⟪think⟩⟪response⟩' + CALL,
        "hm⟪think⟩⟨response⟩yes⟪response⟩⟨tools⟩" + CALL.replace("⟪argument⟩", "") + "⟪tools⟩■",
    ],
)
def test_a_terminator_that_is_missing_or_doubled_loses_nothing(text: str) -> None:
    assert parse(text) == ParsedMessage(
        reasoning="hm", content="yes", tool_calls=calls(("f", '{"a":1}'))
    )


def test_calls_opened_inside_reasoning_end_it() -> None:
    for text in (f"hm⟨tools⟩{CALL}⟪tools⟩■", f"hm{CALL}■"):
        assert parse(text) == ParsedMessage(reasoning="hm", tool_calls=calls(("f", '{"a":1}')))


def test_calls_are_numbered_by_appearance_and_names_are_whole_and_unescaped() -> None:
    text = (
        '⟨tools⟩⟨call tool="a-b.c" index="7"⟩⟪call⟩'
        '⟨call index="7" tool="x&amp;&quot;&amp;quot;"⟩⟪call⟩⟨call tool="d"⟩⟪tools⟩'
    )
    starts = [event for event in events_of(text, is_cut=True) if "name" in event.__struct_fields__]
    assert starts == [
        ToolCallStart(index=0, name="a-b.c"),
        ToolCallStart(index=1, name='x&"&quot;'),
        ToolCallStart(index=2, name="d"),
    ]
    assert [call.arguments for call in parse(text).tool_calls] == ["{}", "{}", "{}"]


def test_argument_text_comes_as_soon_as_it_is_known() -> None:
    text = '⟨call tool="f"⟩⟨argument key="path" type="string"⟩a"\n中'
    found = events_of(text, is_cut=True)
    assert found == [
        ToolCallStart(index=0, name="f"),
        ToolCallArgumentsDelta(index=0, text='{"path":"'),
        ToolCallArgumentsDelta(index=0, text="a"),
        ToolCallArgumentsDelta(index=0, text='\\"'),
        ToolCallArgumentsDelta(index=0, text="\\n"),
        ToolCallArgumentsDelta(index=0, text="中"),
        ToolCallEnd(index=0, is_complete=False),
    ]


def test_marker_names_spelled_by_ordinary_tokens_are_text_everywhere() -> None:
    spelled = "<|close|>argument<|sep|><|end_of_msg|>"
    text = (
        f"{spelled}⟪think⟩⟨response⟩{spelled}⟪response⟩⟨tools⟩"
        f'⟨call tool="f"⟩⟨argument key="{spelled}" type="string"⟩{spelled}⟪argument⟩⟪call⟩'
    )
    assert parse(text) == ParsedMessage(
        reasoning=spelled,
        content=spelled,
        tool_calls=calls(("f", json.dumps({spelled: spelled}, separators=(",", ":")))),
    )


def test_a_raw_block_is_passed_on_as_it_is() -> None:
    raw = '{"a": [1, "é\\n"], "b"'
    text = f'⟨tools⟩⟨call tool="f"⟩⟨json type="object"⟩{raw}⟪json⟩⟪call⟩⟪tools⟩■'
    assert parse(text).tool_calls == calls(("f", raw))


def test_a_call_without_a_name_is_not_shown_and_its_neighbours_are() -> None:
    text = f'⟨tools⟩⟨call index="1"⟩⟨argument key="a" type="string"⟩x⟪argument⟩⟪call⟩{CALL}■'
    parser = OutputParser(BYTES, "think")
    events = [*parser.feed(ids_of(text)), *parser.finish(is_cut=False)]
    assert assemble(events).tool_calls == calls(("f", '{"a":1}'))
    assert parser.num_malformed == 1


def test_a_cut_call_is_incomplete_and_complete_ones_are_kept() -> None:
    open_call = '⟨call tool="g"⟩⟨argument key="k" type="string"⟩val'
    cut = parse(f"⟨tools⟩{CALL}{open_call}", is_cut=True)
    assert cut.tool_calls == (
        *calls(("f", '{"a":1}')),
        ParsedCall(name="g", arguments='{"k":"val', is_complete=False),
    )
    between = parse(f"⟨tools⟩{CALL.removesuffix('⟪call⟩')}", is_cut=True)
    assert between.tool_calls == (ParsedCall(name="f", arguments='{"a":1', is_complete=False),)


def test_an_end_token_inside_an_argument_leaves_the_call_incomplete() -> None:
    found = parse('⟨call tool="g"⟩⟨argument key="k" type="string"⟩val■')
    assert found.tool_calls == (ParsedCall(name="g", arguments='{"k":"val', is_complete=False),)


@pytest.mark.parametrize("tail", ["⟪", "⟪mess", "⟪message", "⟨to", "⟨tools", '⟨call tool="f', "⟨ "])
def test_an_output_cut_inside_a_tag_shows_no_part_of_it(tail: str) -> None:
    assert parse(f"{THOUGHT}yes{tail}", is_cut=True) == ParsedMessage(reasoning="hm", content="yes")
    assert parse(f"hm{tail}", is_cut=True) == ParsedMessage(reasoning="hm")


def test_real_text_behind_a_stray_marker_is_kept() -> None:
    long = "This is no tag but an answer that goes on and on, past any name that a tag may have."
    for text in (f"⟨{long}", f"⟩{long}", f"⟪{long}⟪response⟩■", "⟨Hello⟪response⟩■", "⟪Hi, you!⟩"):
        kept = re.sub("[⟨⟩⟪■]|response", "", text)
        assert parse(f"{THOUGHT}{text}") == ParsedMessage(reasoning="hm", content=kept)
    assert parse("⟨thinking⟩a") == ParsedMessage(reasoning="a")


def test_reserved_and_media_tokens_leave_nothing_behind() -> None:
    specials = BYTES.specials
    noise = [specials.media_pad, specials.media_begin, specials.bos, specials.eot, 256 + 200]
    parser = OutputParser(BYTES, "response")
    ids = [token for byte in "a中b".encode() for token in (byte, *noise)]
    events = [*parser.feed(ids), *parser.finish(is_cut=True)]
    assert assemble(events) == ParsedMessage(content="a中b")


def test_a_split_character_waits_and_a_cut_one_becomes_one_mark() -> None:
    events = events_of("中⟪think⟩", is_cut=True)
    assert [event.text for event in events if "text" in event.__struct_fields__] == ["", "", "中"]
    parser = OutputParser(BYTES, "response")
    events = [*parser.feed("x🚀".encode()[:-1]), *parser.finish(is_cut=True)]
    assert assemble(events) == ParsedMessage(content="x\ufffd")
    cut_reasoning = [*"x🚀".encode()[:-1], *ids_of("⟪think⟩⟨response⟩a")]
    parser = OutputParser(BYTES, "think")
    events = [*parser.feed(cut_reasoning), *parser.finish(is_cut=True)]
    assert assemble(events) == ParsedMessage(reasoning="x\ufffd", content="a")


def test_positions_name_exactly_the_tokens_of_each_channel() -> None:
    text = "ab⟪think⟩\n⟨response⟩c中⟪response⟩⟪message⟩■zz"
    events = events_of(text)
    found: dict[str, list[int]] = {"reasoning": [], "content": []}
    for event in events:
        match event:
            case ReasoningDelta(positions=positions):
                found["reasoning"].extend(positions)
            case ContentDelta(positions=positions):
                found["content"].extend(positions)
            case _:
                raise AssertionError(event)
    ids = ids_of(text)
    assert bytes(ids[at] for at in found["reasoning"]).decode() == "ab"
    assert bytes(ids[at] for at in found["content"]).decode() == "c中"


def test_nothing_goes_back_to_an_earlier_kind() -> None:
    text = f"a⟪think⟩⟨response⟩b⟪response⟩⟨think⟩c⟪think⟩⟨tools⟩{CALL}⟪tools⟩⟨response⟩d⟪response⟩■"
    parser = OutputParser(BYTES, "think")
    events = [*parser.feed(ids_of(text)), *parser.finish(is_cut=False)]
    assert assemble(events) == ParsedMessage(
        reasoning="a", content="b", tool_calls=calls(("f", '{"a":1}'))
    )
    assert parser.num_dropped_tokens == 2


def test_thinking_may_begin_late_as_long_as_nothing_was_said() -> None:
    assert parse("⟨think⟩hm⟪think⟩⟨response⟩yes", "response") == ParsedMessage(
        reasoning="hm", content="yes"
    )


def test_after_the_end_everything_is_ignored_unless_told_otherwise() -> None:
    ids = ids_of("a⟪message⟩■b⟨tools⟩◆c")
    parser = OutputParser(BYTES, "response")
    assert assemble(parser.feed(ids)) == ParsedMessage(content="a")
    assert parser.is_done
    assert parser.feed(ids) == [] == parser.finish(is_cut=False)
    on = OutputParser(BYTES, "response", ignore_end=True)
    message = assemble([*on.feed(ids_of("a■b◆c⟪message⟩d")), *on.finish(is_cut=True)])
    assert message == ParsedMessage(content="abcd")


def test_ending_twice_gives_nothing_more() -> None:
    parser = OutputParser(BYTES, "think")
    parser.feed(ids_of('⟨call tool="f"⟩'))
    assert parser.finish(is_cut=True) == [ToolCallEnd(index=0, is_complete=False)]
    assert parser.finish(is_cut=True) == []


def test_a_parser_is_replayed_from_the_tokens_emitted_so_far() -> None:
    ids = ids_of(f"{THOUGHT}yes⟪response⟩⟨tools⟩{CALL}⟪tools⟩⟪message⟩■")
    for cut in range(len(ids)):
        first, second = OutputParser(BYTES, "think"), OutputParser(BYTES, "think")
        before = first.feed(ids[:cut])
        assert second.feed(ids[:cut]) == before
        assert second.feed(ids[cut:]) == first.feed(ids[cut:])


def test_an_argument_of_a_megabyte_passes_whole() -> None:
    value = 'line "one"\n中' * 70_000
    text = f'⟨call tool="w"⟩⟨argument key="t" type="string"⟩{value}⟪argument⟩⟪call⟩■'
    ids = ids_of(text)
    parser = OutputParser(BYTES, "think")
    events: list[Event] = []
    for begin in range(0, len(ids), 64):
        events.extend(parser.feed(ids[begin : begin + 64]))
    (call,) = assemble(events).tool_calls
    assert json.loads(call.arguments) == {"t": value}
