import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from support.worker_pair import END, GATEWAY, WAIT_S, Pair, worker_pair

from k3_decode.seat import REST_S
from k3core.transfer.page_exchange import layout_info, unpack_ids
from k3wire import subjects
from k3wire.errors import Cancelled, DeadlineExceeded, Overloaded, SlowDown, WorkerLost
from k3wire.messages.base import Admitted
from k3wire.messages.control import Heartbeat
from k3wire.messages.decode import CommitRequest, ReserveReply, ReserveRequest
from k3wire.messages.prompt import PromptPayload, PromptSource
from k3wire.messages.sampling import SamplingParams

PROMPT = [5] * 40 + [0]


def with_pair(test: Callable[[Pair], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(4 * WAIT_S), worker_pair() as pair:
            await test(pair)

    asyncio.run(run())


def reservation(
    pair: Pair,
    request_id: str = "r",
    attempt: int = 0,
    timeout_s: float = 30.0,
    prefill_id: str = "",
) -> ReserveRequest:
    return ReserveRequest(
        request_id=request_id,
        attempt=attempt,
        prefill_worker_id=prefill_id or pair.gateway.beats["prefill"].worker_id,
        num_prompt_tokens=len(PROMPT),
        prompt=PromptSource(inline=PromptPayload(token_ids=array("i", PROMPT).tobytes())),
        sampling=SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=(END,)),
        layout=layout_info(pair.decode.layout, pair.decode.model_fingerprint),
        stream_subject=subjects.tokens(GATEWAY),
        deadline_unix_ns=time.time_ns() + int(timeout_s * 1e9),
    )


async def reserve(pair: Pair, request: ReserveRequest) -> ReserveReply:
    subject = subjects.direct(subjects.RESERVE, pair.gateway.beats["decode"].worker_id)
    deadline = time.time_ns() + int(WAIT_S * 1e9)
    return await pair.gateway.bus.call(subject, subjects.RESERVE, request, deadline)


async def commit(pair: Pair, request_id: str = "r", **changes: object) -> Admitted:
    request = CommitRequest(
        request_id=request_id,
        num_tokens=len(PROMPT),
        first_token_id=11,
        checksum=0,
        deadline_unix_ns=time.time_ns() + int(30e9),
    )
    request = msgspec.structs.replace(request, **changes)
    subject = subjects.direct(subjects.COMMIT, pair.gateway.beats["decode"].worker_id)
    deadline = time.time_ns() + int(WAIT_S * 1e9)
    return await pair.gateway.bus.call(subject, subjects.COMMIT, request, deadline)


def test_a_grant_covers_the_prompt_and_one_state() -> None:
    async def test(pair: Pair) -> None:
        grant = (await reserve(pair, reservation(pair))).grant
        assert grant.base_address == pair.decode.base_address
        assert len(unpack_ids(grant.latent_units)) == 6
        assert len(unpack_ids(grant.state_pages)) == pair.decode.layout.num_groups
        assert grant.num_resident_tokens == 0

    with_pair(test)


def test_a_repeated_reservation_gets_the_same_grant() -> None:
    async def test(pair: Pair) -> None:
        first = await reserve(pair, reservation(pair))
        assert await reserve(pair, reservation(pair)) == first

    with_pair(test)


def test_another_layout_is_refused_with_both_values() -> None:
    async def test(pair: Pair) -> None:
        asked = reservation(pair)
        other = msgspec.structs.replace(asked.layout, page_bytes=12345)
        with pytest.raises(Overloaded) as caught:
            await reserve(pair, msgspec.structs.replace(asked, layout=other))
        assert "12345" in caught.value.message
        assert str(asked.layout.page_bytes) in caught.value.message
        await pair.gateway.until_idle(pair.num_pages)

    with_pair(test)


def test_a_late_reservation_is_refused() -> None:
    async def test(pair: Pair) -> None:
        with pytest.raises(DeadlineExceeded):
            await reserve(pair, reservation(pair, timeout_s=-1.0))

    with_pair(test)


def test_reservations_that_do_not_fit_are_told_to_slow_down_and_may_come_again() -> None:
    async def test(pair: Pair) -> None:
        held = 0
        with pytest.raises(SlowDown):
            while True:
                await reserve(pair, reservation(pair, f"r{held}"))
                held += 1
        assert held > 0
        await pair.gateway.cancel("r0")
        await pair.gateway.until(lambda: pair.gateway.beats["decode"].load.num_waiting == held - 1)
        await reserve(pair, reservation(pair, f"r{held}"))

    with_pair(test)


def test_a_reservation_past_its_deadline_is_freed() -> None:
    async def test(pair: Pair) -> None:
        await reserve(pair, reservation(pair, timeout_s=0.2))
        await pair.gateway.until(lambda: pair.gateway.beats["decode"].load.num_waiting == 1)
        await pair.gateway.until_idle(pair.num_pages)
        with pytest.raises(Cancelled):
            await commit(pair)

    with_pair(test)


def test_a_silent_prefill_worker_loses_its_reservations() -> None:
    async def test(pair: Pair) -> None:
        alive = pair.gateway.beats["prefill"].worker_id
        beat = Heartbeat(
            role="prefill",
            worker_id="prefill-gone",
            epoch=1,
            seq=1,
            sent_unix_ns=time.time_ns(),
            pid=1,
            is_ready=True,
        )
        await pair.gateway.bus.publish(subjects.heartbeat("prefill", "prefill-gone"), beat)
        await reserve(pair, reservation(pair, "gone", prefill_id="prefill-gone"))
        await reserve(pair, reservation(pair, "alive", prefill_id=alive))
        await pair.gateway.until(lambda: pair.gateway.beats["decode"].load.num_waiting == 2)
        await pair.gateway.until(lambda: pair.gateway.beats["decode"].load.num_waiting == 1)
        with pytest.raises(Cancelled):
            await commit(pair, "gone")
        await reserve(pair, reservation(pair, "alive", prefill_id=alive))

    with_pair(test)


def test_damaged_pages_never_run() -> None:
    async def test(pair: Pair) -> None:
        await reserve(pair, reservation(pair))
        with pytest.raises(WorkerLost):
            await commit(pair, checksum=1234)
        await pair.gateway.until_idle(pair.num_pages)
        assert pair.gateway.deltas("r") == []

    with_pair(test)


def test_a_commit_of_another_length_or_of_nothing_is_refused() -> None:
    async def test(pair: Pair) -> None:
        with pytest.raises(Cancelled):
            await commit(pair, "unknown")
        await reserve(pair, reservation(pair))
        with pytest.raises(WorkerLost):
            await commit(pair, num_tokens=7)
        await pair.gateway.until_idle(pair.num_pages)

    with_pair(test)


def test_a_reservation_whose_client_left_rests_and_is_then_free() -> None:
    async def test(pair: Pair) -> None:
        await reserve(pair, reservation(pair))
        await pair.gateway.cancel("r")
        with pytest.raises(Cancelled):
            await commit(pair)
        # The engine's thread tells of its pages a moment after it has granted them.
        await pair.gateway.until(lambda: pair.decode.core.load.num_free_pages < pair.num_pages)
        await pair.gateway.until_idle(pair.num_pages)

    with_pair(test)


def test_a_reservation_whose_writer_says_it_stopped_is_free_at_once() -> None:
    async def test(pair: Pair) -> None:
        await reserve(pair, reservation(pair, "one"))
        await reserve(pair, reservation(pair, "two"))
        await pair.gateway.cancel("one", attempt=0)
        await pair.gateway.cancel("two")
        await pair.gateway.cancel("two", attempt=0)
        async with asyncio.timeout(REST_S / 2):
            await pair.gateway.until_idle(pair.num_pages)

    with_pair(test)


def test_a_newer_attempt_takes_the_place_of_an_older() -> None:
    async def test(pair: Pair) -> None:
        await reserve(pair, reservation(pair))
        await reserve(pair, reservation(pair, attempt=1))
        with pytest.raises(Cancelled):
            await reserve(pair, reservation(pair, attempt=0))
        with pytest.raises(Cancelled):
            await commit(pair)

    with_pair(test)
