"""What is rendered is what is parsed, however hostile the text and however cut the tokens."""

import json
import math
from array import array
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile_chat import random_answer, random_conversation

from k3text.chat_format.arguments import split_arguments
from k3text.chat_format.conversation import (
    AssistantMessage,
    Conversation,
    RenderOptions,
    ToolCall,
)
from k3text.chat_format.prompt import render_prompt_ids
from k3text.parsers.assemble import assemble
from k3text.parsers.events import (
    ContentDelta,
    Event,
    ParsedCall,
    ReasoningDelta,
)
from k3text.parsers.output_parser import OutputParser
from k3text.tokenizer import Tokenizer
from k3text.vocabulary import learn_ranks

TOKENIZER = Tokenizer(learn_ranks(384))


def token_ids(data: bytes) -> list[int]:
    return list(array("i", data))


def answer_ids(random: Random, thinking: bool) -> tuple[AssistantMessage, list[int]]:
    """A random answer in a random conversation, and the tokens a model would write for it."""
    conversation, images = random_conversation(random)
    answer = random_answer(random)
    whole = Conversation(messages=(*conversation.messages, answer), tools=conversation.tools)
    options = RenderOptions(thinking=thinking)
    prompt = render_prompt_ids(conversation, options, images, TOKENIZER)
    history = render_prompt_ids(
        whole, RenderOptions(thinking=thinking, add_generation_prompt=False), images, TOKENIZER
    )
    assert history.token_ids.startswith(prompt.token_ids)
    assert prompt.num_tokens * 4 == len(prompt.token_ids)
    ids = token_ids(prompt.token_ids)
    for span, size in zip(prompt.image_spans, images, strict=True):
        pads = ids[span.offset : span.offset + span.num_tokens]
        assert pads == [TOKENIZER.specials.media_pad] * size.num_tokens
    assert ids.count(TOKENIZER.specials.media_pad) == sum(size.num_tokens for size in images)
    return answer, token_ids(history.token_ids[len(prompt.token_ids) :])


def parse(ids: list[int], thinking: bool, cuts: list[int]) -> list[Event]:
    parser = OutputParser(TOKENIZER, "think" if thinking else "response")
    borders = [0, *sorted(cuts), len(ids)]
    events: list[Event] = []
    for begin, end in pairwise(borders):
        events.extend(parser.feed(ids[begin:end]))
    events.extend(parser.finish(is_cut=False))
    return events


def assert_call(parsed: ParsedCall, call: ToolCall) -> None:
    assert (parsed.name, parsed.is_complete) == (call.name, True)
    arguments = call.arguments
    if split_arguments(arguments) is None:
        # Nothing but white space is no arguments, which a client must be able to parse.
        is_blank = isinstance(arguments, str) and not arguments.strip(" \t\n\r")
        assert parsed.arguments == ("{}" if is_blank else arguments)
        return
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    assert json.loads(parsed.arguments) == arguments


def assert_round_trip(seed: int) -> None:
    random = Random(seed)
    thinking = random.random() < 0.7
    answer, ids = answer_ids(random, thinking)
    cuts = [random.randint(0, len(ids)) for _ in range(random.randint(0, 8))]
    parsed = assemble(parse(ids, thinking, cuts))
    assert parsed.reasoning == (answer.reasoning if thinking else "")
    assert parsed.content == answer.content
    assert len(parsed.tool_calls) == len(answer.tool_calls)
    for found, call in zip(parsed.tool_calls, answer.tool_calls, strict=True):
        assert_call(found, call)


def test_hostile_conversations_come_back_as_they_were() -> None:
    for seed in range(1_500):
        assert_round_trip(seed)


@pytest.mark.slow
def test_ten_thousand_hostile_conversations_come_back_as_they_were() -> None:
    for seed in range(10_000, 20_000):
        assert_round_trip(seed)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), thinking=st.booleans(), data=st.data())
def test_every_split_into_deltas_gives_the_same_message(
    seed: int, thinking: bool, data: st.DataObject
) -> None:
    _, ids = answer_ids(Random(seed), thinking)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=20))
    whole = parse(ids, thinking, [])
    one_by_one = parse(ids, thinking, list(range(len(ids))))
    for other in (parse(ids, thinking, cuts), one_by_one):
        assert assemble(other) == assemble(whole)
        assert shown_positions(other) == shown_positions(whole)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_in_any_split_give_the_same_message_and_no_marker(data: st.DataObject) -> None:
    specials = TOKENIZER.specials
    words = [
        TOKENIZER.encode_segment(word)
        for word in ("think", "response", "tools", ' call tool="f"', "call", "message", "hello ",
                     'argument key="k" type="object"', "json", "argument", '{"a":', "中", " ", "1")
    ]  # fmt: skip
    markers = [[specials.open], [specials.close], [specials.sep], [specials.end_of_msg]]
    pieces = data.draw(
        st.lists(
            st.one_of(
                st.sampled_from(markers),
                st.sampled_from(words),
                st.builds(lambda token: [token], st.integers(0, TOKENIZER.vocab_size - 1)),
            ),
            max_size=60,
        )
    )
    ids = [token for piece in pieces for token in piece]
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=20))
    whole = parse(ids, True, [])
    message = assemble(whole)
    for other in (parse(ids, True, cuts), parse(ids, True, list(range(len(ids))))):
        assert assemble(other) == message
        assert shown_positions(other) == shown_positions(whole)
    shown = message.reasoning + message.content
    for name in (specials.open, specials.close, specials.sep, specials.end_of_msg):
        assert (TOKENIZER.special_name(name) or "") not in shown
    kinds = [kind_of(event) for event in whole]
    assert kinds == sorted(kinds)


def shown_positions(events: list[Event]) -> tuple[list[int], list[int]]:
    reasoning: list[int] = []
    content: list[int] = []
    for event in events:
        match event:
            case ReasoningDelta(positions=positions):
                reasoning.extend(positions)
            case ContentDelta(positions=positions):
                content.extend(positions)
            case _:
                pass
    return reasoning, content


def kind_of(event: Event) -> int:
    match event:
        case ReasoningDelta():
            return 0
        case ContentDelta():
            return 1
        case _:
            return 2


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_output_cut_by_length_is_a_prefix_of_the_whole_output(seed: int, share: float) -> None:
    _, ids = answer_ids(Random(seed), True)
    whole = assemble(parse(ids, True, []))
    parser = OutputParser(TOKENIZER, "think")
    kept = ids[: math.floor(share * len(ids))]
    cut = assemble([*parser.feed(kept), *parser.finish(is_cut=True)])
    assert whole.reasoning.startswith(cut.reasoning.removesuffix("\ufffd"))
    assert whole.content.startswith(cut.content.removesuffix("\ufffd"))
    for found, call in zip(cut.tool_calls, whole.tool_calls, strict=False):
        if found.is_complete:
            assert found == call
        else:
            assert found.name == call.name
            assert call.arguments.startswith(found.arguments)
    assert all(call.is_complete for call in cut.tool_calls[:-1])
