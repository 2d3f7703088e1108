"""POST /v1/chat/completions: one request from its body to its last byte."""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from fastapi import Request
from fastapi.responses import Response
from opentelemetry.trace import Span

from k3_gateway.admission import Admission
from k3_gateway.chat_request import bodies
from k3_gateway.generation import SILENCE, Generation
from k3_gateway.openai.auth import KeyRing
from k3_gateway.openai.body_intake import BodyLimits, read_body
from k3_gateway.openai.chunks import BodyBuilder, Usage
from k3_gateway.openai.event_stream import (
    STREAM_HEADERS,
    Batches,
    Close,
    EventStream,
    write_stream,
)
from k3_gateway.openai.presence import Presence
from k3_gateway.pipeline import Pipeline, Prepared
from k3wire.errors import Cancelled, K3Error
from k3wire.telemetry import metrics
from k3wire.telemetry.ledger import server_timing
from k3wire.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

FIRST_BATCH_WAIT_S = 10.0
"""How long the status line waits for the first token, so that early failures have a status."""


class ResponseHeaders(Protocol):
    """Headers that may be added to: starlette's, or a dictionary."""

    def __setitem__(self, name: str, value: str, /) -> None:
        """Sets a header; the name is in lower case."""
        ...


class HttpResponse(Protocol):
    """What a route sends. Implementations: starlette's `Response` and `EventStream`."""

    @property
    def headers(self) -> ResponseHeaders:
        """Of the response; may be added to until it is called."""
        ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends it; the types are ASGI's, which no two libraries declare alike."""
        ...


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A response, and what must be freed once it is sent or cannot be.

    Attributes:
        response: to be sent.
        close: of a stream; None if nothing is held any more.
    """

    response: HttpResponse
    close: Close | None = None


@dataclass(frozen=True, slots=True)
class ChatService:
    """What the endpoint works with.

    Attributes:
        pipeline: to the workers.
        keys: who may ask.
        admission: how much at once.
        tracing: spans.
        body_limits: how long a body may be and may take.
        keep_alive_s: silence after which a stream sends a comment.
        closing: ends of streams under way.
    """

    pipeline: Pipeline
    keys: KeyRing
    admission: Admission
    tracing: Tracing
    body_limits: BodyLimits
    keep_alive_s: float
    closing: "set[asyncio.Task[None]]" = field(default_factory=set["asyncio.Task[None]"])

    async def create(self, request: Request, request_id: str) -> ChatAnswer:
        """Answers one call; whoever sends the answer closes it.

        Raises:
            K3Error: anything that ends the request before its status line.
        """
        arrival_unix_ns = time.time_ns()
        # Looked up often, and starlette searches its list each time; the first of a name counts.
        headers = dict(reversed(request.headers.items()))
        tenant = self.keys.authenticate(headers)
        num_announced = bodies.check_headers(headers, self.body_limits.max_bytes)
        self.admission.check()
        self.admission.check_room(num_announced)
        async with contextlib.AsyncExitStack() as stack:
            span = self.tracing.begin("gateway chat", headers)
            stack.callback(span.end)
            span.set_attribute("k3.request_id", request_id)
            budget = stack.enter_context(self.admission.budget())
            body = await read_body(request.receive, self.body_limits, self.admission, budget)
            # Only now: a body on its way keeps nobody from being served.
            stack.enter_context(self.admission.slot())
            preparing = self.pipeline.prepare(body, tenant, request_id, arrival_unix_ns)
            presence = Presence(request.receive)
            try:
                with presence:
                    answer = await self._answer(stack, preparing, span, presence)
            except BaseException:
                presence.close()
                raise
            if answer.close is None:
                presence.close()
            return answer

    async def _answer(
        self,
        stack: contextlib.AsyncExitStack,
        preparing: contextlib.AbstractAsyncContextManager[Prepared],
        span: Span,
        presence: Presence,
    ) -> ChatAnswer:
        prepared = await stack.enter_async_context(preparing)
        generation = await stack.enter_async_context(self.pipeline.start(prepared))
        if not prepared.options.is_stream:
            return ChatAnswer(await _whole(prepared, generation, span))
        batches = Batches(generation, self.keep_alive_s)
        await batches.wait_first(FIRST_BATCH_WAIT_S)
        # From here on `close` owns everything that is open.
        close = self._closer(generation, batches, span, stack.pop_all())
        response = EventStream(
            chunks=write_stream(prepared, generation, batches, _usage, close),
            presence=presence,
            headers=STREAM_HEADERS | _timing(generation),
        )
        return ChatAnswer(response, close)

    def _closer(
        self,
        generation: Generation,
        batches: Batches,
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
            if code == "ok" and not generation.answer.has_stopped_early:
                # Everything has ended by itself: nothing in there waits, or could be interrupted.
                await close_all(code)
                return
            # The server cancels every await of a client that left; a task of its own is spared.
            task = asyncio.get_running_loop().create_task(close_all(code))
            self.closing.add(task)
            task.add_done_callback(self.closing.discard)
            await asyncio.shield(task)

        return close


async def _whole(prepared: Prepared, generation: Generation, span: Span) -> Response:
    code = Cancelled.code
    builder = BodyBuilder()
    try:
        async with contextlib.aclosing(generation.events()) as batches:
            async for batch in batches:
                if batch == SILENCE:
                    continue
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


def _timing(generation: Generation) -> dict[str, str]:
    ledger = generation.ledger()
    return {"server-timing": server_timing(ledger)} if ledger else {}


def _usage(generation: Generation) -> Usage:
    answer = generation.answer
    return Usage(
        num_prompt_tokens=generation.order.num_prompt_tokens,
        num_cached_tokens=answer.num_cached_tokens or 0,
        num_image_tokens=sum(slot.num_tokens for slot in generation.order.prompt.image_slots),
        num_output_tokens=answer.num_output_tokens,
        num_reasoning_tokens=answer.num_reasoning_tokens,
        ledger=generation.ledger(),
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
    ledger = generation.ledger()
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
