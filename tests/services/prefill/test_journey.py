import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest
from support.worker_pair import END, SIZES, UNIT, WAIT_S, Gateway, Pair, scripted_parts, worker_pair

from k3core.engine.parts import EngineSizes
from k3wire.bus.base import Bus
from k3wire.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    TierUnavailable,
)
from k3wire.messages.base import Message
from k3wire.messages.stream import TokenDelta


def with_pair(test: Callable[[Pair], Awaitable[None]], sizes: EngineSizes = SIZES) -> None:
    async def run() -> None:
        prefill = scripted_parts("prefill", sizes=sizes)
        decode = scripted_parts("decode", sizes=sizes)
        async with asyncio.timeout(4 * WAIT_S), worker_pair(prefill, decode) as pair:
            await test(pair)

    asyncio.run(run())


PROMPT = [5] * 40


def test_a_request_flows_through_both_workers_with_one_position_after_the_other() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        await gateway.send(gateway.request("r", [*PROMPT, 0]))
        last = await gateway.until_ended("r")
        assert gateway.tokens("r") == [11, 12, 13, END]
        assert last.finish_reason == "stop"
        first = gateway.deltas("r")[0]
        assert first.num_cached_tokens == 0
        assert [(r.stage, r.tier, r.outcome) for r in first.reports] == [("prefill", "L4", "miss")]
        senders = [frame.worker_id.split("-")[0] for frame in gateway.frames]
        assert senders == ["prefill", "decode", "decode", "decode"]
        assert [frame.seq for frame in gateway.frames] == [0, 0, 1, 2]
        reports = [r.stage for delta in gateway.deltas("r")[1:] for r in delta.reports]
        assert reports == ["prefill", "decode"]
        await gateway.until_idle(pair.num_pages)

    with_pair(test)


def test_cac_08_the_second_equal_prompt_hits_and_says_what_it_saved() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        for request_id in ("one", "two"):
            await gateway.send(gateway.request(request_id, [*PROMPT, 0]))
            await gateway.until_ended(request_id)
        first = gateway.deltas("two")[0]
        assert first.num_cached_tokens == 40
        report = first.reports[-1]
        assert (report.outcome, report.num_items, report.num_hits) == ("hit", 41, 40)
        assert report.saved_ns > 0
        assert gateway.tokens("two") == gateway.tokens("one")

    with_pair(test)


def test_only_rows_that_decode_lacks_are_sent() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        sizes = []
        for request_id in ("one", "two"):
            await gateway.send(gateway.request(request_id, [*PROMPT, 0]))
            await gateway.until_ended(request_id)
            reports = [r for delta in gateway.deltas(request_id)[1:] for r in delta.reports]
            sizes.append(reports[0].size_bytes)
        layout = pair.prefill.layout
        assert sizes[0] == 6 * layout.unit_bytes + layout.page_bytes
        assert sizes[1] == 1 * layout.unit_bytes + layout.page_bytes

    with_pair(test)


@pytest.mark.parametrize(
    ("max_tokens", "line", "tokens", "reason"),
    [(1, 0, [11], "length"), (3, 0, [11, 12, 13], "length"), (64, 0, [11, 12, 13, END], "stop")],
)
def test_an_answer_ends_where_it_should_and_leaves_nothing(
    max_tokens: int, line: int, tokens: list[int], reason: str
) -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        await gateway.send(gateway.request("r", [*PROMPT, line], max_tokens=max_tokens))
        last = await gateway.until_ended("r")
        assert gateway.tokens("r") == tokens
        assert last.finish_reason == reason
        await gateway.until_idle(pair.num_pages)

    with_pair(test)


def test_a_first_token_that_ends_the_answer_needs_no_decode_worker() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        await gateway.send(gateway.request("r", [*PROMPT, 0], stop_token_ids=(11,)))
        last = await gateway.until_ended("r")
        assert (last.token_ids, last.finish_reason) == ((11,), "stop")
        assert len(gateway.deltas("r")) == 1
        await gateway.until_idle(pair.num_pages)

    with_pair(test)


def test_a_resumed_request_goes_on_at_its_output_position() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        prompt = [*PROMPT, 11, 0]
        await gateway.send(gateway.request("r", prompt, attempt=1, num_emitted_tokens=1))
        await gateway.until_ended("r", 1)
        assert gateway.tokens("r", 1) == [12, 13, END]
        assert gateway.deltas("r", 1)[0].position == 1

    with_pair(test)


def test_many_requests_at_once_get_what_each_gets_alone() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        names = [f"r{index}" for index in range(40)]
        for index, name in enumerate(names):
            await gateway.send(gateway.request(name, [*PROMPT[: index % 30], 7, 0]))
        for name in names:
            await gateway.until_ended(name)
            assert gateway.tokens(name) == [11, 12, 13, END]
        for role in ("prefill", "decode"):
            worker_id = gateway.beats[role].worker_id
            seqs = [frame.seq for frame in gateway.frames if frame.worker_id == worker_id]
            assert seqs == list(range(len(seqs)))
        await gateway.until_idle(pair.num_pages)

    with_pair(test, replace(SIZES, arena_bytes=4 * SIZES.arena_bytes))


def test_a_full_decode_worker_is_said_before_any_token_so_that_another_may_be_tried() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        names = [f"r{index}" for index in range(pair.num_pages)]
        for name in names:
            await gateway.send(gateway.request(name, [*PROMPT, 1]))
        errors = [await first_of(gateway, name) for name in names]
        refused = [delta for delta in errors if delta.error is not None]
        assert refused
        assert all(delta.error and delta.error.code == "slow_down" for delta in refused)
        assert all(delta.position == 0 for delta in refused)
        for name in names:
            await gateway.cancel(name)
        await gateway.until_idle(pair.num_pages)

    with_pair(test)


