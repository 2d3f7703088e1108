"""uvicorn as this gateway runs it: drained by the chassis, and with bounds on a request's head.

Bodies are bounded where they are read. Heads are uvicorn's: its fast parser takes headers of any
length and waits for them for ever, so both are bounded here, before a route is known; so is the
rest of a body that nobody reads any more, its request being answered. What one turn of the event
loop writes to a connection leaves in one system call.
"""

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from k3_gateway.openai.errors import error_body
from k3wire.errors import InvalidRequest

MAX_HEAD_BYTES = 64 * 1024
"""Longest request line and headers together."""

HEAD_TIMEOUT_S = 30.0
"""Longest time from a connection, or from a head's first byte, to the head's end."""

REST_TIMEOUT_S = 30.0
"""Longest time from an answer to the end of a body that came too late for it."""

KEEP_ALIVE_S = 75
"""How long an idle connection is kept; longer than proxies' usual 60."""


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the chassis drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Captures nothing."""
        yield


MAX_HELD_BYTES = 64 * 1024
"""Bytes that wait for the end of a turn; more are written at once, so that the socket's own limits
hold a fast writer back."""


class GatheringTransport:
    """A transport whose writes of one turn of the loop are one system call.

    A stream's head, its first chunk and its end are often written in the same turn; each call of
    its own would wake the client, which costs more than making the bytes.
    """

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Wraps an open transport."""
        self._inner = inner
        self._loop = loop
        self._held: list[bytes] = []
        self._num_held_bytes = 0

    def write(self, data: bytes) -> None:
        """Takes bytes; they leave when this turn ends."""
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._num_held_bytes += len(data)
        if self._num_held_bytes > MAX_HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is held, if anybody still reads it."""
        if not self._held:
            return
        held, self._held, self._num_held_bytes = self._held, [], 0
        if not self._inner.is_closing():
            self._inner.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        """Writes what is held and closes."""
        self.flush()
        self._inner.close()

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._inner.is_closing()

    def pause_reading(self) -> None:
        """Reads no more for now."""
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Reads on."""
        self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Gives what the inner one knows; `Any` as in asyncio."""
        return self._inner.get_extra_info(name, default)


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    max_head_bytes = MAX_HEAD_BYTES
    head_timeout_s = HEAD_TIMEOUT_S
    rest_timeout_s = REST_TIMEOUT_S
    _timer: asyncio.TimerHandle | None = None
    _is_in_head = False
    _num_head_bytes = 0
    _num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to wait for a head."""
        # uvicorn asks its transport for these few methods and nothing else.
        super().connection_made(cast(asyncio.Transport, GatheringTransport(transport, self.loop)))
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes bytes, and refuses a head that goes on for too long."""
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.max_head_bytes and not self.transport.is_closing():
                self.send_400_response("The request's headers are too long")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; the parser turns the error into `send_400_response`."""
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > self.max_head_bytes:
            raise ValueError("headers too long")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._end_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A body is whole."""
        self._end_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request is answered, refused perhaps before its body was here."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            # Its client may write on before it reads the refusal, but not for ever.
            self._begin_timer(self.rest_timeout_s)

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP, in the shape of every other error, and hangs up."""
        self._end_head()
        body = error_body(InvalidRequest(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _begin_head(self) -> None:
        self._end_head()
        self._is_in_head = True
        self._num_head_bytes = self._num_header_bytes = 0
        self._begin_timer(self.head_timeout_s)

    def _end_head(self) -> None:
        self._is_in_head = False
        self._end_timer()

    def _begin_timer(self, timeout_s: float) -> None:
        self._end_timer()
        self._timer = self.loop.call_later(timeout_s, self._hang_up)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


def make_server(app: ASGIApp, host: str, port: int, grace_s: float) -> Server:
    """Makes the server.

    Args:
        app: what it serves.
        host: address to listen on.
        port: 0 takes a free one.
        grace_s: time that running requests get at the end.
    """
    return Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=BoundedHttp,
            ws="none",
            log_config=None,
            access_log=False,
            # Nothing here asks for the client's address.
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(grace_s),
        )
    )
