"""The shipped checkpoint through the whole stack: its answers are the bare model's, whatever is
cached, and they follow the picture."""

import base64
import json
import random
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stack import Api, Stack, api, running_stack

from k3core.engine.local import LocalEngine, LocalImage, LocalRequest
from k3text.chat_format.conversation import AssistantMessage, Conversation, Message, TextPart
from k3text.chat_format.prompt import render_prompt_ids
from k3text.images.patchify import normalise
from k3text.images.processor import cut
from k3text.parsers.assemble import assemble
from k3text.parsers.output_parser import OutputParser
from k3wire.messages.sampling import SamplingParams
from train_nano.lessons import Lessons
from train_nano.model import read_processing
from train_nano.probes import SKILLS
from train_nano.rows import conversation_of, options_of, sizes_of
from train_nano.scenes import Scene, Thing, picture
from train_nano.talk import Talk

NANO = Path(__file__).parents[2] / "checkpoints" / "k3-nano"
# Pages for a few hundred tokens only, so that a handful of requests evicts what came before.
SMALL_ARENA = {"K3_PREFILL_UNIT": "16", "K3_DECODE_UNIT": "16", "K3_PREFILL_ARENA": "4194304"}
ASKED = ("colour", "shape", "count", "left or right", "earlier picture", "variables", "JSON")


@pytest.fixture(scope="module")
def nano_stack(tmp_path_factory: pytest.TempPathFactory) -> Generator[Stack, None, None]:
    with running_stack(tmp_path_factory.mktemp("nano"), NANO, **SMALL_ARENA) as running:
        yield running


def talks(names: tuple[str, ...], count: int) -> list[Talk]:
    _, config = read_processing(NANO)
    lessons = Lessons("held_out", config)
    draw = random.Random(99)
    return [SKILLS[name].make(lessons, draw) for _ in range(count) for name in names]


def asked(talk: Talk) -> list[Message]:
    """The messages before the last answer, without thoughts, as a client keeps them."""
    messages, _ = conversation_of(talk, "max")
    last = max(i for i, m in enumerate(messages) if isinstance(m, AssistantMessage))
    return [
        AssistantMessage(content=m.content, tool_calls=m.tool_calls)
        if isinstance(m, AssistantMessage)
        else m
        for m in messages[:last]
    ]


def body_of(client: Api, talk: Talk, **fields: Any) -> dict[str, Any]:
    """The same talk as a client of the API writes it."""
    body = client.body("", max_completion_tokens=120, reasoning_effort="max", **fields)
    body["messages"] = [spoken(message, talk) for message in asked(talk)]
    if talk.response_format is not None:
        kind = talk.response_format.kind
        body["response_format"] = {"type": kind}
        if kind == "json_schema":
            schema = {"name": "answer", "schema": talk.response_format.schema}
            body["response_format"]["json_schema"] = schema
    return body


def spoken(message: Any, talk: Talk) -> dict[str, Any]:
    role = type(message).__name__.removesuffix("Message").lower()
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
            continue
        data = base64.b64encode(talk.pictures[part.index].data).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    return {"role": role, "content": parts}


def bare_answer(engine: LocalEngine, talk: Talk) -> tuple[str, str]:
    """Thought and answer of the model alone."""
    tokenizer, config = read_processing(NANO)
    images = tuple(cut(shown.data, config) for shown in talk.pictures)
    prompt = render_prompt_ids(
        Conversation(messages=tuple(asked(talk)), tools=talk.tools),
        options_of(talk, "max"),
        sizes_of(images),
        tokenizer,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=120, stop_token_ids=(tokenizer.specials.end_of_msg,)
    )
    pictures = [
        LocalImage(torch.from_numpy(normalise(i.pixels, config)), i.grid_thw) for i in images
    ]
    request = LocalRequest(memoryview(prompt.token_ids).cast("i").tolist(), sampling, pictures)
    (answer,) = engine.generate_all([request])
    parser = OutputParser(tokenizer, prompt.start_channel)
    said = assemble([*parser.feed(answer.token_ids), *parser.finish(is_cut=False)])
    return said.reasoning, said.content


def visible(answer: dict[str, Any]) -> tuple[str, str]:
    message = answer["choices"][0]["message"]
    return message.get("reasoning_content") or "", message["content"] or ""


async def answered(client: Api, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await client.post(body)
    assert status == 200, answer
    return answer


@pytest.mark.timeout(240)
async def test_answers_are_the_bare_models_cold_warm_and_partly_evicted(
    nano_stack: Stack,
) -> None:
    engine = LocalEngine(NANO)
    listed = talks(ASKED, 3)
    bare = [bare_answer(engine, talk) for talk in listed]
    cached: list[int] = []
    async with api(nano_stack) as client:
        for talk, wanted in zip(listed, bare, strict=True):
            cold = await answered(client, body_of(client, talk, cache_salt="cold"))
            first = await answered(client, body_of(client, talk))
            again = await answered(client, body_of(client, talk))
            assert visible(cold) == visible(first) == visible(again) == wanted
            cached.append(again["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert min(cached) > 0
        partly: list[int] = []
        for talk, wanted in zip(listed, bare, strict=True):
            later = await answered(client, body_of(client, talk))
            assert visible(later) == wanted
            partly.append(later["usage"]["prompt_tokens_details"]["cached_tokens"])
    # Some of what the first round kept has made room for the rest by now.
    assert sum(partly) < sum(cached)


async def test_another_picture_of_the_same_size_gets_its_own_answer(nano_stack: Stack) -> None:
    things = (Thing("red", "circle", 30.0, 50.0, 13.0), Thing("blue", "square", 80.0, 60.0, 13.0))
    shown = Scene(224, 224, 2.0, things)
    swapped = replace(shown, things=(replace(things[0], colour="green"), things[1]))
    answers: list[str] = []
    async with api(nano_stack) as client:
        for scene in (shown, swapped, shown):
            data = base64.b64encode(picture(scene, random.Random(5)).data).decode()
            parts = [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                {"type": "text", "text": "What colour is the circle in the picture?"},
            ]
            body = client.body(parts, max_completion_tokens=60, reasoning_effort="max")
            answers.append(visible(await answered(client, body))[1])
    assert answers == ["red", "green", "red"]


async def test_a_tool_is_called_and_its_result_is_used(nano_stack: Stack) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather.",
            "parameters": parameters,
        },
    }
    async with api(nano_stack) as client:
        body = client.body(
            "Get the weather for city Paris.",
            tools=[tool],
            max_completion_tokens=120,
            reasoning_effort="max",
        )
        message = (await answered(client, body))["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        body["messages"] += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "18"},
        ]
        assert "18" in visible(await answered(client, body))[1]
