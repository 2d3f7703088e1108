"""A web server on loopback that answers each path with given bytes and remembers who came.

Raw on purpose: tests need answers that no proper server gives, like lengths that lie.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

Answer = bytes | Callable[["Asked", asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Asked:
    """One request: path with query, and headers by lower-case name."""

    path: str
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def gone(self) -> None:
        """Returns when the client has left."""
        await self.reader.read()


def answer(
    body: bytes = b"", status: int = 200, *, length: int | None = None, **headers: str
) -> bytes:
    """A whole answer; header names are given with underscores for dashes."""
    lines = [f"HTTP/1.1 {status} Whatever"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def raw(*lines: str, body: bytes = b"") -> bytes:
    """An answer written line by line."""
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class PictureHost:
    """The server, while it runs."""

    address: str = "127.0.0.1"
    port: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    max_open: int = 0

    def url(self, path: str, host: str = "") -> str:
        return f"http://{host or self.address}:{self.port}{path}"

    def num_asked(self, path: str) -> int:
        return sum(request.path == path for request in self.asked)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, EOFError):
                while await self._serve_one(reader, writer):
                    await writer.drain()
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (li.partition(": ") for li in lines)}
        asked = Asked(first.split(" ")[1], headers, reader)
        self.asked.append(asked)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            found = self.answers.get(asked.path.split("?")[0], answer(b"", 404))
            if isinstance(found, bytes):
                writer.write(found)
                head, _, body = found.partition(b"\r\n\r\n")
                # A length that is missing or lies ends the connection.
                return head.endswith(f"\r\nContent-Length: {len(body)}".encode())
            await found(asked, writer)
            return False
        finally:
            self.num_open -= 1


@contextlib.asynccontextmanager
async def picture_host(address: str = "127.0.0.1", port: int = 0) -> AsyncIterator[PictureHost]:
    """Runs a server on a free port."""
    host = PictureHost(address)
    server = await asyncio.start_server(host.serve, address, port)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()


class Held:
    """An answer that waits until it is let go, and says when it was asked."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        self.asked.set()
        loop = asyncio.get_running_loop()
        waits = [loop.create_task(asked.gone()), loop.create_task(self.go.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self.go.is_set():
                writer.write(self.data)
        finally:
            for wait in waits:
                wait.cancel()
