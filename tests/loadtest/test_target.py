"""A server that cannot be played against is told of in one line, over real sockets."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loadtest import cli
from loadtest.target import TargetError, base_url

MODELS = b'{"object": "list", "data": [{"id": "m"}]}'
ANSWER = b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
SCENARIO = (
    'arrivals = "constant"\nrate_rps = 20.0\nduration_s = 0.1\nwarmup_s = 0.0\nis_stream = false\n'
)


@asynccontextmanager
async def server(answers: dict[str, tuple[int, bytes]]) -> AsyncGenerator[int, None]:
    """Answers each path as told; gives its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        await reader.readexactly(length)
        status, body = answers.get(head.split()[1].decode(), (404, b'{"error": 1}'))
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n".encode())
        writer.write(b"content-type: application/json\r\nconnection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


async def play(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    scenario = folder / "s.toml"
    scenario.write_text(SCENARIO)
    monkeypatch.setattr(sys, "argv", ["k3-load", str(scenario), "--url", url, *arguments])
    async with asyncio.timeout(10):
        return await asyncio.to_thread(cli.main)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((401, b'{"error": {"message": "No key\\u001b[2J"}}'), "--api-key"),
        ((404, b"<html>not here</html>"), "not here"),
        ((503, b""), "503"),
        ((200, b'{"object": "list"}'), "without a model"),
        ((200, b'{"data": []}'), "without a model"),
        ((200, b"[\xff"), "without a model"),
    ],
)
async def test_a_refused_list_of_models_is_one_clear_line(
    answer: tuple[int, bytes],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with server({"/v1/models": answer}) as port:
        assert await play(f"http://127.0.0.1:{port}", tmp_path, monkeypatch) == 2
    said = capsys.readouterr().err
    assert (said.count("\n"), said.startswith("k3-load: ")) == (1, True)
    assert says in said
    assert said.rstrip("\n").isprintable()


async def test_nobody_there_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with server({}) as port:
        pass
    assert await play(f"http://127.0.0.1:{port}", tmp_path, monkeypatch) == 2
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(("tail", "answer"), [("", ANSWER), ("/", ANSWER), ("/v1/", ANSWER)])
async def test_an_address_may_end_as_people_write_it(
    tail: str,
    answer: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = {"/v1/models": (200, MODELS), "/v1/chat/completions": (200, answer)}
    async with server(paths) as port:
        code = await play(f"http://127.0.0.1:{port}{tail}", tmp_path, monkeypatch, "--json")
    figures = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (code, figures["failed"], figures["requests"]) == (0, 0, 2)


async def test_answers_of_another_shape_are_failures_of_their_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"/v1/models": (200, MODELS), "/v1/chat/completions": (200, b'{"usage": {}}')}
    async with server(paths) as port:
        assert await play(f"http://127.0.0.1:{port}", tmp_path, monkeypatch, "--json") == 1
    assert json.loads(capsys.readouterr().out)["failed"] > 0


@pytest.mark.parametrize(
    "given", ["", "127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://a/?b=c"]
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(TargetError):
        base_url(given)
