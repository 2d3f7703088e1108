"""Requests that must be refused, each with its right 4xx; and nothing may leak."""

import asyncio
import base64
import json
from typing import Any

import pytest
from support.stack import Stack, api, only, until, watch

from k3wire.service.directory import Directory


def image(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


def data(raw: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(raw).decode()


DEEP = b"[" * 2000 + b"]" * 2000
CASES: dict[str, tuple[Any, int, str, str | None]] = {
    "no json": (b"{", 400, "invalid_json", None),
    "no object": (b"[]", 400, "invalid_json", None),
    "too deep": (b'{"a":' + DEEP + b"}", 400, "invalid_json", None),
    "no model": ({"model": None}, 400, "invalid_value", "model"),
    "unknown model": ({"model": "gpt-5"}, 404, "model_not_found", "model"),
    "no messages": ({"messages": []}, 400, "invalid_value", "messages"),
    "hot": ({"temperature": 9}, 400, "invalid_value", "temperature"),
    "two answers": ({"n": 2}, 400, "unsupported_parameter", "n"),
    "too long": ({"max_completion_tokens": 10**8}, 400, "context_length_exceeded", "messages"),
    "file": (image("file:///etc/passwd"), 400, "invalid_image_url", "PART"),
    "private": (image("http://10.0.0.1/a.png"), 400, "invalid_image_url", "PART"),
    "metadata": (image("http://169.254.169.254/latest"), 400, "invalid_image_url", "PART"),
    "dead": (image("http://127.0.0.1:9/a.png"), 400, "failed_to_download_image", "PART"),
    "not base64": (image("data:image/png;base64,@@"), 400, "invalid_base64_image", "PART"),
    "empty": (image("data:image/png;base64,"), 400, "empty_image_file", "PART"),
    "text": (image(data(b"hello world" * 9)), 400, "unsupported_image_media_type", "PART"),
    "video": ([{"type": "video_url"}], 400, "unsupported_content_part", None),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_bad_request_gets_its_own_error(stack: Stack, name: str) -> None:
    given, status, code, param = CASES[name]
    async with api(stack) as client:
        if isinstance(given, bytes):
            body: Any = given
        elif isinstance(given, list):
            body = client.body(given)
        else:
            body = client.body("hi") | given
        found, answer = await client.post(body)
    assert (found, answer["error"]["code"]) == (status, code), answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    wanted = "messages[0].content[0].image_url" if param == "PART" else param
    if wanted is not None:
        assert answer["error"]["param"] == wanted


async def test_a_truncated_picture_is_a_400_even_though_its_header_is_sound(stack: Stack) -> None:
    from support.pictures import encode, gradient

    whole = encode(gradient(300, 200), "PNG")
    async with api(stack) as client:
        for is_stream in (False, True):
            body = client.body(image(data(whole[: len(whole) // 2])), stream=is_stream)
            status, answer = await client.post(body)
            assert (status, answer["error"]["code"]) == (400, "image_parse_error"), answer


async def test_a_body_over_the_limit_is_refused_before_it_is_read(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection(*stack.url.removeprefix("http://").split(":"))
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {1 << 40}\r\n\r\n"
    )
    writer.write(head.encode())
    async with asyncio.timeout(10):
        status = await reader.readline()
    writer.close()
    assert b" 413 " in status


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405), ("GET", "/", 404)],
)
async def test_unknown_paths_answer_in_the_same_shape(
    stack: Stack, method: str, path: str, status: int
) -> None:
    async with api(stack) as client, client.session.request(method, stack.url + path) as response:
        assert response.status == status
        assert set(json.loads(await response.text())["error"]) == {
            "message", "type", "param", "code",
        }  # fmt: skip


async def test_probes_and_models_answer(stack: Stack) -> None:
    async with api(stack) as client:
        for path in ("/health", "/ready", "/version", "/metrics", "/v1/models"):
            async with client.session.get(stack.url + path) as response:
                assert response.status == 200, path
        name = stack.state.model
        async with client.session.get(f"{stack.url}/v1/models/{name}") as response:
            assert (await response.json())["max_model_len"] > 0


def pages(directory: Directory) -> tuple[int, ...]:
    """Free pages of both engines and requests at every stage."""
    found: list[int] = []
    for role in ("prefill", "decode"):
        beat = only(directory, role)
        assert beat is not None
        found += [beat.load.num_free_pages, beat.load.num_running + beat.load.num_waiting]
    for role in ("gateway", "encoder", "preprocessor", "fetcher"):
        beat = only(directory, role)
        assert beat is not None
        found.append(beat.load.num_running)
    return tuple(found)


async def test_a_client_that_leaves_frees_everything_within_a_second(stack: Stack) -> None:
    async with watch(stack) as directory, api(stack) as client:
        await until(lambda: len(directory.all()) == 6, 5)
        await asyncio.sleep(0.3)
        before = pages(directory)
        body = client.body("tell me a long story", max_completion_tokens=3000, ignore_eos=True)
        url = f"{stack.url}/v1/chat/completions"
        for is_stream in (True, False):
            request = client.session.post(url, json=body | {"stream": is_stream})
            task = asyncio.ensure_future(request.__aenter__())  # noqa: TID251

            def is_decoding() -> bool:
                beat = only(directory, "decode")
                return beat is not None and beat.load.num_running > 0

            await until(is_decoding, 20)
            if is_stream:
                response = await task
                await response.content.readany()
                response.close()
            else:
                task.cancel()
            await until(lambda: pages(directory) == before, 1.5)


async def test_refused_requests_leave_nothing_behind(stack: Stack) -> None:
    async with watch(stack) as directory, api(stack) as client:
        await until(lambda: len(directory.all()) == 6, 5)
        await asyncio.sleep(0.3)
        before = pages(directory)
        bad = [CASES[name][0] for name in ("private", "text", "dead", "video", "empty")]
        await asyncio.gather(*(client.post(client.body(content)) for content in bad * 4))
        await until(lambda: pages(directory) == before, 2)
