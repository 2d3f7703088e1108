"""Bodies on their way, over real sockets: counted as they come, in time, and in nobody's way."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.chat_gateway import (
    ChatGateway,
    chat_body,
    chat_gateway,
    chat_head,
    read_answer,
)

from k3_gateway.openai.body_intake import MIN_PROGRESS_BYTES, BodyLimits, Pace

BIG = 1_000_000


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def begin(
    gateway: ChatGateway, num_bytes: int, announced: int | None = BIG
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends the beginning of a body, and waits until it is counted."""
    before = gateway.admission.num_bytes
    reader, writer = await gateway.connect()
    writer.write(chat_head(announced))
    if announced is None:
        writer.write(b"%x\r\n" % BIG)
    writer.write(b" " * num_bytes)
    await until(lambda: gateway.admission.num_bytes - before == num_bytes)
    return reader, writer


def refused(answer: tuple[int, Any]) -> tuple[int, str]:
    status, body = answer
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["code"]


@pytest.mark.parametrize("announced", [BIG, None])
async def test_what_has_come_of_a_body_counts_and_keeps_nobody_else_out(
    announced: int | None,
) -> None:
    async with asyncio.timeout(10), chat_gateway(max_running=1, max_queued_bytes=BIG) as gateway:
        _, writer = await begin(gateway, 700_000, announced)
        assert gateway.admission.num_running == 0
        assert refused(await gateway.post(chat_body("x" * 400_000))) == (429, "slow_down")
        assert (await gateway.post(chat_body("hi")))[0] == 200
        writer.close()
        await until(lambda: gateway.admission.num_bytes == 0)
        assert (await gateway.post(chat_body("x" * 40_000)))[0] == 200
        assert gateway.admission.num_arriving == 0


async def test_a_body_for_which_there_is_no_room_is_refused_by_its_length() -> None:
    async with asyncio.timeout(10), chat_gateway(max_queued_bytes=BIG) as gateway:
        _, first = await begin(gateway, 700_000)
        reader, writer = await gateway.connect()
        writer.write(chat_head(400_000))
        assert refused(await read_answer(reader)) == (429, "slow_down")
        for one in (first, writer):
            one.close()


@pytest.mark.parametrize(
    ("idle_s", "total_s", "num_bytes"),
    [(0.05, 300.0, 0), (0.05, 300.0, 100_000), (15.0, 0.05, 100_000)],
)
async def test_a_body_that_stalls_is_told_so_and_let_go_of(
    idle_s: float, total_s: float, num_bytes: int
) -> None:
    async with (
        asyncio.timeout(10),
        chat_gateway(body_idle_timeout_s=idle_s, body_timeout_s=total_s) as gateway,
    ):
        reader, writer = await gateway.connect()
        writer.write(chat_head(BIG) + b" " * num_bytes)
        assert refused(await read_answer(reader)) == (408, "request_timeout")
        assert await reader.read() == b""
        assert (gateway.admission.num_bytes, gateway.admission.num_arriving) == (0, 0)
        writer.close()


async def test_a_byte_now_and_then_is_a_stall_too() -> None:
    async with asyncio.timeout(10), chat_gateway(body_idle_timeout_s=0.2) as gateway:
        reader, writer = await begin(gateway, 100)
        answer = asyncio.get_running_loop().create_task(read_answer(reader))
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait([answer], timeout=0.02)
        assert refused(answer.result()) == (408, "request_timeout")
        writer.close()


class Timeout:
    """A time-out that notes when it is moved to."""

    def __init__(self) -> None:
        self.moves: list[float] = []

    def reschedule(self, when: float) -> None:
        self.moves.append(when)

    def expired(self) -> bool:
        return False


async def test_enough_bytes_give_a_body_more_time_and_never_more_than_all_of_it() -> None:
    timeout, start_s = Timeout(), asyncio.get_running_loop().time()
    limits = BodyLimits(max_bytes=BIG, timeout_s=1000.0, idle_timeout_s=600.0)
    pace = Pace(timeout, limits)
    for _ in range(4):
        pace.note(MIN_PROGRESS_BYTES // 2)
    assert len(timeout.moves) == 3
    assert start_s + 600 <= timeout.moves[0] <= timeout.moves[-1] <= start_s + 1000
    pace.end()
    pace.note(MIN_PROGRESS_BYTES)
    assert timeout.moves[-1] <= start_s


async def test_with_too_many_bodies_on_their_way_the_oldest_goes() -> None:
    async with asyncio.timeout(10), chat_gateway(max_running=2) as gateway:
        old, middle = [await begin(gateway, 1000 + number) for number in range(2)]
        assert (await gateway.post(chat_body("hi")))[0] == 200
        assert refused(await read_answer(old[0])) == (408, "request_timeout")
        assert gateway.admission.num_bytes == 1001
        for _, writer in (old, middle):
            writer.close()


@pytest.mark.parametrize("value", [b"[],", b'{"a":[]},', b'"",'])
async def test_a_body_of_too_many_values_is_refused_while_it_comes(value: bytes) -> None:
    async with asyncio.timeout(10), chat_gateway() as gateway:
        reader, writer = await gateway.connect()
        writer.write(chat_head(100_000_000))
        writer.write(b'{"messages": [' + value * 320_000)
        assert refused(await read_answer(reader)) == (400, "invalid_json")
        assert gateway.admission.num_bytes == 0
        writer.close()
