"""POST /v1/chat/completions: one request from its body to its last byte."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from opentelemetry.trace import Span
from starlette.requests import ClientDisconnect

from k3_gateway.admission import Admission
from k3_gateway.chat_request import bodies
from k3_gateway.generation import Generation
from k3_gateway.openai.auth import KeyRing
from k3_gateway.openai.chunks import DONE, KEEP_ALIVE, BodyBuilder, ChunkEncoder, Usage
from k3_gateway.pipeline import Pipeline, Prepared
from k3text.parsers.events import Event
from k3wire.errors import Cancelled, InternalError, K3Error, RequestTimeout
from k3wire.telemetry import metrics
from k3wire.telemetry.ledger import Ledger, build_ledger, server_timing
from k3wire.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_BATCH_WAIT_S = 10.0
"""How long the status line waits for the first token, so that early failures have a status."""

STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


Close = Callable[[str], Awaitable[None]]
"""Frees everything a stream holds, given how it ended; safe twice."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A response, and what must be freed once it is sent or cannot be.

    Attributes:
        response: to be sent.
        close: of a stream; None if nothing is held any more.
    """

    response: Response
    close: Close | None = None


@dataclass(frozen=True, slots=True)
class ChatService:
    """What the endpoint works with.

    Attributes:
        pipeline: to the workers.
        keys: who may ask.
        admission: how much at once.
        tracing: spans.
        max_body_bytes: longest body.
        body_timeout_s: longest time to send it.
        keep_alive_s: silence after which a stream sends a comment.
        closing: ends of streams under way.
    """

    pipeline: Pipeline
    keys: KeyRing
    admission: Admission
    tracing: Tracing
    max_body_bytes: int
    body_timeout_s: float
    keep_alive_s: float
    closing: "set[asyncio.Task[None]]" = field(default_factory=set["asyncio.Task[None]"])

    async def create(self, request: Request, request_id: str) -> ChatAnswer:
        """Answers one call; whoever sends the answer closes it.

        Raises:
            K3Error: anything that ends the request before its status line.
        """
        arrival_unix_ns = time.time_ns()
        tenant = self.keys.authenticate(request.headers)
        bodies.check_headers(request.headers, self.max_body_bytes)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self.admission.slot())
            span = self.tracing.begin("gateway chat", request.headers)
            stack.callback(span.end)
            span.set_attribute("k3.request_id", request_id)
            body = await self._read(request)
            stack.enter_context(self.admission.budget(len(body)))
            preparing = self.pipeline.prepare(body, tenant, request_id, arrival_unix_ns)
            return await _while_there(request, self._answer(stack, preparing, span))

    async def _answer(
        self,
        stack: contextlib.AsyncExitStack,
        preparing: contextlib.AbstractAsyncContextManager[Prepared],
        span: Span,
    ) -> ChatAnswer:
        prepared = await stack.enter_async_context(preparing)
        generation = await stack.enter_async_context(self.pipeline.start(prepared))
        if not prepared.options.is_stream:
            return ChatAnswer(await _whole(prepared, generation, span))
        batches = _Batches(generation)
        await batches.wait_first(FIRST_BATCH_WAIT_S)
        # From here on `close` owns everything that is open.
        close = self._closer(generation, batches, span, stack.pop_all())
        response = StreamingResponse(
            _stream(prepared, generation, batches, self.keep_alive_s, close),
            media_type="text/event-stream; charset=utf-8",
            headers=STREAM_HEADERS | _timing(generation),
        )
        return ChatAnswer(response, close)

    def _closer(
        self,
        generation: Generation,
        batches: "_Batches",
        span: Span,
        stack: contextlib.AsyncExitStack,
    ) -> Close:
        is_closed = False

        async def close_all(code: str) -> None:
            async with stack:
                await batches.close()
                _note_span(span, generation, code)
            metrics.REQUESTS.labels(code).inc()
            _note_end(generation, code)

        async def close(code: str) -> None:
            nonlocal is_closed
            if is_closed:
                return
            is_closed = True
            # The server cancels every await of a client that left; a task of its own is spared.
            task = asyncio.get_running_loop().create_task(close_all(code))
            self.closing.add(task)
            task.add_done_callback(self.closing.discard)
            await asyncio.shield(task)

        return close

    async def _read(self, request: Request) -> bytes:
        try:
            async with asyncio.timeout(self.body_timeout_s):
                return await bodies.read_body(request.stream(), self.max_body_bytes)
        except TimeoutError as error:
            raise RequestTimeout("The body took too long to arrive") from error
        except ClientDisconnect as error:
            raise Cancelled("The client left") from error


async def _while_there(request: Request, work: Coroutine[None, None, T]) -> T:
    """Does the work as long as the client is there; only a response being sent is watched by the server.

    Raises:
        Cancelled: the client left; the work was cancelled and has ended.
    """
    loop = asyncio.get_running_loop()
    working = loop.create_task(work)
    gone = loop.create_task(_client_gone(request))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("The client left")
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait([working, gone])
        if not working.cancelled():
            # What went wrong while it was being cancelled interests nobody any more.
            working.exception()


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _whole(prepared: Prepared, generation: Generation, span: Span) -> Response:
    code = Cancelled.code
    builder = BodyBuilder()
    try:
        async with contextlib.aclosing(generation.events()) as batches:
            async for batch in batches:
                for event in batch:
                    builder.add(event)
        code = "ok"
    except K3Error as error:
        code = error.code
        raise
    finally:
        _note_span(span, generation, code)
        _note_end(generation, code)
    metrics.REQUESTS.labels(code).inc()
    usage = _usage(generation)
    body = builder.body(
        prepared.request_id,
        prepared.options.model,
        prepared.fingerprint,
        prepared.created_s,
        generation.answer.finish,
    )
    return Response(
        msgspec.json.encode(body | {"usage": usage.body()}),
        media_type="application/json",
        headers=_timing(generation),
    )


class _Batches:
    """The event batches of a generation, read by a task so that waiting can be bounded."""

    def __init__(self, generation: Generation) -> None:
        self._iterator = generation.events()
        self._first: asyncio.Task[list[Event] | None] | None = None

    async def _next(self) -> list[Event] | None:
        return await anext(self._iterator, None)

    async def next(self, wait_s: float) -> list[Event] | None:
        """Gives the next batch, None at the end.

        Raises:
            TimeoutError: nothing came in time; call again to go on waiting.
            K3Error: the generation failed.
        """
        if self._first is None:
            self._first = asyncio.get_running_loop().create_task(self._next())
        done, _ = await asyncio.wait([self._first], timeout=wait_s)
        if not done:
            raise TimeoutError
        task, self._first = self._first, None
        return task.result()

    async def wait_first(self, wait_s: float) -> None:
        """Waits for the first batch and keeps it; silence is fine, failure is not."""
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


async def _stream(
    prepared: Prepared,
    generation: Generation,
    batches: _Batches,
    keep_alive_s: float,
    close: Close,
) -> AsyncIterator[bytes]:
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
        while True:
            try:
                batch = await batches.next(keep_alive_s)
            except TimeoutError:
                yield KEEP_ALIVE
                continue
            if batch is None:
                break
            chunk = b"".join(map(encoder.event, batch))
            if chunk:
                yield chunk
        usage = _usage(generation)
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


def _ledger(generation: Generation) -> Ledger | None:
    if not generation.first_token_unix_ns:
        return None
    return build_ledger(
        generation.answer.reports,
        generation.order.arrival_unix_ns,
        generation.first_token_unix_ns,
    )


def _timing(generation: Generation) -> dict[str, str]:
    ledger = _ledger(generation)
    return {"server-timing": server_timing(ledger)} if ledger else {}


def _usage(generation: Generation) -> Usage:
    answer = generation.answer
    ledger = _ledger(generation)
    return Usage(
        num_prompt_tokens=generation.order.num_prompt_tokens,
        num_cached_tokens=answer.num_cached_tokens or 0,
        num_image_tokens=sum(slot.num_tokens for slot in generation.order.prompt.image_slots),
        num_output_tokens=answer.num_output_tokens,
        num_reasoning_tokens=answer.num_reasoning_tokens,
        ledger=msgspec.to_builtins(ledger) if ledger else None,
    )


def _note_span(span: Span, generation: Generation, code: str) -> None:
    """Puts the request's end and its ledger on its span, for `k3 trace`."""
    if not span.is_recording():
        return
    answer = generation.answer
    span.set_attributes(
        {
            "gen_ai.usage.input_tokens": generation.order.num_prompt_tokens,
            "gen_ai.usage.output_tokens": answer.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": answer.num_cached_tokens or 0,
        }
    )
    if code != "ok":
        span.set_attribute("error.type", code)
    ledger = _ledger(generation)
    if ledger is not None:
        span.set_attribute("k3.ledger", msgspec.json.encode(ledger).decode())


