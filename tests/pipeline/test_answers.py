"""Answers through the whole stack: equal streamed, warm, alone, together and bare."""

import asyncio
import base64
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from support.pictures import encode, gradient
from support.stack import Stack, api

from k3core.engine.local import LocalEngine, LocalImage, LocalRequest
from k3text.chat_format.conversation import (
    Conversation,
    ImagePart,
    ImageSize,
    RenderOptions,
    TextPart,
    UserMessage,
)
from k3text.chat_format.prompt import render_prompt_ids
from k3text.images.config import read_processor_config
from k3text.images.processor import process
from k3text.parsers.output_parser import OutputParser
from k3text.tokenizer import Tokenizer
from k3wire.messages.sampling import SamplingParams

WORDS = [
    "a",
    "red",
    "circle",
    "left",
    "of",
    "two",
    "blue",
    "squares",
    "and",
    "one",
    "green",
    "triangle",
    "above",
    "seven",
    "grey",
    "lines",
]


def sized_picture(width: int, height: int, seed: int) -> bytes:
    return encode((gradient(width, height).astype(int) * (seed + 2) % 256).astype("uint8"), "PNG")


def picture(seed: int) -> bytes:
    generator = random.Random(seed)
    return sized_picture(generator.randrange(20, 200), generator.randrange(20, 200), seed)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def question(seed: int, *, with_image: bool) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    text = " ".join(generator.choice(WORDS) for _ in range(generator.randrange(3, 120)))
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if with_image:
        image = {"type": "image_url", "image_url": {"url": data_url(picture(seed % 7))}}
        parts.insert(generator.randrange(2), image)
    return parts


def visible(message: dict[str, Any]) -> tuple[str, str]:
    return message.get("reasoning_content", ""), message["content"] or ""


async def test_the_streamed_text_is_the_whole_text(stack: Stack) -> None:
    async with api(stack) as client:
        for seed in range(6):
            content = question(seed, with_image=seed % 2 == 0)
            body = client.body(content, max_completion_tokens=24)
            whole = await client.message(body)
            events = await client.stream(body | {"stream_options": {"include_usage": True}})
            deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
            reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
            text = "".join(delta.get("content", "") for delta in deltas)
            assert (reasoning, text) == visible(whole)
            finishes = [e["choices"][0]["finish_reason"] for e in events if e["choices"]]
            assert [f for f in finishes if f] == ["length"]
            assert events[-1]["usage"]["completion_tokens"] == 24


async def test_a_warm_answer_equals_the_first(stack: Stack) -> None:
    async with api(stack) as client:
        for seed in range(100, 110):
            body = client.body(question(seed, with_image=seed % 2 == 0))
            first = await client.post(body)
            second = await client.post(body)
            cached = second[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
            prompt = second[1]["usage"]["prompt_tokens"]
            assert cached == (prompt - 1) // 128 * 128
            assert visible(first[1]["choices"][0]["message"]) == visible(
                second[1]["choices"][0]["message"]
            )


async def test_eight_clients_at_once_get_what_each_gets_alone(stack: Stack) -> None:
    async with api(stack) as client:
        bodies = [
            client.body(question(seed, with_image=seed % 3 == 0), cache_salt=f"alone{seed}")
            for seed in range(200, 208)
        ]
        alone = [visible(await client.message(body)) for body in bodies]
        fresh = [body | {"cache_salt": f"together{i}"} for i, body in enumerate(bodies)]
        together = await asyncio.gather(*(client.message(body) for body in fresh))
        assert [visible(message) for message in together] == alone


class Bare:
    """The model alone, with no cache, no bus and no other process."""

    def __init__(self, checkpoint: Path) -> None:
        self.engine = LocalEngine(checkpoint)
        self.tokenizer = Tokenizer.from_directory(checkpoint)
        self.config = read_processor_config(checkpoint)
        self.count = 0

    def answer(self, parts: list[dict[str, Any]], max_tokens: int) -> tuple[str, str]:
        images, content = [], []
        for part in parts:
            if part["type"] == "text":
                content.append(TextPart(text=part["text"]))
                continue
            data = base64.b64decode(part["image_url"]["url"].split(",")[1])
            images.append(process(data, self.config))
            content.append(ImagePart(index=len(images) - 1))
        sizes = [ImageSize(width=i.width, height=i.height, num_tokens=i.num_tokens) for i in images]
        conversation = Conversation(messages=(UserMessage(content=tuple(content)),))
        prompt = render_prompt_ids(conversation, RenderOptions(effort="low"), sizes, self.tokenizer)
        ids = array("i")
        ids.frombytes(prompt.token_ids)
        self.count += 1
        request = LocalRequest(
            prompt_ids=ids,
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                stop_token_ids=(self.tokenizer.specials.end_of_msg,),
            ),
            images=[LocalImage(torch.from_numpy(i.patches), i.grid_thw) for i in images],
            salt=str(self.count),
        )
        (found,) = self.engine.generate_all([request])
        parser = OutputParser(self.tokenizer, prompt.start_channel)
        events = [*parser.feed(found.token_ids), *parser.finish(is_cut=True)]
        text: dict[str, str] = {"ReasoningDelta": "", "ContentDelta": ""}
        for event in events:
            text[type(event).__name__] += event.text
        return text["ReasoningDelta"], text["ContentDelta"]


