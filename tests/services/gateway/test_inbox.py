"""Token streams: order, duplicates, fences, losses."""

import asyncio

import pytest

from k3_gateway import inbox
from k3_gateway.inbox import TokenInbox, TokenStream
from k3wire.errors import DeadlineExceeded, SlowDown, WorkerLost
from k3wire.messages.stream import TokenDelta, TokenFrame


def delta(position: int, *ids: int, end: bool = False, attempt: int = 0) -> TokenDelta:
    return TokenDelta(
        request_id="r",
        attempt=attempt,
        position=position,
        token_ids=ids,
        finish_reason="stop" if end else None,
    )


async def read(stream: TokenStream, wait_s: float = 5.0) -> list[int]:
    deadline_s = asyncio.get_running_loop().time() + wait_s
    return [token async for d in stream.deltas(deadline_s) for token in d.token_ids]


def frame(*deltas: TokenDelta) -> TokenFrame:
    return TokenFrame(worker_id="w", epoch=1, seq=1, deltas=deltas)


async def test_deltas_that_overtake_each_other_come_out_in_order() -> None:
    box = TokenInbox()
    stream = box.open("r", 0)
    for one in (delta(3, 13, end=True), delta(1, 11, 12), delta(0, 10)):
        box.on_frame(frame(one))
    assert await read(stream) == [10, 11, 12, 13]


async def test_repeated_and_overlapping_deltas_deliver_each_position_once() -> None:
    stream = TokenStream(request_id="r", attempt=0)
    for one in (delta(0, 1, 2), delta(0, 1, 2), delta(1, 2, 3), delta(3, end=True)):
        stream.put(one)
    assert await read(stream) == [1, 2, 3]


async def test_a_stale_attempt_is_dropped() -> None:
    stream = TokenStream(request_id="r", attempt=1)
    stream.put(delta(0, 9, attempt=0))
    stream.put(delta(0, 1, end=True, attempt=1))
    assert await read(stream) == [1]


async def test_a_gap_that_stays_open_is_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MAX_GAP_S", 0.01)
    stream = TokenStream(request_id="r", attempt=0)
    reader = asyncio.ensure_future(read(stream))  # noqa: TID251 - the test needs both sides
    await asyncio.sleep(0)
    stream.put(delta(2, 7))
    with pytest.raises(WorkerLost):
        await reader


async def test_an_error_from_the_worker_is_raised_after_what_came_before() -> None:
    stream = TokenStream(request_id="r", attempt=0)
    stream.put(delta(0, 1))
    error = SlowDown("no pages").to_info()
    stream.put(TokenDelta(request_id="r", finish_reason="error", error=error))
    got: list[int] = []
    with pytest.raises(SlowDown):
        async for one in stream.deltas(asyncio.get_running_loop().time() + 5):
            got.extend(one.token_ids)
    assert got == [1]


async def test_a_reader_that_stalls_ends_its_own_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox, "MAX_QUEUED_DELTAS", 4)
    stream = TokenStream(request_id="r", attempt=0)
    for position in range(6):
        stream.put(delta(position, position))
    with pytest.raises(WorkerLost):
        await read(stream)


async def test_waiting_past_the_deadline_says_so() -> None:
    stream = TokenStream(request_id="r", attempt=0)
    with pytest.raises(DeadlineExceeded):
        await read(stream, wait_s=0.0)


async def test_frames_of_closed_requests_are_dropped() -> None:
    box = TokenInbox()
    box.open("r", 0)
    box.close("r")
    box.close("r")
    box.on_frame(frame(delta(0, 1)))
    assert box.num_open == 0


async def test_silence_is_said_and_nothing_is_lost_by_it() -> None:
    stream = TokenStream(request_id="r", attempt=0)
    deadline_s = asyncio.get_running_loop().time() + 5
    assert await stream.next(deadline_s, 0.01) is None
    stream.put(delta(0, 1))
    found = await stream.next(deadline_s, 0.01)
    assert found is not None
    assert found.token_ids == (1,)
    with pytest.raises(DeadlineExceeded):
        await stream.next(asyncio.get_running_loop().time() + 0.01, 5.0)
