"""What a hop through an empty gateway costs, as a ratio to a bare HTTP server.

Starts the whole stack with the scripted engine (everything is real but the forward pass), asks for
streamed answers one after the other and then at a fixed rate, open loop, and does the same against
a bare uvicorn application that answers the very bytes of such a stream. Says where the processor's
time went, service by service, and how late the workers' beats were meanwhile. Refuses to report if
the answers are not the scripted text.

    python benchmarks/gateway_floor.py [--rate 300] [--seconds 10] [--tokens 1] [--json]
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from k3wire import subjects
from k3wire.bus.nats_bus import NatsBus
from k3wire.messages.control import HEARTBEAT_INTERVAL_S, Heartbeat

TEXT = "A scripted answer."
END = b"\r\n0\r\n\r\n"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
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

Done = Callable[["Connection"], None]


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


class Connection(asyncio.Protocol):
    """A kept-alive connection with one chunked answer at a time.

    A bare protocol, without streams or tasks: it shares the two cores with what it measures.
    """

    def __init__(self) -> None:
        self.transport: Any = None
        self.due_s = 0.0
        self.first_s = 0.0
        self.data = b""
        self._done: Done | None = None

    @classmethod
    async def open(cls, port: int) -> "Connection":
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(cls, "127.0.0.1", port))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None:
            raise SystemExit("the server hung up in the middle of an answer")

    def start(self, request: bytes, due_s: float, done: Done) -> None:
        """Sends a request; `done` hears of the end of its answer."""
        self.due_s, self.first_s, self.data, self._done = due_s, 0.0, b"", done
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.data = self.data + data if self.data else data
        if not self.first_s and self.data.find(b"\r\n\r\n") + 4 < len(self.data):
            self.first_s = time.perf_counter() - self.due_s
        if self.data.endswith(END) or not self.data.startswith(b"HTTP/1.1 200"):
            done, self._done = self._done, None
            assert done is not None, "nothing comes unasked"
            done(self)

    def body(self) -> bytes:
        """The answer's chunks joined."""
        head, _, rest = self.data.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server refused: {self.data[:600]!r}")
        parts: list[bytes] = []
        while True:
            line, _, rest = rest.partition(b"\r\n")
            size = int(line, 16)
            if not size:
                return b"".join(parts)
            parts.append(rest[:size])
            rest = rest[size + 2 :]

    async def ask(self, request: bytes) -> tuple[float, bytes]:
        """Gives the seconds to the first byte of the body, and the body."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.start(request, time.perf_counter(), lambda _: done.set_result(None))
        await done
        return self.first_s, self.body()


async def one_by_one(port: int, request: bytes, count: int) -> list[float]:
    """Times to first byte of requests that wait for each other."""
    connection = await Connection.open(port)
    times = [(await connection.ask(request))[0] for _ in range(count)]
    connection.transport.close()
    return sorted(times[count // 10 :])


async def at_rate(
    port: int, request: bytes, rate: float, seconds: float
) -> tuple[float, list[float]]:
    """Sends at a fixed rate whatever comes back; gives answers a second and times to first byte,

    counted from when each request was due.
    """
    count = int(rate * seconds)
    idle: list[Connection] = []
    opened: list[Connection] = []
    times: list[float] = []
    answered = asyncio.Event()
    start_s = time.perf_counter()

    def done(connection: Connection) -> None:
        connection.body()
        times.append(connection.first_s)
        idle.append(connection)
        if len(times) == count:
            answered.set()

    for index in range(count):
        due_s = start_s + index / rate
        wait_s = due_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        while idle and idle[-1].transport.is_closing():
            # A server hangs up on what it has not heard of for a while.
            idle.pop()
        if not idle:
            opened.append(await Connection.open(port))
            idle.append(opened[-1])
        idle.pop().start(request, due_s, done)
    async with asyncio.timeout(120):
        await answered.wait()
    took_s = time.perf_counter() - start_s
    for connection in opened:
        connection.transport.close()
    return count / took_s, sorted(times)


def percentile(times: list[float], share: float) -> float:
    """Nearest rank, in milliseconds."""
    return 1000 * times[min(len(times) - 1, int(share * len(times)))]


def children_of(pid: int) -> dict[int, str]:
    """Every process under one, by the name of what it runs."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(fields_of_stat(int(entry.name))[1])
            except OSError:
                continue
    found = {pid: name_of(pid)}
    while fresh := {child for child, up in parents.items() if up in found} - found.keys():
        found |= {child: name_of(child) for child in fresh}
    return found


def fields_of_stat(pid: int) -> list[str]:
    """The numbers of /proc/PID/stat from the state on; the name before them may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def name_of(pid: int) -> str:
    """`k3_gateway` of `python -m k3_gateway`, else the program's own name."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    named = [word for word in words if word.startswith(("k3_", "k3ctl"))]
    return named[0] if named else Path(words[0].split()[0]).name


def cpu_seconds(processes: dict[int, str]) -> dict[str, float]:
    """Processor time so far of each kind of process, and of this one as the client."""
    spent = {"client": time.process_time()}
    for pid, name in processes.items():
        fields = fields_of_stat(pid)
        spent[name] = spent.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return spent


