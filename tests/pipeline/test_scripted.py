"""The gateway over real HTTP, with answers written by hand: streams, ends, keys, loads, leaving.

Only the forward pass is make-believe, so every token takes the way it takes in production, and each
test says exactly what the model would have written.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.sse import Answered, read_stream, whole_answer
from support.stack import Api, Stack, only, running_stack, until, watch

from k3wire.service.directory import Directory

KEY = "sk-right"
MAX_RUNNING = 8
SPLITS = (1, 2, 7, 1000)
SAID, SHOWN = "Hm 思考 🤔.", "Hello 你好 🎉, 👩‍👩‍👧 and 𝄞."
ARGUMENTS = ('{"city":"Par\\"is 巴黎","days":2}', '{"deep":{"a":[1,"é🎈"]}}')


def tag(name: str, **attributes: str) -> str:
    written = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"<|open|>{name}{written}<|sep|>"


def end(name: str) -> str:
    return f"<|close|>{name}<|sep|>"


def argument(key: str, kind: str, value: str) -> str:
    return tag("argument", key=key, type=kind) + value + end("argument")


def call(name: str, *blocks: str) -> str:
    return tag("call", tool=name, index="1") + "".join(blocks) + end("call")


def answer(said: str, shown: str, *calls: str) -> str:
    response = end("think") + tag("response") + shown + end("response")
    tools = tag("tools") + "".join(calls) + end("tools") if calls else ""
    return said + response + tools + end("message")


WEATHER = call(
    "get_weather", argument("city", "string", 'Par"is 巴黎'), argument("days", "number", "2")
)
DEEP = call("deep-er_2.x", argument("deep", "object", '{"a":[1,"é🎈"]}'))
EMPTY_RAW = call("raw", tag("json", type="object") + end("json"))
LINES: dict[str, dict[str, Any]] = {
    **{f"full{n}": {"text": answer(SAID, SHOWN, WEATHER, DEEP), "split_every": n} for n in SPLITS},
    **{f"stops{n}": {"text": answer("END", "one ENENDER two"), "split_every": n} for n in SPLITS},
    "cuts": {"text": answer("a🤔", "b🎉", call("f", argument("k", "string", "v\n"))), "split_every": 7},
    "plain": {"text": answer("", "plain")},
    "bare": {"text": "no thought" + end("response") + end("message")},
    "late stop": {"text": answer("", "x EN", call("f", argument("k", "string", "END")))},
    "odd calls": {"text": answer("", "", call("none"), EMPTY_RAW)},
    "cut call": {"text": answer("", "a") + tag("tools") + tag("call", tool="f") + tag("argument", key="k")},
    "ticks": {"text": answer("", "tick " * 2000), "per_token_ms": 10},
    "short ticks": {"text": answer("", "tick " * 40), "per_token_ms": 15},
    "slow": {"text": answer("", "slow"), "first_token_ms": 1500},
    "stuck": {"text": answer("", "stuck"), "first_token_ms": 60000},
    "pauses": {"text": answer("", "p"), "per_token_ms": 40, "split_every": 9},
}  # fmt: skip


def says(name: str) -> str:
    """What a user says to get a line's answer."""
    return f"[{name}]"


@pytest.fixture(scope="module")
def scripted(
    tmp_path_factory: pytest.TempPathFactory, micro_checkpoint: Path
) -> Generator[Stack, None, None]:
    folder = tmp_path_factory.mktemp("scripted")
    script = folder / "script.jsonl"
    lines = (json.dumps({"match": says(name), **line}) for name, line in LINES.items())
    script.write_text("\n".join(lines))
    settings = {
        "K3_GATEWAY_API_KEYS": f"{KEY},team:sk-team",
        "K3_GATEWAY_MAX_RUNNING": str(MAX_RUNNING),
        "K3_GATEWAY_KEEP_ALIVE_S": "0.2",
        "K3_GRACE_S": "6",
    }
    arguments = ("--engine", "scripted", "--script", str(script))
    with running_stack(folder / "run", micro_checkpoint, *arguments, **settings) as running:
        yield running


