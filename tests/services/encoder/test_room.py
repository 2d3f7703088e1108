import asyncio

from k3_encoder.room import Room
from k3core.engine.host_memory import Span

WAIT_S = 10.0


def test_a_span_taken_is_one_nobody_else_has() -> None:
    async def run() -> None:
        room = Room(1024)
        first = room.try_allocate(1000)
        assert first is not None
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            got: list[Span] = []

            async def take(size: int) -> None:
                async with room.span(size, "p") as span:
                    got.append(span)

            # The large one came first: the small one, which would fit, waits its turn.
            group.create_task(take(512))
            await asyncio.sleep(0)
            group.create_task(take(16))
            await asyncio.sleep(0)
            assert got == []
            room.free(first)
        assert [span.size_bytes for span in got] == [512, 64]
        assert room.used_bytes == 0

    asyncio.run(run())
