"""A client that leaves ends what serves it, once, and nothing else."""

import asyncio
import gc
import weakref
from collections.abc import MutableMapping
from typing import Any

import pytest

from k3_gateway.openai.presence import Presence
from k3wire.errors import Cancelled


class Client:
    """Leaves when it is told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> MutableMapping[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def test_a_block_ends_as_cancelled_when_the_client_leaves() -> None:
    client = Client()
    presence = Presence(client.receive)
    async with asyncio.timeout(5):
        with pytest.raises(Cancelled), presence:
            asyncio.get_running_loop().call_soon(client.left.set)
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    # The task goes on, and no later block of this client begins.
    await asyncio.sleep(0)
    with pytest.raises(Cancelled), presence:
        raise AssertionError("nobody is there")
    presence.close()


async def test_leaving_between_two_blocks_cancels_nothing() -> None:
    client = Client()
    presence = Presence(client.receive)
    with presence:
        await asyncio.sleep(0)
    client.left.set()
    async with asyncio.timeout(5):
        while not presence.is_gone:  # noqa: ASYNC110
            await asyncio.sleep(0)
    presence.close()


async def test_another_cancel_is_not_taken_for_the_clients() -> None:
    presence = Presence(Client().receive)
    is_inside = asyncio.Event()

    async def serve() -> None:
        with presence:
            is_inside.set()
            await asyncio.Event().wait()

    async with asyncio.timeout(5):
        task = asyncio.get_running_loop().create_task(serve())
        await is_inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    presence.close()


async def test_errors_of_the_block_pass() -> None:
    presence = Presence(Client().receive)
    with pytest.raises(ValueError, match="ours"), presence:
        raise ValueError("ours")
    presence.close()


@pytest.mark.parametrize("num_turns", [0, 1, 3])
async def test_a_closed_watch_is_freed_by_its_counts_alone(num_turns: int) -> None:
    # Each request has one: what only the garbage collector frees is memory of hundreds of them.
    gc.disable()
    try:
        client = Client()
        presence = Presence(client.receive)
        with presence:
            for _ in range(num_turns):
                await asyncio.sleep(0)
        presence.close()
        presence.close()
        left = [weakref.ref(presence), weakref.ref(client)]
        del presence, client
        for _ in range(5):
            await asyncio.sleep(0)
        assert [ref() for ref in left] == [None, None]
    finally:
        gc.enable()
