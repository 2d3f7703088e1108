"""A streamed answer as an HTTP response: batches of events in, server-sent events out.

Enters: a running generation. Leaves: a head and chunks, the last one of them with the usage, or an
error in the stream, since after the status line nothing else can tell. Always true: however it
ends, what the answer holds is closed once.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from k3_gateway.generation import SILENCE, Batch, Generation
from k3_gateway.openai.chunks import DONE, KEEP_ALIVE, ChunkEncoder, Usage
from k3_gateway.openai.presence import Presence
from k3_gateway.pipeline import Prepared
from k3wire.errors import Cancelled, InternalError, K3Error

logger = logging.getLogger(__name__)

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

Close = Callable[[str], Awaitable[None]]
"""Frees everything a stream holds, given how it ended; safe twice."""

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
"""As in ASGI, where messages are dictionaries of anything."""


class Batches:
    """The event batches of a generation, read so that waiting can be bounded.

    Until the first token a task reads them: a worker is looked for, waited for and tried again,
    and none of that may be interrupted to say that we are alive. From then on the stream itself
    says when it was silent for long.
    """

    def __init__(self, generation: Generation, keep_alive_s: float) -> None:
        """Prepares; nothing runs before the first wait.

        Args:
            generation: entered already.
            keep_alive_s: silence that is reported.
        """
        self._generation = generation
        self._keep_alive_s = keep_alive_s
        self._iterator = generation.events(keep_alive_s)
        self._first: asyncio.Task[Batch | None] | None = None

    async def _next(self) -> Batch | None:
        return await anext(self._iterator, None)

    async def next(self) -> Batch | None:
        """Gives the next batch, which may be a silence; None at the end.

        Raises:
            K3Error: the generation failed.
        """
        if self._first is None:
            if self._generation.first_token_unix_ns:
                return await anext(self._iterator, None)
            self._first = asyncio.get_running_loop().create_task(self._next())
        if not self._first.done():
            await asyncio.wait([self._first], timeout=self._keep_alive_s)
            if not self._first.done():
                return SILENCE
        task, self._first = self._first, None
        return task.result()

    async def wait_first(self, wait_s: float) -> None:
        """Waits for the first batch and keeps it; silence is fine, failure is not.

        Raises:
            K3Error: the generation failed.
        """
        if self._first is None:
            self._first = asyncio.get_running_loop().create_task(self._next())
        try:
            await asyncio.wait([self._first], timeout=wait_s)
        except asyncio.CancelledError:
            await self.close()
            raise
        if self._first.done() and self._first.exception() is not None:
            task, self._first = self._first, None
            task.result()

    async def close(self) -> None:
        """Stops reading; safe twice."""
        if self._first is not None:
            task, self._first = self._first, None
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
        await self._iterator.aclose()


@dataclass(frozen=True, slots=True)
class EventStream:
    """The response.

    Attributes:
        chunks: the body, read once.
        presence: ends the reading when the client leaves.
        headers: lower-case names; may be added to until it is sent.
    """

    chunks: AsyncGenerator[bytes, None]
    presence: Presence
    headers: dict[str, str]

    async def __call__(self, scope: object, receive: object, send: Send) -> None:
        """Sends it, as an ASGI application that receives nothing more."""
        raw = [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        try:
            with self.presence:
                await send({"type": "http.response.start", "status": 200, "headers": raw})
                async with contextlib.aclosing(self.chunks):
                    async for chunk in self.chunks:
                        body = {"type": "http.response.body", "body": chunk, "more_body": True}
                        await send(body)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Cancelled:
            # Nobody is there to be told.
            logger.debug("client left its stream")
        finally:
            self.presence.close()


async def write_stream(
    prepared: Prepared,
    generation: Generation,
    batches: Batches,
    usage_of: Callable[[Generation], Usage],
    close: Close,
) -> AsyncGenerator[bytes, None]:
    """Turns batches into the bytes of a stream, and closes the answer at its end.

    Args:
        prepared: what was asked for.
        generation: under way.
        batches: of it.
        usage_of: counts it at its end.
        close: is told how it ended.
    """
    encoder = ChunkEncoder(
        prepared.request_id,
        prepared.options.model,
        prepared.fingerprint,
        prepared.created_s,
        has_usage=prepared.options.has_usage_chunk,
    )
    code = Cancelled.code
    try:
        yield encoder.first()
        while (batch := await batches.next()) is not None:
            chunk = KEEP_ALIVE if batch == SILENCE else b"".join(map(encoder.event, batch))
            if chunk:
                yield chunk
        usage = usage_of(generation)
        yield encoder.last(generation.answer.finish, usage) + encoder.usage(usage) + DONE
        code = "ok"
    except K3Error as error:
        code = error.code
        yield encoder.error(error)
    except Exception:
        # After the status line only the stream itself can tell that something broke.
        logger.exception("stream failed", extra={"request": prepared.request_id})
        code = InternalError.code
        yield encoder.error(InternalError("Something went wrong on our side"))
    finally:
        await close(code)