class Beats:
    """How late the workers' life signs are."""

    def __init__(self) -> None:
        self._last_ns: dict[str, int] = {}
        self.late_ms: dict[str, float] = {}

    def take(self, beat: Heartbeat) -> None:
        last_ns = self._last_ns.get(beat.worker_id)
        self._last_ns[beat.worker_id] = beat.sent_unix_ns
        if last_ns is not None:
            late_ms = (beat.sent_unix_ns - last_ns) / 1e6 - 1000 * HEARTBEAT_INTERVAL_S
            self.late_ms[beat.role] = max(self.late_ms.get(beat.role, 0.0), late_ms)


@asynccontextmanager
async def scripted_stack(folder: Path) -> AsyncIterator[tuple[dict[str, Any], int]]:
    """Runs `k3 up --engine scripted`; gives what it says of itself, and its process."""
    script = folder / "script.jsonl"
    script.write_text(json.dumps({"match": "", "text": TEXT}) + "\n")
    environment = {**os.environ, "K3_UP_FOLDER": str(folder / "run"), "K3_LOG_LEVEL": "WARNING"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "k3ctl.main", "up", "--json", "--engine", "scripted",
        "--script", str(script), env=environment, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield json.loads(await process.stdout.readline()), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


@asynccontextmanager
async def bare_server(folder: Path, body: bytes, port: int) -> AsyncIterator[tuple[int, int]]:
    """Runs a uvicorn application that answers one fixed body; gives its port and process."""
    (folder / "body").write_bytes(body)
    command = [sys.executable, "-c", BARE, str(port), str(folder / "body")]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        for _ in range(200):
            try:
                (await Connection.open(port)).transport.close()
                break
            except OSError:
                await asyncio.sleep(0.05)
        yield port, process.pid
    finally:
        process.terminate()
        await process.wait()


def text_of(stream: bytes) -> str:
    """The visible text of a streamed answer."""
    events = [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def measure(
    port: int, pid: int, request: bytes, rate: float, seconds: float
) -> dict[str, float]:
    """Takes all measurements of one server."""
    alone = await one_by_one(port, request, 200)
    await at_rate(port, request, rate, 1.0)
    processes = children_of(pid)
    before = cpu_seconds(processes)
    rps, loaded = await at_rate(port, request, rate, seconds)
    after = cpu_seconds(processes)
    spent = {name: 1000 * (after[name] - before[name]) / len(loaded) for name in after}
    return {
        "first_byte_ms_p50": percentile(alone, 0.5),
        "first_byte_ms_p99": percentile(alone, 0.99),
        "answers_per_s": rps,
        "loaded_first_byte_ms_p50": percentile(loaded, 0.5),
        "loaded_first_byte_ms_p99": percentile(loaded, 0.99),
        "cpu_ms_a_request": sum(spent.values()),
        **{f"cpu_ms {name}": ms for name, ms in sorted(spent.items()) if ms >= 0.01},
    }


async def run(rate: float, seconds: float, max_tokens: int) -> dict[str, dict[str, float]]:
    """Measures the gateway, then the bare server."""
    with tempfile.TemporaryDirectory(prefix="k3-floor-") as name:
        folder = Path(name)
        async with scripted_stack(folder) as (state, pid):
            port, model = int(state["gateway_url"].rsplit(":", 1)[1]), state["model"]
            whole = await (await Connection.open(port)).ask(request_bytes(model, 64))
            if text_of(whole[1]) != TEXT:
                raise SystemExit(f"the stack answered {text_of(whole[1])!r}, not the script")
            request = request_bytes(model, max_tokens)
            _, stream = await (await Connection.open(port)).ask(request)
            if not TEXT.startswith(text_of(stream)):
                raise SystemExit(f"the stack answered {text_of(stream)!r}, not the script")
            bus, beats = await NatsBus.connect(state["nats_url"], "benchmark"), Beats()
            await bus.listen(subjects.heartbeats(), Heartbeat, beats.take)
            gateway = await measure(port, pid, request, rate, seconds)
            gateway |= {f"beat_late_ms {role}": ms for role, ms in sorted(beats.late_ms.items())}
            await bus.close()
        async with bare_server(folder, stream, port) as (bare_port, bare_pid):
            bare = await measure(bare_port, bare_pid, request, rate, seconds)
    return {"gateway": gateway, "bare": bare}


def table(found: dict[str, dict[str, float]]) -> Iterable[str]:
    """The lines of the report; ratios where the bare server has the same figure."""
    yield f"{'':28}{'gateway':>12}{'bare uvicorn':>14}{'ratio':>8}"
    for name, value in found["gateway"].items():
        other = found["bare"].get(name)
        rest = f"{other:14.2f}{value / other:8.2f}" if other else ""
        yield f"{name:28}{value:12.2f}{rest}"


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second, open loop")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=1, help="of each answer; past 1 decode joins")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = uvloop.run(run(arguments.rate, arguments.seconds, arguments.tokens))
    if arguments.json:
        print(json.dumps(found))
        return
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
