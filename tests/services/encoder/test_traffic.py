import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest
from support.encoder_bench import TOKEN_BYTES, Bench, expected, with_bench
from support.fake_preprocessor import slot_of

from k3core.transfer.memory import MemoryObjectStore
from k3wire.errors import Cancelled
from k3wire.messages.control import Cancel

PICTURES = [("a", 2, 2), ("b", 2, 4), ("c", 4, 4), ("d", 2, 2), ("e", 2, 6), ("f", 4, 8)]
KEYS = [slot_of(*pick).feature_key + b"float32" for pick in PICTURES]


def held_bytes(bench: Bench) -> list[int]:
    held = [bench.shelf.find(key) for key in KEYS]
    return [stored.span.size_bytes for stored in held if stored is not None]


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_gives_right_rows_and_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)

    async def ask(bench: Bench, request_id: str, picks: Sequence[tuple[str, int, int]]) -> None:
        try:
            _, found = await bench.ask([slot_of(*pick) for pick in picks], request_id)
        except Cancelled:
            return
        for pick, rows in zip(picks, found, strict=True):
            assert np.array_equal(rows, expected(*pick))

    async def client(bench: Bench, number: int) -> None:
        for turn in range(6):
            request_id = f"{number}/{turn}"
            picks = [rng.choice(PICTURES) for _ in range(rng.randint(1, 3))]
            async with asyncio.TaskGroup() as group:
                group.create_task(ask(bench, request_id, picks))
                if rng.random() < 0.3:
                    for _ in range(rng.randint(0, 12)):
                        await asyncio.sleep(0)
                    bench.handler.cancel(Cancel(request_id=request_id))

    async def test(bench: Bench) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(client(bench, number))
        await bench.handler.drain()
        assert bench.handler.num_requests == 0
        sizes = held_bytes(bench)
        assert sum(sizes) == bench.shelf.room.used_bytes
        assert len(sizes) == bench.shelf.num_entries

    with_bench(
        test,
        cache_bytes=6 * TOKEN_BYTES + 256,
        pixel_bytes=1 << 20,
        stores=[None, MemoryObjectStore(4096)],
    )
