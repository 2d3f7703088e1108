"""Heavy work beside the loop: a few at once, each turn as long as its work."""

import asyncio
import base64
import threading

import pytest
from support.chat_gateway import chat_body, chat_gateway
from support.raw_png import SIGNATURE, chunk, header

from k3_gateway import images
from k3_gateway.turns import HEAVY_BYTES, MAX_HEAVY_AT_ONCE, SHORT_BYTES, Turns


async def test_no_more_than_a_few_are_heavy_at_once_even_if_their_askers_left() -> None:
    turns, go, begun = Turns(), threading.Event(), [0]

    def work() -> str:
        begun[0] += 1
        assert go.wait(5)
        return "done"

    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        asked = [loop.create_task(turns.run(HEAVY_BYTES, work)) for _ in range(6)]
        while begun[0] < MAX_HEAVY_AT_ONCE:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for one in asked[:2]:
            one.cancel()
        await asyncio.wait(asked[:2])
        for _ in range(20):
            await asyncio.sleep(0)
        assert begun[0] == MAX_HEAVY_AT_ONCE
        go.set()
        assert await asyncio.gather(*asked[2:]) == ["done"] * 4
        assert not turns.heavy.locked()


async def test_short_work_is_done_at_once_and_longer_work_elsewhere() -> None:
    turns, here = Turns(), threading.get_ident()
    assert await turns.run(SHORT_BYTES, threading.get_ident) == here
    for size_bytes in (SHORT_BYTES + 1, HEAVY_BYTES):
        assert await turns.run(size_bytes, threading.get_ident) != here


@pytest.mark.parametrize("num_bytes", [100_000, 2_000_000])
async def test_others_are_answered_while_a_large_picture_is_hashed(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    has_answered, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow_key(data: bytes) -> bytes:
        loop.call_soon_threadsafe(begun.set)
        assert has_answered.wait(5), "the loop stood still"
        return b"k" * 32

    monkeypatch.setattr(images, "content_key", slow_key)
    picture = SIGNATURE + header(1, 1, 8, 2) + chunk(b"IDAT", bytes(num_bytes))
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    async with asyncio.timeout(10), chat_gateway() as gateway:
        slow = loop.create_task(gateway.post(chat_body([part])))
        await begun.wait()
        assert (await gateway.post(chat_body("hi")))[0] == 200
        has_answered.set()
        assert (await slow)[0] == 200
