"""The budget of bytes in flight: never exceeded, in order, whole after every accident."""

import asyncio
import random

from support.fetchers import fetcher, start, until
from support.picture_host import Asked, answer, picture_host
from support.pictures import encode, gradient

from k3_fetcher.budget import ByteBudget


async def test_takers_wait_in_order_and_get_all_at_once() -> None:
    budget, order = ByteBudget(10), list[str]()
    release = asyncio.Event()

    async def take(name: str, size: int) -> None:
        async with budget.take(size):
            order.append(name)
            await release.wait()

    jobs = [start(take(name, size)) for name, size in (("a", 6), ("b", 6), ("c", 4))]
    await until(lambda: order)
    # `c` would fit, but `b` came first and must not starve.
    assert (order, budget.free_bytes) == (["a"], 4)
    release.set()
    await asyncio.gather(*jobs)
    assert (order, budget.free_bytes) == (["a", "b", "c"], 10)


async def test_what_is_larger_than_the_budget_takes_all_of_it() -> None:
    budget = ByteBudget(10)
    async with budget.take(1000):
        assert budget.free_bytes == 0
    assert budget.free_bytes == 10


async def test_nothing_is_lost_when_takers_are_cancelled_at_any_moment() -> None:
    budget, dice = ByteBudget(100), random.Random(7)
    held = 0

    async def take(size: int, turns: int) -> None:
        nonlocal held
        async with budget.take(size):
            held += size
            assert held <= 100
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                held -= size

    jobs: list[asyncio.Task[None]] = []
    for _ in range(2000):
        jobs.append(start(take(dice.randint(1, 100), dice.randint(0, 4))))
        for _ in range(dice.randint(0, 3)):
            await asyncio.sleep(0)
        if dice.random() < 0.5:
            dice.choice(jobs).cancel()
        assert budget.free_bytes + held <= 100
    await asyncio.gather(*jobs, return_exceptions=True)
    assert (budget.free_bytes, held) == (100, 0)


async def test_a_body_beyond_the_budget_waits_until_another_one_is_read() -> None:
    picture = encode(gradient(40, 40), "PNG")
    go = {"/a": asyncio.Event(), "/b": asyncio.Event()}
    headed: list[str] = []

    async def slowly(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(picture)[: -len(picture)])
        await writer.drain()
        headed.append(asked.path)
        await go[asked.path].wait()
        writer.write(picture)

    async with picture_host() as host:
        host.answers |= {"/a": slowly, "/b": slowly, "/c": answer(picture)}
        async with fetcher(max_pending_bytes=2 * len(picture)) as found:
            first, second = [start(found.resolve(host.url(path))) for path in ("/a", "/b")]
            await until(lambda: len(headed) == 2)
            third = start(found.resolve(host.url("/c")))
            await until(lambda: host.num_asked("/c"))
            for _ in range(200):
                await asyncio.sleep(0)
            assert not third.done()
            go["/a"].set()
            await first
            await third
            assert not second.done()
            go["/b"].set()
            await second