@contextlib.asynccontextmanager
async def client(stack: Stack, key: str = KEY) -> AsyncGenerator[Api, None]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        yield Api(stack, session)


def body(api: Api, name: str, **fields: Any) -> dict[str, Any]:
    return api.body(says(name), **{"max_completion_tokens": 4000, **fields})


async def stream(api: Api, request: dict[str, Any]) -> Answered:
    url = f"{api.stack.url}/v1/chat/completions"
    async with api.session.post(url, json=request | {"stream": True}) as response:
        return await read_stream(response)


async def both(api: Api, request: dict[str, Any]) -> Answered:
    """The answer, which is the same streamed with usage, streamed without, and whole."""
    status, found = await api.post(request)
    assert status == 200, found
    whole = whole_answer(found)
    options = {"stream_options": {"include_usage": True}}
    with_usage, without = await asyncio.gather(stream(api, request | options), stream(api, request))
    assert with_usage.has_usage_chunk
    assert not without.has_usage_chunk
    assert with_usage.seen == without.seen == whole.seen
    return whole


async def test_reasoning_content_and_calls_come_whole_at_every_split(scripted: Stack) -> None:
    async with client(scripted) as api:
        found = [await both(api, body(api, f"full{n}")) for n in SPLITS]
    for one in found:
        assert (one.reasoning, one.content, one.finish) == (SAID, SHOWN, "tool_calls")
        assert one.calls == [("get_weather", ARGUMENTS[0]), ("deep-er_2.x", ARGUMENTS[1])]
        assert one.num_reasoning_tokens == found[0].num_reasoning_tokens > len(SAID)
        assert one.num_output_tokens == found[0].num_output_tokens


async def test_no_more_calls_are_shown_than_the_client_wants(scripted: Stack) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    async with client(scripted) as api:
        for fields, count in (
            ({"tool_choice": "none"}, 0),
            ({"tool_choice": "auto"}, 2),
            ({"parallel_tool_calls": False}, 1),
            ({"parallel_tool_calls": False, "tool_choice": "none"}, 0),
        ):
            found = await both(api, body(api, "full7", tools=[tool], **fields))
            finish = "tool_calls" if count else "stop"
            assert (found.content, found.finish, len(found.calls)) == (SHOWN, finish, count)


async def test_calls_without_arguments_and_calls_that_never_end(scripted: Stack) -> None:
    async with client(scripted) as api:
        found = await both(api, body(api, "odd calls"))
        assert found.calls == [("none", "{}"), ("raw", "{}")]
        status, raw = await api.post(body(api, "cut call"))
        cut = whole_answer(raw)
        streamed = await stream(api, body(api, "cut call"))
    assert (status, cut.content, cut.calls, cut.finish) == (200, "a", [], "stop")
    assert (streamed.content, streamed.finish) == ("a", "stop")


async def test_a_stop_string_is_never_shown_and_ends_visible_text_only(scripted: Stack) -> None:
    async with client(scripted) as api:
        for n in SPLITS:
            for stop, content in (
                (["END"], "one EN"),
                ("ENDER", "one EN"),
                ("x", "one ENENDER two"),
            ):
                found = await both(api, body(api, f"stops{n}", stop=stop))
                assert (found.reasoning, found.content, found.finish) == ("END", content, "stop")
        found = await both(api, body(api, "late stop", stop=["END"]))
        assert (found.content, found.calls, found.finish) == ("x EN", [("f", '{"k":"END"}')], "tool_calls")  # fmt: skip