async def first_of(gateway: Gateway, name: str) -> TokenDelta:
    await gateway.until(lambda: bool(gateway.deltas(name)))
    return gateway.deltas(name)[0]


def test_a_cancel_while_prefilling_frees_both_sides() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        await gateway.send(gateway.request("r", [*PROMPT, 2]))
        await gateway.until(lambda: gateway.beats["decode"].load.num_waiting == 1)
        await gateway.until(lambda: gateway.beats["prefill"].load.num_waiting == 1)
        await gateway.cancel("r")
        await gateway.until_idle(pair.num_pages)
        assert gateway.deltas("r") == []

    with_pair(test)


def test_a_cancel_while_decoding_frees_its_pages_and_stops_the_stream() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        await gateway.send(gateway.request("r", [*PROMPT, 1]))
        await gateway.until(lambda: gateway.beats["decode"].load.num_running == 1)
        assert gateway.beats["decode"].load.num_free_pages < pair.num_pages
        await gateway.cancel("r")
        await gateway.cancel("r")
        await gateway.until_idle(pair.num_pages)
        assert gateway.tokens("r") == [20]

    with_pair(test)


def test_a_cancel_before_its_request_keeps_it_out() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        await gateway.cancel("r")
        with pytest.raises(Cancelled):
            await gateway.send(gateway.request("r", [*PROMPT, 0]))
        await gateway.cancel("s", attempt=0)
        with pytest.raises(Cancelled):
            await gateway.send(gateway.request("s", [*PROMPT, 0]))
        await gateway.send(gateway.request("s", [*PROMPT, 0], attempt=1))
        await gateway.until_ended("s", 1)

    with_pair(test)


def test_a_repeated_request_runs_once_and_a_newer_attempt_replaces_it() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        request = gateway.request("r", [*PROMPT, 1])
        first = await gateway.send(request)
        assert await gateway.send(request) == first
        await gateway.until(lambda: gateway.beats["decode"].load.num_running == 1)
        await gateway.send(gateway.request("r", [*PROMPT, 0], attempt=1))
        await gateway.until_ended("r", 1)
        assert gateway.tokens("r", 1) == [11, 12, 13, END]
        assert gateway.tokens("r", 0) == [20]
        with pytest.raises(Cancelled):
            await gateway.send(gateway.request("r", [*PROMPT, 0], attempt=1))
        await gateway.until_idle(pair.num_pages)

    with_pair(test)


def test_refusals_are_typed_and_immediate() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        with pytest.raises(DeadlineExceeded):
            await gateway.send(gateway.request("late", [*PROMPT, 0], timeout_s=-1.0))
        with pytest.raises(InvalidRequest):
            await gateway.send(
                gateway.request("full", [*PROMPT, 0], num_emitted_tokens=3, max_tokens=3)
            )
        request = gateway.request("other", [*PROMPT, 0])
        with pytest.raises(ModelNotFound):
            await gateway.send(msgspec.structs.replace(request, model_fingerprint="another"))

    with_pair(test)


def test_a_prompt_that_can_never_fit_fails_on_its_stream() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        room = UNIT * pair.prefill.layout.page_units * pair.num_pages
        await gateway.send(gateway.request("r", [*([5] * room), 0]))
        last = await gateway.until_ended("r")
        assert last.error is not None
        assert last.error.code == "context_length_exceeded"
        await gateway.until_idle(pair.num_pages)

    with_pair(test)


def test_a_dead_decode_worker_is_worker_lost_on_the_stream() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        await gateway.send(gateway.request("r", [*PROMPT, 0], decode_worker_id="nobody"))
        last = await gateway.until_ended("r")
        assert last.finish_reason == "error"
        assert last.error is not None
        assert last.error.code == "worker_lost"

    with_pair(test)


def test_a_request_past_its_deadline_ends_with_that_error_at_either_worker() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        await gateway.send(gateway.request("held", [*PROMPT, 2], timeout_s=0.5))
        await gateway.send(gateway.request("slow", [*PROMPT, 1], timeout_s=0.5))
        for name in ("held", "slow"):
            last = await gateway.until_ended(name)
            assert last.error is not None
            assert last.error.code == "deadline_exceeded"
        await gateway.until_idle(pair.num_pages)

    with_pair(test)


class NoCancelBus:
    """A bus that is away whenever its client wants to cancel something."""

    def __init__(self, inner: Bus) -> None:
        self._inner = inner
        self.call, self.serve, self.listen = inner.call, inner.serve, inner.listen

    async def publish(self, subject: str, message: Message) -> None:
        if subject.startswith("k3.cancel."):
            raise TierUnavailable("The bus is away.")
        await self._inner.publish(subject, message)


def test_a_bus_that_takes_no_cancel_costs_one_request_and_not_the_worker() -> None:
    async def run() -> None:
        async with asyncio.timeout(4 * WAIT_S), worker_pair(prefill_bus=NoCancelBus) as pair:
            gateway = pair.gateway
            await gateway.send(gateway.request("r", [*PROMPT, 2]))
            await gateway.until(lambda: gateway.beats["decode"].load.num_waiting == 1)
            await gateway.cancel("r")
            await gateway.until_idle(pair.num_pages)
            await gateway.send(gateway.request("next", [*PROMPT, 0]))
            await gateway.until_ended("next")
            assert gateway.tokens("next") == [11, 12, 13, END]
            assert not pair.prefill_task.done()

    asyncio.run(run())
