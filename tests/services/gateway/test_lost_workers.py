"""Workers that are lost, asked or answering: replaced before the first token, told of after it."""

import asyncio

import pytest
from support.generation_room import Room, beat, generation, read, says

from k3_gateway import generation as generation_module
from k3wire import subjects
from k3wire.bus.base import Headers
from k3wire.errors import (
    ShuttingDown,
    WorkerLost,
)
from k3wire.messages.base import Admitted
from k3wire.messages.prefill import PrefillRequest
from k3wire.messages.stream import TokenDelta
from k3wire.service import directory as directory_module


@pytest.fixture(autouse=True)
def workers_never_fall_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "HEARTBEAT_STALE_S", 600.0)


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
