"""After any mixture of hits, failures, cancels and reads, nothing of a request is left."""

import asyncio
import random

import pytest
from support.fetchers import AbsentStore, fetcher, start, until
from support.picture_host import Asked, answer, picture_host
from support.pictures import encode, gradient

from k3wire.errors import K3Error
from k3wire.messages.control import Cancel
from k3wire.messages.media import ImageRef


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_left_after_random_traffic(seed: int) -> None:
    dice = random.Random(seed)
    pictures = [encode(gradient(10 + i, 10), "PNG") for i in range(8)]
    images: list[ImageRef] = []
    store = AbsentStore(is_gone=False)

    async def serve(asked: Asked, writer: asyncio.StreamWriter) -> None:
        for _ in range(dice.randint(0, 20)):
            await asyncio.sleep(0)
        body = pictures[int(asked.path.partition("?")[2] or 0) % len(pictures)]
        match dice.randint(0, 5):
            case 0:
                writer.transport.abort()
            case 1:
                writer.write(answer(status=dice.choice([404, 500, 204, 302])))
            case 2:
                writer.write(answer(body[: dice.randint(0, len(body))]))
            case 3:
                writer.write(answer(body, Cache_Control="no-store"))
            case _:
                writer.write(answer(body, Cache_Control="max-age=0", ETag="1"))

    async with picture_host() as host:
        host.answers["/a.png"] = serve
        async with fetcher(store=store, max_retries=1, front_bytes=1000) as found:
            before = asyncio.all_tasks()

            async def request(number: int) -> None:
                name = f"r{number % 7}"
                try:
                    if images and dice.random() < 0.3:
                        await found.read(dice.choice(images), name)
                    else:
                        url = host.url(f"/a.png?{dice.randint(0, 30)}")
                        images.append((await found.resolve(url, request_id=name)).image)
                except K3Error:
                    pass

            jobs: list[asyncio.Task[None]] = []
            for number in range(200):
                jobs.append(start(request(number)))
                for _ in range(dice.randint(0, 10)):
                    await asyncio.sleep(0)
                chance = dice.random()
                if chance < 0.1:
                    found.handler.cancel(Cancel(request_id=f"r{dice.randint(0, 6)}"))
                elif chance < 0.2:
                    dice.choice(jobs).cancel()
                elif chance < 0.3:
                    store.is_gone = not store.is_gone
            results = await asyncio.gather(*jobs, return_exceptions=True)
            faults = [r for r in results if isinstance(r, Exception)]
            assert faults == []
            await until(lambda: host.num_open == 0)
            assert found.handler.load(0).num_running == 0
            assert found.handler._running == {}
            await until(lambda: not {t for t in asyncio.all_tasks() - before if not serves(t)})
    assert images


def serves(task: "asyncio.Task[object]") -> bool:
    """Whether a task is the picture host's own, for a connection that is kept open."""
    return "PictureHost.serve" in repr(task.get_coro())