@pytest.mark.timeout(240)
async def test_200_random_prompts_answer_like_the_bare_model(stack: Stack) -> None:
    bare = Bare(stack.checkpoint)
    async with api(stack) as client:

        async def ask(seed: int) -> tuple[str, str]:
            parts = question(seed, with_image=seed % 4 == 0)
            body = client.body(parts, max_completion_tokens=6)
            return visible(await client.message(body))

        for start in range(1000, 1200, 20):
            seeds = range(start, start + 20)
            served = await asyncio.gather(*map(ask, seeds))
            for seed, found in zip(seeds, served, strict=True):
                wanted = bare.answer(question(seed, with_image=seed % 4 == 0), 6)
                assert found == wanted, seed


async def test_cac_04_another_picture_of_the_same_size_is_another_prompt(stack: Stack) -> None:
    async with api(stack) as client:
        cached: list[int] = []
        for seed in range(4):
            image = {"url": data_url(sized_picture(200, 160, seed))}
            parts = [
                {"type": "image_url", "image_url": image},
                {"type": "text", "text": "what is it"},
            ]
            status, answer = await client.post(client.body(parts))
            assert status == 200
            usage = answer["usage"]
            before_image = usage["prompt_tokens"] - usage["prompt_tokens_details"]["image_tokens"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            # What all four share is the text before the picture, and nothing of it.
            assert cached[-1] <= before_image
        assert len(set(cached[1:])) == 1


async def test_an_image_by_address_is_the_image_by_value(stack: Stack) -> None:
    data = picture(3)
    num_served = 0

    async def serve(request: web.Request) -> web.Response:
        nonlocal num_served
        num_served += 1
        return web.Response(body=data, content_type="image/png")

    app = web.Application()
    app.router.add_get("/p.png", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with api(stack) as client:
            text = {"type": "text", "text": "describe"}
            urls = (f"http://127.0.0.1:{port}/p.png", data_url(data))
            answers = [
                visible(
                    await client.message(
                        client.body([{"type": "image_url", "image_url": {"url": url}}, text])
                    )
                )
                for url in (*urls, urls[0])
            ]
        assert answers[0] == answers[1] == answers[2]
        assert num_served == 1
    finally:
        await runner.cleanup()


async def test_usage_counts_add_up(stack: Stack) -> None:
    async with api(stack) as client:
        _, answer = await client.post(client.body(question(4, with_image=True)))
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert 0 < usage["prompt_tokens_details"]["image_tokens"] < usage["prompt_tokens"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] <= 12
        stages = [line["stage"] for line in usage["k3_ttft_ledger"]["lines"]]
        assert stages[0] == "gateway"
