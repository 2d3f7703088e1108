"""One request's way through the fleet: retry, fences, cancels, and nothing left behind."""

import asyncio

import pytest
from support.generation_room import (
    FAR_NS,
    Room,
    Say,
    beat,
    fails,
    first_batch,
    generation,
    read,
    refuses,
    says,
)

from k3_gateway.generation import CANCELLED_STAGES, MAX_ATTEMPTS
from k3wire.errors import (
    InternalError,
    InvalidRequest,
    K3Error,
    Overloaded,
    ShuttingDown,
    SlowDown,
    WorkerLost,
)
from k3wire.messages.prefill import PrefillRequest
from k3wire.messages.prompt import decode_prompt
from k3wire.messages.stream import TokenDelta
from k3wire.service import directory as directory_module
from k3wire.service.pieces import read_blob


@pytest.fixture(autouse=True)
def workers_never_fall_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "HEARTBEAT_STALE_S", 600.0)


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
