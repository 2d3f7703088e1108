"""One request on its way through prefill and decode: dispatch, retry, tokens, cancel.

Enters: a prepared prompt. Leaves: parser events and, at the end, what the request cost. Always
true: what was opened is closed, whatever ends the request; a retry happens only before the first
token has been shown, on other workers, at most `MAX_ATTEMPTS` times; a client that leaves cancels
every stage.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from k3_gateway.answer import Answer
from k3_gateway.inbox import TokenInbox, TokenStream
from k3_gateway.routing import Router, prefix_digests
from k3text.parsers.events import Event
from k3wire import subjects
from k3wire.bus.base import Bus
from k3wire.errors import DeadlineExceeded, K3Error, NoResponders, Overloaded, WorkerLost
from k3wire.messages.base import Stage
from k3wire.messages.control import Cancel, Heartbeat
from k3wire.messages.prefill import PrefillRequest
from k3wire.messages.prompt import (
    MAX_INLINE_PROMPT_BYTES,
    PromptPayload,
    PromptSource,
    encode_prompt,
)
from k3wire.messages.sampling import SamplingParams
from k3wire.service.directory import Directory
from k3wire.service.pieces import PieceHolder
from k3wire.telemetry import metrics
from k3wire.telemetry.ledger import Ledger, build_ledger

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Tries in all, before the first token."""

ADMIT_TIMEOUT_S = 2.0
"""Longest wait for a prefill worker's admission; a living one answers within milliseconds. For
messages that were lost: a worker that is lost ends the wait as soon as it is missed."""

ROUTE_RETRY_S = 2.0
"""What a client is told to wait where no worker is there."""

CANCELLED_STAGES: tuple[Stage, ...] = ("prefill", "decode", "encoder", "preprocessor")
"""Who hears that a client left; fetches are shared and bounded, and end by themselves."""

ATTEMPT_STAGES: tuple[Stage, ...] = ("prefill", "decode")
"""Who hears that one attempt is given up for another; these two tell attempts apart."""

SURELY_INLINE_BYTES = 8 * 1024
"""A prompt of text with fewer bytes of ids is sent inline without being measured: one with as
many marks, five bytes each at most, as ids is still under the limit."""

LOST_WORKER_TEXT = "A worker was lost while it answered; ask again"

SILENCE: Final = "silence"
"""In place of a batch: nothing came for as long as the reader wanted to wait."""

Batch = list[Event] | Literal["silence"]
"""What a client may see of one delta, which may be nothing, or that no delta came."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What every generation needs of the gateway.

    Attributes:
        gateway_id: of this process.
        bus: to the workers.
        directory: who is there.
        router: who gets what.
        inbox: where tokens arrive.
        pieces: where long prompts are read from.
        route_wait_s: how long a missing worker is waited for; a restart takes less.
        running: generations under way, to be told of workers that left.
    """

    gateway_id: str
    bus: Bus
    directory: Directory
    router: Router
    inbox: TokenInbox
    pieces: PieceHolder
    route_wait_s: float
    running: "set[Generation]" = field(default_factory=set["Generation"])

    def end_all(self, error: K3Error) -> None:
        """Ends every generation with an error, as when the gateway must go."""
        for generation in list(self.running):
            generation.end(error)

    def worker_left(self, beat: Heartbeat) -> None:
        """Tells every generation of a worker that fell silent."""
        for generation in list(self.running):
            generation.worker_left(beat)


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be generated.

    Attributes:
        request_id: which.
        prompt: token ids and image slots.
        sampling: complete.
        cache_salt: tenant and client salt together.
        arrival_unix_ns: when the request came.
        deadline_unix_ns: when it is given up.
    """

    request_id: str
    prompt: PromptPayload
    sampling: SamplingParams
    cache_salt: str
    arrival_unix_ns: int
    deadline_unix_ns: int

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, pads included."""
        return len(self.prompt.token_ids) // 4


@dataclass(slots=True)
class _Attempt:
    number: int
    prefill: Heartbeat
    decode: Heartbeat
    stream: TokenStream
    asking: asyncio.Timeout | None = None

    def fail(self, error: K3Error) -> None:
        """Ends it, though nothing may have been heard of it yet."""
        self.stream.fail(error)
        asking, self.asking = self.asking, None
        if asking is not None:
            asking.reschedule(0.0)


