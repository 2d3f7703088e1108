"""The command line's client, against small servers that misbehave."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from k3ctl.client import Answer, AskFailed, Client, image_url, question

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[Client]]
BODY: dict[str, Any] = {"model": "m", "messages": []}


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def start(handler: Handler) -> Client:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handler)
            runner = web.AppRunner(app, handler_cancellation=True)
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            return Client(f"http://{host}:{port}", session, api_key="key")

        yield start
    for runner in runners:
        await runner.cleanup()


def events(*lines: Any) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"x-request-id": "req-1"})
        await response.prepare(request)
        for line in lines:
            text = line if isinstance(line, str) else f"data: {json.dumps(line)}"
            await response.write(f"{text}\n\n".encode())
        return response

    return handle


def piece(finish: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": finish}]}


async def collect(client: Client) -> list[Any]:
    return [item async for item in client.stream(BODY)]


async def test_a_stream_gives_pieces_and_then_the_whole(serve: Serve) -> None:
    usage = {"prompt_tokens": 3}
    client = await serve(
        events(
            piece(reasoning_content="hm"),
            ": keep-alive",
            piece(content="a"),
            piece(content="b"),
            piece(finish="stop"),
            {"choices": [], "usage": usage},
            "data: [DONE]",
        )
    )
    *pieces, answer = await collect(client)
    assert pieces == [("reasoning", "hm"), ("text", "a"), ("text", "b")]
    assert answer == Answer("hm", "ab", "stop", usage, None, "req-1")


async def test_an_error_in_the_middle_of_a_stream_is_told(serve: Serve) -> None:
    client = await serve(events(piece(content="a"), {"error": {"message": "worker lost"}}))
    with pytest.raises(AskFailed, match="worker lost"):
        await collect(client)


async def test_a_stream_that_just_ends_is_no_answer(serve: Serve) -> None:
    client = await serve(events(piece(content="a")))
    with pytest.raises(AskFailed):
        await collect(client)


async def test_a_refusal_shows_the_gateways_words(serve: Serve) -> None:
    async def refuse(request: web.Request) -> web.Response:
        assert request.headers["authorization"] == "Bearer key"
        return web.json_response({"error": {"message": "too long"}}, status=400)

    client = await serve(refuse)
    for call in (client.ask(BODY), client.model(), collect(client)):
        with pytest.raises(AskFailed, match="400: too long"):
            await call


@pytest.mark.parametrize(
    ("status", "text"), [(502, "<html>"), (200, "ok"), (500, "[]"), (200, '{"data": []}')]
)
async def test_what_is_no_gateway_is_said_to_be_none(serve: Serve, status: int, text: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    client = await serve(answer)
    with pytest.raises(AskFailed, match=str(status)):
        await client.model()


async def test_nobody_there_says_what_to_start() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(AskFailed, match="k3 up"):
            await Client("http://127.0.0.1:9", session).model()


def test_a_file_becomes_a_data_url_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"\xff\xd8")
    assert image_url(str(path)) == "data:image/jpeg;base64,/9g="
    assert image_url("https://host/a.png") == "https://host/a.png"
    with pytest.raises(AskFailed, match=r"missing\.png"):
        image_url(str(tmp_path / "missing.png"))


def test_images_come_before_the_question() -> None:
    (message,) = question("what?", ["https://host/1.png", "https://host/2.png"])
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