async def test_an_answer_cut_anywhere_is_the_beginning_of_the_whole_one(scripted: Stack) -> None:
    async with client(scripted) as api:
        whole = await both(api, body(api, "cuts"))
        slots = asyncio.Semaphore(MAX_RUNNING - 1)

        async def cut(limit: int) -> None:
            request = body(api, "cuts", max_completion_tokens=limit)
            async with slots:
                streamed = await stream(api, request)
            assert streamed.finish == "length"
            assert streamed.num_output_tokens == limit
            # A character that was cut becomes one replacement character.
            assert whole.reasoning.startswith(streamed.reasoning.removesuffix("\ufffd"))
            assert whole.content.startswith(streamed.content.removesuffix("\ufffd"))
            for (name, text), (wanted_name, wanted) in zip(
                streamed.calls, whole.calls, strict=False
            ):
                assert name == wanted_name
                assert wanted.startswith(text)
            if limit % 8 == 0:
                async with slots:
                    _, found = await api.post(request)
                again = whole_answer(found)
                assert (again.reasoning, again.content) == (streamed.reasoning, streamed.content)

        await asyncio.gather(*(cut(limit) for limit in range(1, whole.num_output_tokens)))
        exact = await both(api, body(api, "cuts", max_completion_tokens=whole.num_output_tokens))
        assert exact.seen == whole.seen


async def test_without_thinking_everything_is_content(scripted: Stack) -> None:
    async with client(scripted) as api:
        found = await both(api, body(api, "bare", thinking={"type": "disabled"}))
    assert (found.reasoning, found.content, found.finish) == ("", "no thought", "stop")
    assert found.num_reasoning_tokens == 0


async def test_a_prompt_too_long_for_the_bus_arrives_in_pieces(scripted: Stack) -> None:
    async with client(scripted) as api:
        text = "a" * 20000 + says("plain")
        status, found = await api.post(api.body(text, max_completion_tokens=4000))
    assert (status, found["choices"][0]["message"]["content"]) == (200, "plain"), found
    assert found["usage"]["prompt_tokens"] > 16384


async def test_only_a_right_key_opens_the_api(scripted: Stack) -> None:
    cases: list[tuple[dict[str, str], int]] = [
        ({}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": f"Bearer team:{KEY}"}, 401),
        ({"authorization": f"bearer {KEY}"}, 200),
        ({"authorization": "Bearer sk-team"}, 200),
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": "wrong"}, 401),
    ]
    async with client(scripted, key="") as api:
        for headers, wanted in cases:
            for method, path in (("POST", "chat/completions"), ("GET", "models"), ("GET", "models/micro")):  # fmt: skip
                async with api.session.request(
                    method, f"{scripted.url}/v1/{path}", headers=headers,
                    json=body(api, "plain") if method == "POST" else None,
                ) as response:  # fmt: skip
                    assert response.status == wanted, (headers, path)
                    found = await response.json()
                    if wanted == 401:
                        assert set(found["error"]) == {"message", "type", "param", "code"}
                        assert found["error"]["code"] == "invalid_api_key"
                        assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/healthz", "/ping", "/ready"):
            async with api.session.get(scripted.url + path) as response:
                assert response.status == 200


async def test_a_sound_request_id_comes_back_and_no_other_does(scripted: Stack) -> None:
    async with client(scripted) as api:
        for name, comes_back in (("my-id.1_A", True), ("a" * 129, False), ("a b", False)):
            for method, path, fields in (
                ("POST", "/v1/chat/completions", body(api, "plain")),
                ("POST", "/v1/chat/completions", body(api, "plain", stream=True)),
                ("POST", "/v1/chat/completions", {"model": 1}),
                ("GET", "/v1/models", None),
                ("GET", "/v1/models/no/such", None),
                ("GET", "/nowhere", None),
            ):
                headers = {"x-request-id": name}
                url = scripted.url + path
                async with api.session.request(method, url, json=fields, headers=headers) as found:
                    assert (found.headers["x-request-id"] == name) == comes_back
                    assert found.headers["x-request-id"]


async def is_at(directory: Directory, role: str, count: int) -> None:
    def is_there() -> bool:
        beat = only(directory, role)
        return beat is not None and beat.load.num_running + beat.load.num_waiting == count

    await until(is_there, 10)


async def all_free(directory: Directory, within_s: float) -> None:
    def is_free() -> bool:
        loads = [beat.load for beat in directory.all()]
        return len(loads) == 6 and all(load.num_running + load.num_waiting == 0 for load in loads)

    await until(is_free, within_s)


async def test_requests_past_the_limit_are_told_to_slow_down(scripted: Stack) -> None:
    async with watch(scripted) as directory, client(scripted) as api:
        await all_free(directory, 5)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(api.post(body(api, "stuck"))) for _ in range(MAX_RUNNING)]
            await is_at(directory, "gateway", MAX_RUNNING)
            url = f"{scripted.url}/v1/chat/completions"
            async with api.session.post(url, json=body(api, "plain")) as response:
                found = await response.json()
                assert (response.status, found["error"]["code"]) == (429, "slow_down")
                assert found["error"]["type"] == "rate_limit_error"
                assert set(found["error"]) == {"message", "type", "param", "code"}
                assert int(response.headers["retry-after"]) >= 1
            for task in tasks:
                task.cancel()
        await all_free(directory, 2)
        assert (await api.post(body(api, "plain")))[0] == 200