@dataclass(slots=True, eq=False)
class Generation:
    """One running request; use as an async context manager, then read `events` once.

    Attributes:
        answer: what has come so far.
        first_token_unix_ns: when the first token came, 0 before.
    """

    fleet: Fleet
    order: Order
    answer: Answer
    first_token_unix_ns: int = 0
    _digests: list[bytes] = field(default_factory=list[bytes])
    _source: PromptSource | None = None
    _held_digest: bytes = b""
    _attempt: _Attempt | None = None
    _was_sent: bool = False
    _must_end: bool = False
    _ledger: tuple[int, Ledger] | None = None

    async def __aenter__(self) -> "Generation":
        self._source = self._inline_or_held()
        self._digests = prefix_digests(self.order.prompt.token_ids, self.order.cache_salt)
        metrics.REQUESTS_RUNNING.inc()
        self.fleet.running.add(self)
        return self

    async def __aexit__(self, *exception: object) -> None:
        metrics.REQUESTS_RUNNING.dec()
        self.fleet.running.discard(self)
        has_ended = self.answer.is_ended and not self.answer.has_stopped_early
        self._close_attempt()
        if self._was_sent and not has_ended:
            # The client's connection may be gone and this task cancelled; the workers must hear
            # of it all the same. One that was given up as dead may only have been slow.
            await asyncio.shield(self._cancel())
        if self._held_digest:
            self.fleet.pieces.release(self._held_digest)

    def _inline_or_held(self) -> PromptSource:
        prompt = self.order.prompt
        if len(prompt.token_ids) < SURELY_INLINE_BYTES and not prompt.image_slots:
            return PromptSource(inline=prompt)
        encoded = encode_prompt(prompt)
        if len(encoded) <= MAX_INLINE_PROMPT_BYTES:
            return PromptSource(inline=prompt)
        blob = self.fleet.pieces.hold(encoded)
        self._held_digest = blob.digest
        return PromptSource(blob=blob)

    def ledger(self) -> Ledger | None:
        """What the time to the first token was spent on; None before there is one."""
        if not self.first_token_unix_ns:
            return None
        num_reports = len(self.answer.reports)
        if self._ledger is None or self._ledger[0] != num_reports:
            found = build_ledger(
                self.answer.reports, self.order.arrival_unix_ns, self.first_token_unix_ns
            )
            self._ledger = (num_reports, found)
        return self._ledger[1]

    async def _cancel(self, attempt: int | None = None) -> None:
        cancel = Cancel(request_id=self.order.request_id, attempt=attempt)
        for stage in CANCELLED_STAGES if attempt is None else ATTEMPT_STAGES:
            try:
                await self.fleet.bus.publish(subjects.cancel(stage), cancel)
            except K3Error:
                logger.warning("cancel not sent", extra={"stage": stage})

    async def events(self, silence_s: float | None = None) -> AsyncGenerator[Batch, None]:
        """Yields what a client may see, a batch for each delta; batches may be empty.

        Args:
            silence_s: yield `SILENCE` when no delta came for so long; None: never.

        Raises:
            K3Error: the request failed; nothing more comes.
        """
        for number in range(MAX_ATTEMPTS):
            try:
                async for batch in self._try(number, silence_s):
                    yield batch
                return
            except K3Error as error:
                if not self._may_retry(error, number):
                    raise
                metrics.RETRIES.labels(error.code).inc()
                logger.info(
                    "attempt failed",
                    extra={"request": self.order.request_id, "n": number, "code": error.code},
                )
                self._suspect(error)
                self._close_attempt()
                # Whoever was too slow must not compute for nobody once it wakes.
                await self._cancel(number)

    def _may_retry(self, error: K3Error, number: int) -> bool:
        has_time = time.time_ns() < self.order.deadline_unix_ns
        is_fresh = self.answer.num_output_tokens == 0
        # Without an attempt no worker was found, and one was waited for already.
        was_sent = self._attempt is not None
        is_worth_it = error.is_retryable and is_fresh and was_sent and not self._must_end
        return is_worth_it and has_time and number + 1 < MAX_ATTEMPTS

    def _suspect(self, error: K3Error) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        if error.code in ("no_responders", "deadline_exceeded", "server_shutting_down"):
            self.fleet.directory.suspect(attempt.prefill.worker_id)
        if error.code == "worker_lost":
            # Prefill says so of its decode worker; a living one is back with its next beat.
            self.fleet.directory.suspect(attempt.decode.worker_id)

    async def _try(self, number: int, silence_s: float | None) -> AsyncGenerator[Batch, None]:
        attempt = await self._dispatch(number)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + (self.order.deadline_unix_ns - time.time_ns()) / 1e9
        while not self.answer.is_ended:
            delta = await attempt.stream.next(deadline_s, silence_s)
            if delta is None:
                yield SILENCE
                continue
            if delta.token_ids and not self.first_token_unix_ns:
                self.first_token_unix_ns = time.time_ns()
            yield self.answer.feed(delta)

    async def _dispatch(self, number: int) -> _Attempt:
        prefill, decode = await self._route()
        order, fleet = self.order, self.fleet
        assert self._source is not None
        stream = fleet.inbox.open(order.request_id, number)
        self._attempt = _Attempt(number, prefill, decode, stream)
        self._was_sent = True
        tokens = order.num_prompt_tokens
        fleet.router.note_sent(prefill.worker_id, tokens, self._digests)
        fleet.router.note_sent(decode.worker_id, tokens)
        request = PrefillRequest(
            request_id=order.request_id,
            attempt=number,
            model_fingerprint=prefill.model_fingerprint,
            prompt=self._source,
            sampling=order.sampling,
            cache_salt=order.cache_salt,
            stream_subject=subjects.tokens(fleet.gateway_id),
            decode_worker_id=decode.worker_id,
            deadline_unix_ns=order.deadline_unix_ns,
        )
        subject = subjects.direct(subjects.PREFILL, prefill.worker_id)
        admit_ns = min(order.deadline_unix_ns, time.time_ns() + int(ADMIT_TIMEOUT_S * 1e9))
        attempt = self._attempt
        try:
            # A time-out without a time: it ends when the attempt is given up.
            async with asyncio.timeout(None) as attempt.asking:
                await fleet.bus.call(subject, subjects.PREFILL, request, admit_ns)
        except DeadlineExceeded as error:
            raise NoResponders("A prefill worker did not answer") from error
        except TimeoutError:
            # The stream tells why.
            logger.debug("ask given up", extra={"request": order.request_id})
        finally:
            attempt.asking = None
        return attempt

    async def _route(self) -> tuple[Heartbeat, Heartbeat]:
        loop = asyncio.get_running_loop()
        left_s = (self.order.deadline_unix_ns - time.time_ns()) / 1e9
        until_s = loop.time() + min(self.fleet.route_wait_s, left_s)
        prefills = await self.fleet.directory.wait_for("prefill", until_s)
        decodes = await self.fleet.directory.wait_for("decode", until_s)
        missing = [
            role for role, found in (("prefill", prefills), ("decode", decodes)) if not found
        ]
        if missing:
            raise Overloaded(
                f"No worker is ready for: {', '.join(missing)}; try again in a moment",
                retry_after_s=ROUTE_RETRY_S,
            )
        # Two checkpoints may be served at once while a fleet is being moved to a new one.
        served = {worker.model_fingerprint for worker in decodes}
        fitting = [worker for worker in prefills if worker.model_fingerprint in served]
        if not fitting:
            raise Overloaded(
                "The prefill workers serve another checkpoint than the decode workers; "
                "try again in a moment",
                retry_after_s=ROUTE_RETRY_S,
            )
        prefill = self.fleet.router.choose_prefill(
            fitting, self.order.num_prompt_tokens, self._digests
        )
        matching = [w for w in decodes if w.model_fingerprint == prefill.model_fingerprint]
        return prefill, self.fleet.router.choose_decode(matching)

    def _close_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        tokens = self.order.num_prompt_tokens
        self.fleet.inbox.close(self.order.request_id)
        self.fleet.router.note_ended(attempt.prefill.worker_id, tokens)
        self.fleet.router.note_ended(attempt.decode.worker_id, tokens)

    def end(self, error: K3Error) -> None:
        """Ends it with an error; it is not tried again."""
        self._must_end = True
        if self._attempt is not None:
            self._attempt.fail(error)

    def worker_left(self, beat: Heartbeat) -> None:
        """Hears that a worker fell silent; ends the attempt if it was one of ours."""
        attempt = self._attempt
        if attempt is None:
            return
        if _is_same(beat, attempt.decode):
            attempt.fail(WorkerLost(LOST_WORKER_TEXT))
        elif _is_same(beat, attempt.prefill) and not self.answer.num_output_tokens:
            attempt.fail(NoResponders(LOST_WORKER_TEXT))


def _is_same(beat: Heartbeat, other: Heartbeat) -> bool:
    return (beat.worker_id, beat.epoch) == (other.worker_id, other.epoch)


def complete_sampling(
    sampling: SamplingParams, max_tokens: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """Fills in what depends on prompt and model."""
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
