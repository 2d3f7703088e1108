"""A gateway's generations on a bus of their own, with workers that say what they are told to."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from k3_gateway.answer import Answer
from k3_gateway.generation import CANCELLED_STAGES, Fleet, Generation, Order
from k3_gateway.inbox import TokenInbox
from k3_gateway.routing import Router
from k3text.parsers.assemble import assemble
from k3text.parsers.events import Event
from k3text.parsers.output_parser import OutputParser
from k3text.tokenizer import Tokenizer
from k3wire import subjects
from k3wire.bus.base import Headers
from k3wire.bus.memory import MemoryBus
from k3wire.errors import (
    K3Error,
)
from k3wire.messages.base import Admitted, Stage
from k3wire.messages.control import Cancel, Heartbeat
from k3wire.messages.prefill import PrefillRequest
from k3wire.messages.prompt import PromptPayload
from k3wire.messages.sampling import SamplingParams
from k3wire.messages.stream import TokenDelta, TokenFrame
from k3wire.service.directory import Directory
from k3wire.service.pieces import PieceHolder

BYTES = Tokenizer({bytes([byte]): byte for byte in range(256)})
GATEWAY = "gateway-1"
FAR_NS = 1 << 62

Say = Callable[[PrefillRequest], list[TokenDelta]]
"""What a worker streams for a request; raises what it refuses with."""


def says(text: str, end: str | None = "stop") -> Say:
    def say(request: PrefillRequest) -> list[TokenDelta]:
        return [
            TokenDelta(
                request_id=request.request_id,
                attempt=request.attempt,
                token_ids=tuple(text.encode()),
                finish_reason=end,
            )
        ]

    return say


def refuses(error: K3Error) -> Say:
    def say(request: PrefillRequest) -> list[TokenDelta]:
        raise error

    return say


def fails(error: K3Error, text: str = "") -> Say:
    def say(request: PrefillRequest) -> list[TokenDelta]:
        failed = TokenDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            finish_reason="error",
            error=error.to_info(),
        )
        return [*says(text, None)(request), failed] if text else [failed]

    return say


def beat(role: Stage, worker_id: str) -> Heartbeat:
    return Heartbeat(
        role=role, worker_id=worker_id, epoch=1, seq=1, sent_unix_ns=0, pid=1, is_ready=True
    )


class Beating:
    """A directory whose workers beat again as soon as they are suspected, unless they are dead."""

    def __init__(self) -> None:
        self.inner = Directory()
        self.beats: dict[str, Heartbeat] = {}
        self.suspected: list[str] = []
        self.dead: set[str] = set()
        self.num_waits = 0

    def take(self, one: Heartbeat) -> None:
        self.beats[one.worker_id] = one
        self.inner.take(one)

    def suspect(self, worker_id: str) -> None:
        self.suspected.append(worker_id)
        self.inner.suspect(worker_id)
        if worker_id not in self.dead:
            asyncio.get_running_loop().call_soon(self._beat_again, self.beats[worker_id])

    def _beat_again(self, last: Heartbeat) -> None:
        sent_ns = time.time_ns() + 10**9
        self.take(msgspec.structs.replace(last, seq=last.seq + 1, sent_unix_ns=sent_ns))

    async def wait_for(self, role: Stage, deadline_s: float) -> list[Heartbeat]:
        self.num_waits += 1
        return await self.inner.wait_for(role, deadline_s)


@dataclass
class Room:
    """A gateway's fleet on a bus of its own, with workers that say what they are told to."""

    bus: MemoryBus = field(default_factory=MemoryBus)
    directory: Beating = field(default_factory=Beating)
    inbox: TokenInbox = field(default_factory=TokenInbox)
    router: Router = field(default_factory=lambda: Router(GATEWAY, seed=1))
    pieces: PieceHolder = field(default_factory=lambda: PieceHolder("k3.pieces"))
    asked: list[PrefillRequest] = field(default_factory=list)
    cancels: list[tuple[str, int | None]] = field(default_factory=list)

    async def open(
        self,
        workers: dict[str, list[Say]],
        route_wait_s: float = 5.0,
        decode_ids: tuple[str, ...] = ("d",),
    ) -> Fleet:
        """Starts workers, each with what it says the first time, the second, and so on."""
        await self.bus.listen(subjects.tokens(GATEWAY), TokenFrame, self.inbox.on_frame)
        await self.pieces.serve(self.bus)
        for stage in CANCELLED_STAGES:
            await self.bus.listen(subjects.cancel(stage), Cancel, self._hear(stage))
        for worker_id, lines in workers.items():
            self.directory.take(beat("prefill", worker_id))
            subject = subjects.direct(subjects.PREFILL, worker_id)
            await self.bus.serve(subject, subjects.PREFILL, self.handler(worker_id, lines))
        for worker_id in decode_ids:
            self.directory.take(beat("decode", worker_id))
        return Fleet(
            GATEWAY, self.bus, self.directory, self.router, self.inbox, self.pieces, route_wait_s
        )  # fmt: skip

    def _hear(self, stage: str) -> Callable[[Cancel], None]:
        return lambda cancel: self.cancels.append((stage, cancel.attempt))

    def handler(self, worker_id: str, lines: list[Say]) -> Callable[..., object]:
        async def handle(request: PrefillRequest, headers: Headers) -> Admitted:
            self.asked.append(request)
            deltas = lines.pop(0)(request)
            for delta in deltas:
                frame = TokenFrame(worker_id=worker_id, epoch=1, seq=1, deltas=(delta,))
                await self.bus.publish(request.stream_subject, frame)
            return Admitted(worker_id=worker_id, epoch=1)

        return handle

    def check_empty(self, *workers: str) -> None:
        """Nothing of any request is left."""
        assert self.inbox.num_open == 0
        assert self.pieces.size_bytes == 0
        assert [self.router.num_claimed(worker) for worker in (*workers, "d")] == [0] * (
            len(workers) + 1
        )


def generation(fleet: Fleet, *, num_tokens: int = 5, stops: tuple[str, ...] = ()) -> Generation:
    order = Order(
        request_id="r",
        prompt=PromptPayload(token_ids=array("i", range(num_tokens)).tobytes()),
        sampling=SamplingParams(max_tokens=9),
        cache_salt="",
        arrival_unix_ns=0,
        deadline_unix_ns=FAR_NS,
    )
    answer = Answer(OutputParser(BYTES, "response"), stops)
    return Generation(fleet=fleet, order=order, answer=answer)


async def read(one: Generation) -> str:
    events: list[Event] = []
    async with one:
        async for batch in one.events():
            events += batch
    return assemble(events).content


@asynccontextmanager
async def first_batch(one: Generation) -> AsyncIterator[None]:
    """A reader that leaves after the first batch."""
    async with one:
        batches = one.events()
        await anext(batches)
        yield
        await batches.aclose()
