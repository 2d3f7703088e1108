"""A very small HTTP server for probes and metrics: /health, /ready, /metrics.

Apart from the service's own traffic, so that load cannot starve a probe; no dependency.
"""

import asyncio
import contextlib
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

MAX_HEAD_BYTES = 16 * 1024
READ_TIMEOUT_S = 5.0


class HealthServer:
    """Serves probes of one process.

    Attributes:
        port: the one it listens on, once started.
    """

    def __init__(self, why_not_ready: Callable[[], str], registry: CollectorRegistry) -> None:
        """Prepares; `start` opens the port.

        Args:
            why_not_ready: "" while the process can serve, else a reason for people.
            registry: what /metrics shows.
        """
        self._why_not_ready = why_not_ready
        self._registry = registry
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Opens the port; 0 takes a free one.

        Raises:
            OSError: the port is taken.
        """
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes the port; safe twice and before a start."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            method, _, rest = head.partition(b" ")
            writer.write(self._answer(method, rest.partition(b" ")[0].partition(b"?")[0]))
            await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, TimeoutError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, method: bytes, path: bytes) -> bytes:
        if method not in (b"GET", b"HEAD"):
            return _response(405, b"use GET\n")
        match path:
            case b"/health" | b"/healthz" | b"/ping":
                return _response(200, b"ok\n")
            case b"/ready":
                reason = self._why_not_ready()
                return (
                    _response(503, reason.encode() + b"\n") if reason else _response(200, b"ok\n")
                )
            case b"/metrics":
                return _response(200, generate_latest(self._registry), CONTENT_TYPE_LATEST)
            case _:
                return _response(404, b"try /health, /ready or /metrics\n")


def _response(status: int, body: bytes, media_type: str = "text/plain; charset=utf-8") -> bytes:
    words = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
    head = (
        f"HTTP/1.1 {status} {words[status]}\r\ncontent-type: {media_type}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
