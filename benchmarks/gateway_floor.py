"""What a hop through an empty gateway costs, as a ratio to a bare HTTP server.

Starts the whole stack with the scripted engine (everything is real but the forward pass), asks for
streamed answers one after the other and then at a fixed rate, open loop, and does the same against
a bare uvicorn application that answers the very bytes of such a stream. Refuses to report if the
answers are not the scripted text.

    python benchmarks/gateway_floor.py [--rate 300] [--seconds 10] [--json]
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

TEXT = "A scripted answer."
BARE = """
import sys, uvicorn
BODY = open(sys.argv[2], "rb").read()
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False)
"""


def request_bytes(model: str, max_tokens: int) -> bytes:
    """One streamed chat request as it goes over the socket."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "go"}],
            "stream": True,
            "thinking": {"type": "disabled"},
            "max_completion_tokens": max_tokens,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """A kept-alive connection that reads one chunked answer at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def close(self) -> None:
        self._writer.close()

    async def ask(self, request: bytes) -> tuple[float, bytes]:
        """Sends a request; gives the seconds to the first byte of the body, and the body."""
        start_s = time.perf_counter()
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n", 1)[0], head + await self._reader.read(600)
        parts: list[bytes] = []
        first_s = 0.0
        while True:
            size = int(await self._reader.readline(), 16)
            first_s = first_s or time.perf_counter() - start_s
            data = await self._reader.readexactly(size + 2)
            if not size:
                return first_s, b"".join(parts)
            parts.append(data[:-2])


async def one_by_one(port: int, request: bytes, count: int) -> list[float]:
    """Times to first byte of requests that wait for each other."""
    connection = await Connection.open(port)
    times = [(await connection.ask(request))[0] for _ in range(count)]
    connection.close()
    return sorted(times[count // 10 :])


async def at_rate(
    port: int, request: bytes, rate: float, seconds: float
) -> tuple[float, list[float]]:
    """Sends at a fixed rate whatever comes back; gives answers a second and times to first byte,

    counted from when each request was due.
    """
    idle: list[Connection] = []
    times: list[float] = []
    start_s = time.perf_counter()

    async def send(due_s: float) -> None:
        connection = idle.pop() if idle else await Connection.open(port)
        late_s = time.perf_counter() - due_s
        first_s, _ = await connection.ask(request)
        times.append(late_s + first_s)
        idle.append(connection)

    async with asyncio.TaskGroup() as group:
        for index in range(int(rate * seconds)):
            due_s = start_s + index / rate
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(send(due_s))
    took_s = time.perf_counter() - start_s
    for connection in idle:
        connection.close()
    return len(times) / took_s, sorted(times)


def percentile(times: list[float], share: float) -> float:
    """Nearest rank, in milliseconds."""
    return 1000 * times[min(len(times) - 1, int(share * len(times)))]


@asynccontextmanager
async def scripted_stack(folder: Path) -> AsyncIterator[tuple[int, str]]:
    """Runs `k3 up --engine scripted`; gives the gateway's port and the model's name."""
    script = folder / "script.jsonl"
    script.write_text(json.dumps({"match": "", "text": TEXT}) + "\n")
    environment = {**os.environ, "K3_UP_FOLDER": str(folder / "run"), "K3_LOG_LEVEL": "WARNING"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "k3ctl.main", "up", "--json", "--engine", "scripted",
        "--script", str(script), env=environment, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        state = json.loads(await process.stdout.readline())
        yield int(state["gateway_url"].rsplit(":", 1)[1]), state["model"]
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


@asynccontextmanager
async def bare_server(folder: Path, body: bytes, port: int) -> AsyncIterator[int]:
    """Runs a uvicorn application that answers one fixed body."""
    (folder / "body").write_bytes(body)
    command = [sys.executable, "-c", BARE, str(port), str(folder / "body")]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        for _ in range(200):
            try:
                (await Connection.open(port)).close()
                break
            except OSError:
                await asyncio.sleep(0.05)
        yield port
    finally:
        process.terminate()
        await process.wait()


def text_of(stream: bytes) -> str:
    """The visible text of a streamed answer."""
    events = [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def measure(port: int, request: bytes, rate: float, seconds: float) -> dict[str, float]:
    """Takes both measurements of one server."""
    alone = await one_by_one(port, request, 200)
    await at_rate(port, request, rate, 1.0)
    rps, loaded = await at_rate(port, request, rate, seconds)
    return {
        "first_byte_ms_p50": percentile(alone, 0.5),
        "first_byte_ms_p99": percentile(alone, 0.99),
        "answers_per_s": rps,
        "loaded_first_byte_ms_p50": percentile(loaded, 0.5),
        "loaded_first_byte_ms_p99": percentile(loaded, 0.99),
    }


async def run(rate: float, seconds: float, max_tokens: int) -> dict[str, dict[str, float]]:
    """Measures the gateway, then the bare server."""
    with tempfile.TemporaryDirectory(prefix="k3-floor-") as name:
        folder = Path(name)
        async with scripted_stack(folder) as (port, model):
            whole = await (await Connection.open(port)).ask(request_bytes(model, 64))
            if text_of(whole[1]) != TEXT:
                raise SystemExit(f"the stack answered {text_of(whole[1])!r}, not the script")
            request = request_bytes(model, max_tokens)
            _, stream = await (await Connection.open(port)).ask(request)
            if not TEXT.startswith(text_of(stream)):
                raise SystemExit(f"the stack answered {text_of(stream)!r}, not the script")
            gateway = await measure(port, request, rate, seconds)
        async with bare_server(folder, stream, port) as bare_port:
            bare = await measure(bare_port, request, rate, seconds)
    return {"gateway": gateway, "bare": bare}


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second, open loop")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=1, help="of each answer; past 1 decode joins")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments.rate, arguments.seconds, arguments.tokens))
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{'':28}{'gateway':>12}{'bare uvicorn':>14}{'ratio':>8}")
    for name, value in found["gateway"].items():
        other = found["bare"][name]
        print(f"{name:28}{value:12.2f}{other:14.2f}{value / other:8.2f}")


if __name__ == "__main__":
    main()
