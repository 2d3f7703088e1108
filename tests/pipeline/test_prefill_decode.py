import asyncio
import contextlib
import json
import random
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.worker_pair import END
from support.worker_processes import START_S, Processes, can_run_mooncake, worker_processes

from k3core.engine.local import LocalEngine, LocalRequest
from k3core.engine.parts import EngineSizes
from k3core.weights.random_checkpoint import random_config, write_random_checkpoint
from k3text.chat_format.conversation import Conversation, RenderOptions, UserMessage
from k3text.chat_format.prompt import render_prompt_ids
from k3text.tokenizer import Tokenizer
from k3text.vocabulary import write_vocabulary
from k3wire.errors import DeadlineExceeded, NoResponders, ShuttingDown
from k3wire.messages.sampling import SamplingParams

pytestmark = pytest.mark.skipif(not can_run_mooncake(), reason="Mooncake's libraries are absent")

NUM_BASE_RANKS = 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(folder, random_config("micro", NUM_BASE_RANKS), seed=5)
    write_vocabulary(folder, NUM_BASE_RANKS)
    return folder


def with_processes(
    test: Callable[[Processes], Awaitable[None]], folder: Path, checkpoint: Path, **settings: str
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(START_S + 60.0),
            worker_processes(folder, checkpoint, **settings) as processes,
        ):
            await test(processes)

    asyncio.run(run())


def ask(tokenizer: Tokenizer, text: str) -> list[int]:
    conversation = Conversation(messages=(UserMessage(content=text),))
    rendered = render_prompt_ids(conversation, RenderOptions(), (), tokenizer)
    return array("i", rendered.token_ids).tolist()


def test_a_scripted_pair_answers_by_the_last_user_text_and_drains(
    tmp_path: Path, checkpoint: Path
) -> None:
    tokenizer = Tokenizer.from_directory(checkpoint)
    script = tmp_path / "script.jsonl"
    lines = [
        {"match": "cat", "text": "<|close|>think<|sep|><|open|>response<|sep|>A cat."},
        {"match": "", "token_ids": [5, 6, 7], "split_every": 2},
    ]
    script.write_text("\n".join(map(json.dumps, lines)))
    end = tokenizer.specials.end_of_msg

    async def test(processes: Processes) -> None:
        gateway = processes.gateway
        for name, text in (("cat", "What is this cat?"), ("dog", "And the dog?")):
            await gateway.send(gateway.request(name, ask(tokenizer, text), stop_token_ids=(end,)))
            last = await gateway.until_ended(name)
            assert last.finish_reason == "stop"
        expected = [
            tokenizer.specials.close,
            *tokenizer.encode_segment("think"),
            tokenizer.specials.sep,
            tokenizer.specials.open,
            *tokenizer.encode_segment("response"),
            tokenizer.specials.sep,
            *tokenizer.encode_segment("A cat."),
            end,
        ]
        assert gateway.tokens("cat") == expected
        assert gateway.tokens("dog") == [5, 6, 7, end]
        assert [len(delta.token_ids) for delta in gateway.deltas("dog")] == [1, 2, 1]
        for role in ("prefill", "decode"):
            processes.terminate(role)
            assert await processes.exit_status(role) == 0

    with_processes(test, tmp_path, checkpoint, K3_ENGINE="scripted", K3_SCRIPT=str(script))