async def test_a_slow_first_token_delays_nobody_else(scripted: Stack) -> None:
    async with watch(scripted) as directory, client(scripted) as api:
        await all_free(directory, 5)
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(stream(api, body(api, "stuck")))
            await is_at(directory, "prefill", 1)
            assert (await both(api, body(api, "plain"))).content == "plain"
            assert not slow.done()
            slow.cancel()
        assert (await stream(api, body(api, "slow"))).content == "slow"


async def test_a_silent_stream_is_kept_alive_by_comments(scripted: Stack) -> None:
    async with client(scripted) as api:
        found = await stream(api, body(api, "pauses"))
    assert found.content == "p"
    assert found.num_comments > 0


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(("name", "role"), [("stuck", "prefill"), ("ticks", "decode")])
@pytest.mark.parametrize("is_abrupt", [True, False])
async def test_a_client_that_leaves_at_any_moment_frees_the_workers(
    scripted: Stack, name: str, role: str, is_stream: bool, is_abrupt: bool
) -> None:
    async with watch(scripted) as directory, client(scripted) as api:
        await all_free(directory, 5)
        data = json.dumps(body(api, name, stream=is_stream)).encode()
        host, port = scripted.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, port)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await is_at(directory, role, 1)
        if is_abrupt:
            writer.transport.abort()
        else:
            writer.close()
        await all_free(directory, 1.5)


async def test_a_stop_string_ends_the_workers_too(scripted: Stack) -> None:
    async with watch(scripted) as directory, client(scripted) as api:
        await all_free(directory, 5)
        found = await stream(api, body(api, "ticks", stop=["tick tick"]))
        assert (found.content, found.finish) == ("", "stop")
        await all_free(directory, 1.5)


# The last test here: it ends the stack.
async def test_sigterm_lets_a_stream_finish_and_tells_those_that_take_too_long(
    scripted: Stack,
) -> None:
    async with client(scripted) as api, asyncio.TaskGroup() as group:
        waiting = group.create_task(api.post(body(api, "stuck")))
        long = await api.session.post(
            f"{scripted.url}/v1/chat/completions", json=body(api, "ticks", stream=True)
        )
        url = f"{scripted.url}/v1/chat/completions"
        request = body(api, "short ticks", stream=True)
        async with api.session.post(url, json=request) as response:
            head = b""
            while b'"content":"t' not in head:
                head += await response.content.readuntil(b"\n\n")
            scripted.process.send_signal(signal.SIGTERM)
            found = await read_stream(response, head)
        last = (await long.content.read()).decode().rstrip("\n").rpartition("\n\n")[2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_shutting_down"
        status, refused = await waiting
        assert (status, refused["error"]["code"]) == (503, "server_shutting_down")
    assert found.finish == "stop"
    assert found.content == "tick " * 40
    assert await asyncio.to_thread(scripted.process.wait, 40) == 0
