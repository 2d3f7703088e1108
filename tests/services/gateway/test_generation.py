"""One request's way through the fleet: retry, fences, cancels, and nothing left behind."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from k3_gateway import generation as generation_module
from k3_gateway.answer import Answer
from k3_gateway.generation import CANCELLED_STAGES, MAX_ATTEMPTS, Fleet, Generation, Order
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
    InternalError,
    InvalidRequest,
    K3Error,
    Overloaded,
    ShuttingDown,
    SlowDown,
    WorkerLost,
)
from k3wire.messages.base import Admitted, Stage
from k3wire.messages.control import Cancel, Heartbeat
from k3wire.messages.prefill import PrefillRequest
from k3wire.messages.prompt import PromptPayload, decode_prompt
from k3wire.messages.sampling import SamplingParams
from k3wire.messages.stream import TokenDelta, TokenFrame
from k3wire.service import directory as directory_module
from k3wire.service.directory import Directory
from k3wire.service.pieces import PieceHolder, read_blob

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


@pytest.fixture(autouse=True)
def workers_never_fall_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "HEARTBEAT_STALE_S", 600.0)


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


async def test_an_answer_that_ends_by_itself_cancels_nothing() -> None:
    room = Room()
    fleet = await room.open({"p": [says("hello")]})
    one = generation(fleet)
    assert await read(one) == "hello"
    assert one.first_token_unix_ns > 0
    assert room.cancels == []
    room.check_empty("p")
    assert fleet.running == set()


@pytest.mark.parametrize(
    ("failure", "suspected"),
    [
        (refuses(SlowDown("full")), []),
        (refuses(ShuttingDown("leaving")), ["p"]),
        (fails(WorkerLost("gone")), ["d"]),
        (fails(SlowDown("full")), []),
    ],
)
async def test_a_failure_before_the_first_token_is_tried_again(
    failure: Say, suspected: list[str]
) -> None:
    room = Room()
    fleet = await room.open({"p": [failure, says("hello")]})
    assert await read(generation(fleet)) == "hello"
    assert [request.attempt for request in room.asked] == [0, 1]
    # The attempt that was given up is cancelled, and no other.
    assert room.cancels == [("prefill", 0), ("decode", 0)]
    assert room.directory.suspected == suspected
    room.check_empty("p")


async def test_a_dead_worker_is_left_out_of_the_next_try() -> None:
    room = Room()
    fleet = await room.open({"p": [says("hello")]})
    room.directory.dead.add("dead")
    room.directory.take(beat("prefill", "dead"))
    fleet.router.note_sent("p", 10**6)
    assert await read(generation(fleet)) == "hello"
    assert [request.attempt for request in room.asked] == [1]
    assert room.directory.suspected == ["dead"]
    fleet.router.note_ended("p", 10**6)
    room.check_empty("p", "dead")


async def test_tries_are_counted_and_the_last_error_is_told() -> None:
    room = Room()
    fleet = await room.open({"p": [refuses(SlowDown("full"))] * 9})
    with pytest.raises(SlowDown):
        await read(generation(fleet))
    assert len(room.asked) == MAX_ATTEMPTS
    assert room.cancels[-len(CANCELLED_STAGES) :] == [(s, None) for s in CANCELLED_STAGES]
    room.check_empty("p")


@pytest.mark.parametrize(
    "failure",
    [
        refuses(InvalidRequest("no")),
        fails(InternalError("bug")),
        fails(WorkerLost("gone"), "some text"),
    ],
)
async def test_what_cannot_be_hidden_or_helped_is_not_tried_again(failure: Say) -> None:
    room = Room()
    fleet = await room.open({"p": [failure, says("never")]})
    with pytest.raises(K3Error):
        await read(generation(fleet))
    assert len(room.asked) == 1
    assert room.cancels == [(stage, None) for stage in CANCELLED_STAGES]
    room.check_empty("p")


@pytest.mark.parametrize("absent", [("prefill",), ("decode",), ("prefill", "decode")])
async def test_without_workers_the_wait_is_one_wait_and_who_is_missing_is_named(
    absent: tuple[str, ...],
) -> None:
    room = Room()
    workers = {} if "prefill" in absent else {"p": [says("never")]}
    decode_ids = () if "decode" in absent else ("d",)
    fleet = await room.open(workers, route_wait_s=0.01, decode_ids=decode_ids)
    with pytest.raises(Overloaded) as found:
        await read(generation(fleet))
    assert found.value.retry_after_s
    named = [role for role in ("prefill", "decode") if role in found.value.message]
    assert tuple(named) == absent
    assert room.directory.num_waits == 2  # one for each role
    assert room.cancels == []
    room.check_empty()


@pytest.mark.parametrize("stops", [(), ("ll",)])
async def test_whoever_leaves_or_has_read_enough_cancels_every_stage(
    stops: tuple[str, ...],
) -> None:
    room = Room()
    fleet = await room.open({"p": [says("hello", None)]})
    async with first_batch(generation(fleet, stops=stops)):
        assert room.router.num_claimed("p") == 1
        assert room.inbox.num_open == 1
    assert room.cancels == [(stage, None) for stage in CANCELLED_STAGES]
    room.check_empty("p")


async def test_a_long_prompt_is_read_piece_by_piece_and_let_go() -> None:
    room = Room()
    fleet = await room.open({"p": [says("hello", None)]})
    one = generation(fleet, num_tokens=40000)
    async with first_batch(one):
        source = room.asked[0].prompt
        assert source.inline is None
        assert source.blob is not None
        data = await read_blob(room.bus, None, source.blob, FAR_NS)
        assert decode_prompt(data) == one.order.prompt
    room.check_empty("p")


async def test_tokens_of_an_attempt_that_was_given_up_are_not_shown() -> None:
    def late(request: PrefillRequest) -> list[TokenDelta]:
        stale = says("stale")(PrefillRequest(**{**_fields(request), "attempt": 0}))
        return [*stale, *says("fresh")(request)]

    room = Room()
    fleet = await room.open({"p": [refuses(SlowDown("full")), late]})
    assert await read(generation(fleet)) == "fresh"
    assert [request.attempt for request in room.asked] == [0, 1]


def _fields(request: PrefillRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


async def test_a_prefill_worker_that_falls_silent_is_replaced_before_the_first_token() -> None:
    room = Room()

    def silence(request: PrefillRequest) -> list[TokenDelta]:
        # It admits and is never heard of again.
        for one in list(fleet.running):
            one.worker_left(beat("prefill", "p"))
        room.directory.take(beat("prefill", "q"))
        return []

    fleet = await room.open({"p": [silence]})
    subject = subjects.direct(subjects.PREFILL, "q")
    await room.bus.serve(subject, subjects.PREFILL, room.handler("q", [says("hello")]))
    assert await read(generation(fleet)) == "hello"
    room.check_empty("p", "q")


@pytest.mark.parametrize("line", [says("", None), says("hel", None)])
async def test_a_gateway_that_must_go_tells_every_client_and_tries_nothing_again(line: Say) -> None:
    room = Room()

    def admits(request: PrefillRequest) -> list[TokenDelta]:
        asyncio.get_running_loop().call_later(0.01, fleet.end_all, ShuttingDown("going"))
        return line(request)

    fleet = await room.open({"p": [admits]})
    with pytest.raises(ShuttingDown):
        await read(generation(fleet))
    assert len(room.asked) == 1
    assert room.cancels == [(stage, None) for stage in CANCELLED_STAGES]
    room.check_empty("p")


async def test_the_ask_of_a_worker_that_is_lost_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It was delivered and is never answered; nothing but the loss may end it.
    monkeypatch.setattr(generation_module, "ADMIT_TIMEOUT_S", 600.0)
    room, end = Room(), asyncio.Event()

    async def dies(request: PrefillRequest, headers: Headers) -> Admitted:
        room.asked.append(request)
        fleet.worker_left(beat("prefill", "p"))
        await end.wait()
        return Admitted(worker_id="p", epoch=1)

    fleet = await room.open({"q": [says("hello")]})
    room.directory.dead.add("p")
    room.directory.take(beat("prefill", "p"))
    await room.bus.serve(subjects.direct(subjects.PREFILL, "p"), subjects.PREFILL, dies)
    fleet.router.note_sent("q", 10**6)
    async with asyncio.timeout(5):
        assert await read(generation(fleet)) == "hello"
    end.set()
    assert [request.attempt for request in room.asked] == [0, 1]
    assert room.directory.suspected == ["p"]
    fleet.router.note_ended("q", 10**6)
    room.check_empty("p", "q")


async def test_a_decode_worker_that_is_lost_before_the_first_token_is_replaced() -> None:
    room = Room()

    def waits(request: PrefillRequest) -> list[TokenDelta]:
        # Prefill admits, and waits for a decode worker that is no more.
        lost = request.decode_worker_id
        room.directory.dead.add(lost)
        asyncio.get_running_loop().call_soon(fleet.worker_left, beat("decode", lost))
        return []

    fleet = await room.open({"p": [waits, says("hello")]}, decode_ids=("d", "e"))
    async with asyncio.timeout(5):
        assert await read(generation(fleet)) == "hello"
    first, second = (request.decode_worker_id for request in room.asked)
    assert {first, second} == {"d", "e"}
    assert room.directory.suspected == [first]
    room.check_empty("p", "e")


async def test_a_gateway_that_must_go_waits_for_no_answer_to_an_ask() -> None:
    room, end = Room(), asyncio.Event()

    async def is_slow(request: PrefillRequest, headers: Headers) -> Admitted:
        room.asked.append(request)
        fleet.end_all(ShuttingDown("going"))
        await end.wait()
        return Admitted(worker_id="p", epoch=1)

    fleet = await room.open({})
    room.directory.take(beat("prefill", "p"))
    await room.bus.serve(subjects.direct(subjects.PREFILL, "p"), subjects.PREFILL, is_slow)
    with pytest.raises(ShuttingDown):
        await read(generation(fleet))
    end.set()
    assert len(room.asked) == 1
    room.check_empty("p")


async def test_a_decode_worker_that_falls_silent_ends_the_answer() -> None:
    room = Room()
    fleet = await room.open({"p": [says("hel", None)]})
    one = generation(fleet)
    with pytest.raises(WorkerLost):
        async with one:
            async for _ in one.events():
                fleet.worker_left(beat("prefill", "p"))
                fleet.worker_left(beat("decode", "d"))
    assert len(room.asked) == 1
    room.check_empty("p")