def test_tokens_that_travelled_are_those_of_one_process(tmp_path: Path, checkpoint: Path) -> None:
    unit = 16
    draw = random.Random(9)
    stem = [draw.randrange(NUM_BASE_RANKS) for _ in range(100)]
    prompts = [
        stem[: draw.randrange(100)] + [draw.randrange(NUM_BASE_RANKS) for _ in range(20)]
        for _ in range(16)
    ]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=6)
        if index % 2
        else SamplingParams(temperature=0.8, top_p=0.9, seed=index, max_tokens=6)
        for index in range(16)
    ]
    engine = LocalEngine(checkpoint, EngineSizes(arena_bytes=16 << 20, unit_tokens=unit))
    expected = [
        engine.generate_all([LocalRequest(prompt, params, salt=str(index))])[0].token_ids
        for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]

    async def test(processes: Processes) -> None:
        gateway = processes.gateway
        # All at once, and then again on warm caches.
        for round_name in ("cold", "warm"):
            names = [f"{round_name}-{index}" for index in range(16)]
            for name, prompt, params in zip(names, prompts, sampling, strict=True):
                fields = {field: getattr(params, field) for field in params.__struct_fields__}
                await gateway.send(gateway.request(name, prompt, **fields))
            for name, tokens in zip(names, expected, strict=True):
                await gateway.until_ended(name)
                assert tuple(gateway.tokens(name)) == tokens, name
        hits = [gateway.deltas(f"warm-{index}")[0].num_cached_tokens for index in range(16)]
        assert hits == [(len(prompt) - 1) // unit * unit for prompt in prompts]

    settings = {"K3_PREFILL_UNIT": str(unit), "K3_DECODE_UNIT": str(unit), "K3_PREFILL_CHUNK": "64"}
    with_processes(test, tmp_path, checkpoint, **settings)


def test_a_killed_decode_worker_is_worker_lost_and_its_successor_serves(
    tmp_path: Path, checkpoint: Path
) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"match": "", "token_ids": [1, 2, 3]}')
    tokenizer = Tokenizer.from_directory(checkpoint)

    async def test(processes: Processes) -> None:
        gateway = processes.gateway
        prompt = ask(tokenizer, "hello")
        await gateway.send(gateway.request("before", prompt))
        await gateway.until_ended("before")
        processes.kill("decode")
        await processes.children["decode"].wait()
        await gateway.send(gateway.request("lost", prompt))
        last = await gateway.until_ended("lost")
        assert last.error is not None
        assert last.error.code == "worker_lost"
        dead = gateway.beats.pop("decode").worker_id
        await processes.start("decode")
        await processes.ready()
        assert gateway.beats["decode"].worker_id != dead
        await gateway.send(gateway.request("after", prompt))
        await gateway.until_ended("after")
        assert gateway.tokens("after") == gateway.tokens("before")

    with_processes(test, tmp_path, checkpoint, K3_ENGINE="scripted", K3_SCRIPT=str(script))


def test_a_drain_takes_no_more_and_lets_running_answers_end(
    tmp_path: Path, checkpoint: Path
) -> None:
    script = tmp_path / "script.jsonl"
    line = {
        "match": "",
        "token_ids": list(range(1, 31)),
        "first_token_ms": 1500,
        "per_token_ms": 20,
    }
    script.write_text(json.dumps(line))
    tokenizer = Tokenizer.from_directory(checkpoint)

    async def test(processes: Processes) -> None:
        gateway = processes.gateway
        prompt = ask(tokenizer, "hello")
        await gateway.send(gateway.request("r", prompt))
        # Reserved and not committed: the hand-off itself falls into both drains.
        await gateway.until(lambda: gateway.beats["decode"].load.num_waiting == 1)
        processes.terminate("prefill")
        processes.terminate("decode")
        await gateway.until(lambda: gateway.beats["prefill"].is_draining)
        # It is announced before it is enforced, so that routers hear of it in time.
        with pytest.raises((ShuttingDown, NoResponders)):
            for number in range(1000):
                # One that crosses the end of the subscription may be lost, as any message on
                # core NATS may; the one after it is answered.
                with contextlib.suppress(DeadlineExceeded):
                    await gateway.send(gateway.request(f"late-{number}", prompt, max_tokens=1))
        last = await gateway.until_ended("r")
        assert last.error is None
        assert gateway.tokens("r") == [*range(1, 31), END]
        for role in ("prefill", "decode"):
            assert await processes.exit_status(role) == 0

    with_processes(test, tmp_path, checkpoint, K3_ENGINE="scripted", K3_SCRIPT=str(script))


def test_a_killed_prefill_worker_leaves_nothing_reserved(tmp_path: Path, checkpoint: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"match": "", "token_ids": [1, 2, 3], "first_token_ms": 600000}')
    tokenizer = Tokenizer.from_directory(checkpoint)

    async def test(processes: Processes) -> None:
        gateway = processes.gateway
        await gateway.send(gateway.request("r", ask(tokenizer, "hello")))
        await gateway.until(lambda: gateway.beats["decode"].load.num_waiting == 1)
        processes.kill("prefill")
        await gateway.until(lambda: gateway.beats["decode"].load.num_waiting == 0)
        load = gateway.beats["decode"].load
        assert load.num_free_pages == load.num_pages

    with_processes(test, tmp_path, checkpoint, K3_ENGINE="scripted", K3_SCRIPT=str(script))
