import asyncio
from array import array
from collections.abc import Awaitable, Callable

import pytest
from support.worker_pair import ANSWERS, SIZES, WAIT_S, Pair, worker_pair

from k3_prefill.settings import PrefillSettings
from k3core.engine.parts import EngineParts, scripted_engine
from k3wire.errors import InternalError, SlowDown

PROMPT = [5] * 40
FATAL_LINE = 77


def with_pair(
    test: Callable[[Pair], Awaitable[None]],
    prefill: EngineParts | None = None,
    settings: PrefillSettings | None = None,
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(4 * WAIT_S),
            worker_pair(prefill, prefill_settings=settings) as pair,
        ):
            await test(pair)

    asyncio.run(run())


def test_past_its_limit_the_worker_says_slow_down_and_takes_more_later() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        await gateway.send(gateway.request("a", [*PROMPT, 2]))
        await gateway.send(gateway.request("b", [*PROMPT, 2]))
        with pytest.raises(SlowDown):
            await gateway.send(gateway.request("c", [*PROMPT, 0]))
        await gateway.cancel("a")
        await gateway.until(lambda: gateway.beats["prefill"].load.num_waiting == 1)
        await gateway.send(gateway.request("d", [*PROMPT, 0]))
        await gateway.until_ended("d")

    with_pair(test, settings=PrefillSettings(max_requests=2))


def test_the_heartbeat_counts_requests_of_each_gateway() -> None:
    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        await gateway.send(gateway.request("a", [*PROMPT, 2]))
        await gateway.send(gateway.request("b", [*PROMPT, 1]))
        await gateway.until(lambda: gateway.beats["decode"].load.num_running == 1)
        await gateway.until(lambda: gateway.beats["prefill"].load.active_by_gateway == {"gw": 1})
        load = gateway.beats["prefill"].load
        assert (load.num_running, load.num_waiting, load.num_queued_tokens) == (0, 1, 41)
        assert gateway.beats["decode"].load.active_by_gateway == {"gw": 2}
        assert load.num_pages == pair.num_pages
        assert load.rss_bytes > 0

    with_pair(test)


def test_a_failing_engine_ends_its_streams_and_its_process_with_an_error() -> None:
    def choose(token_ids: "array[int]") -> int:
        if token_ids[-1] == FATAL_LINE:
            raise ZeroDivisionError
        return token_ids[-1]

    async def test(pair: Pair) -> None:
        gateway = pair.gateway
        await gateway.send(gateway.request("waits", [*PROMPT, 2]))
        await gateway.until(lambda: gateway.beats["decode"].load.num_waiting == 1)
        await gateway.send(gateway.request("fatal", [*PROMPT, FATAL_LINE]))
        for name in ("waits", "fatal"):
            last = await gateway.until_ended(name)
            assert last.error is not None
            assert last.error.code == "internal_error"
        async with asyncio.timeout(WAIT_S):
            assert isinstance(await pair.prefill_task, InternalError)
        # What they reserved is given back.
        await gateway.until(lambda: gateway.beats["decode"].load.num_free_pages == pair.num_pages)
        assert not pair.decode_task.done()

    with_pair(test, prefill=scripted_engine(ANSWERS, "prefill", SIZES, choose))