def _note_end(generation: Generation, code: str) -> None:
    answer, order = generation.answer, generation.order
    now_ns = time.time_ns()
    metrics.REQUEST_DURATION.labels(code).observe((now_ns - order.arrival_unix_ns) / 1e9)
    if generation.first_token_unix_ns:
        first_s = (generation.first_token_unix_ns - order.arrival_unix_ns) / 1e9
        metrics.TIME_TO_FIRST_TOKEN.observe(first_s)
        if answer.num_output_tokens > 1:
            rest_s = (now_ns - generation.first_token_unix_ns) / 1e9
            metrics.TIME_PER_OUTPUT_TOKEN.observe(rest_s / (answer.num_output_tokens - 1))
    metrics.TOKENS.labels("input").inc(order.num_prompt_tokens)
    metrics.TOKENS.labels("cached").inc(answer.num_cached_tokens or 0)
    metrics.TOKENS.labels("output").inc(answer.num_output_tokens)
    for report in answer.reports:
        metrics.STAGE_DURATION.labels(report.stage).observe(report.duration_ns / 1e9)
        if report.tier != "none":
            metrics.TIER_LOOKUPS.labels(report.tier, report.outcome).inc()
            metrics.TIER_SAVED.labels(report.tier).inc(report.saved_ns / 1e9)
    logger.info(
        "request finished",
        extra={
            "request": order.request_id,
            "code": code,
            "prompt": order.num_prompt_tokens,
            "cached": answer.num_cached_tokens or 0,
            "output": answer.num_output_tokens,
            "ms": round((now_ns - order.arrival_unix_ns) / 1e6, 1),
        },
    )
