"""A prefill and a decode worker in one process, over the memory bus and memory transfer.

The test plays the gateway: it sends `PrefillRequest`s and reads the frames of its subject.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from k3_decode.main import run_worker as run_decode
from k3_decode.settings import DecodeSettings
from k3_prefill.main import run_worker as run_prefill
from k3_prefill.settings import PrefillSettings
from k3core.engine.parts import EngineParts, EngineSizes, scripted_engine
from k3core.engine.script import Script, ScriptLine
from k3core.scheduler.scheduler import Role
from k3core.transfer.memory import MemoryFabric
from k3wire import subjects
from k3wire.bus.base import Bus
from k3wire.bus.memory import MemoryBus
from k3wire.errors import K3Error
from k3wire.messages.base import Admitted, Stage
from k3wire.messages.control import Cancel, Heartbeat
from k3wire.messages.media import ImageSlot
from k3wire.messages.prefill import PrefillRequest
from k3wire.messages.prompt import PromptPayload, PromptSource
from k3wire.messages.sampling import SamplingParams
from k3wire.messages.stream import TokenDelta, TokenFrame

WAIT_S = 15.0
GATEWAY = "gw"
UNIT = 8
END = 99
SIZES = EngineSizes(arena_bytes=64 * 1024, unit_tokens=UNIT, chunk_tokens=32, max_rows=64)

ANSWERS = Script(
    (
        ScriptLine("", (11, 12, 13), 0.0, 0.0, 1),
        # Slow enough to be alive for as long as any test looks at it.
        ScriptLine("", tuple(range(20, 60)), 0.0, 60.0, 1),
        ScriptLine("", (11, 12), 60.0, 0.0, 1),
    )
)
"""The last prompt token is the index of the line that answers."""


@dataclass
class Gateway:
    """What a test sees of the fleet: beats, frames, and its own requests."""

    bus: Bus
    beats: dict[str, Heartbeat] = field(default_factory=dict[str, Heartbeat])
    frames: list[TokenFrame] = field(default_factory=list[TokenFrame])
    starts: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    tick: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        """Starts to hear."""
        await self.bus.listen(subjects.heartbeats(), Heartbeat, self._hear_beat)
        await self.bus.listen(subjects.tokens(GATEWAY), TokenFrame, self._hear_frame)

    def _hear_beat(self, beat: Heartbeat) -> None:
        self.beats[beat.role] = beat
        self.tick.set()

    def _hear_frame(self, frame: TokenFrame) -> None:
        self.frames.append(frame)
        self.tick.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Waits, bounded, until something heard makes a condition true."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.tick.clear()
                await self.tick.wait()

    async def until_ready(self, *roles: Stage, timeout_s: float = WAIT_S) -> None:
        """Waits until one worker of each role is ready."""
        await self.until(
            lambda: all(r in self.beats and self.beats[r].is_ready for r in roles), timeout_s
        )

    async def until_idle(self, num_pages: int) -> None:
        """Waits until both workers say that nothing is held."""
        await self.until(
            lambda: all(
                beat.load.num_free_pages == num_pages
                and not beat.load.num_running
                and not beat.load.num_waiting
                for beat in self.beats.values()
            )
        )

    def deltas(self, request_id: str, attempt: int = 0) -> list[TokenDelta]:
        """All deltas of a request so far."""
        return [
            delta
            for frame in self.frames
            for delta in frame.deltas
            if (delta.request_id, delta.attempt) == (request_id, attempt)
        ]

    def tokens(self, request_id: str, attempt: int = 0) -> list[int]:
        """All tokens of a request so far, by position, of which none may lack.

        Frames of two workers come on two connections, so they may overtake each other.
        """
        deltas = sorted(self.deltas(request_id, attempt), key=lambda delta: delta.position)
        found: list[int] = []
        for delta in deltas:
            assert delta.position == deltas[0].position + len(found)
            found += delta.token_ids
        return found

    async def until_ended(
        self, request_id: str, attempt: int = 0, timeout_s: float = WAIT_S
    ) -> TokenDelta:
        """Waits for a request's last delta."""

        start = self.starts[request_id, attempt]

        def last() -> TokenDelta | None:
            deltas = self.deltas(request_id, attempt)
            ends = [delta for delta in deltas if delta.finish_reason is not None]
            num_tokens = sum(len(delta.token_ids) for delta in deltas)
            is_whole = ends and start + num_tokens == ends[0].position + len(ends[0].token_ids)
            return ends[0] if is_whole else None

        await self.until(lambda: last() is not None, timeout_s)
        found = last()
        assert found is not None
        return found

    def request(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        attempt: int = 0,
        num_emitted_tokens: int = 0,
        slots: tuple[ImageSlot, ...] = (),
        decode_worker_id: str = "",
        timeout_s: float = 30.0,
        **sampling: object,
    ) -> PrefillRequest:
        """Makes a request for the fleet."""
        fields = {"max_tokens": 64, "stop_token_ids": (END,), "temperature": 0.0} | sampling
        self.starts[request_id, attempt] = num_emitted_tokens
        payload = PromptPayload(token_ids=array("i", prompt).tobytes(), image_slots=slots)
        return PrefillRequest(
            request_id=request_id,
            attempt=attempt,
            model_fingerprint=self.beats["prefill"].model_fingerprint,
            prompt=PromptSource(inline=payload),
            num_emitted_tokens=num_emitted_tokens,
            sampling=SamplingParams(**fields),  # type: ignore[arg-type]  # by name, per test
            stream_subject=subjects.tokens(GATEWAY),
            decode_worker_id=decode_worker_id or self.beats["decode"].worker_id,
            deadline_unix_ns=time.time_ns() + int(timeout_s * 1e9),
        )

    async def send(self, request: PrefillRequest) -> Admitted:
        """Asks the prefill worker."""
        subject = subjects.direct(subjects.PREFILL, self.beats["prefill"].worker_id)
        deadline = time.time_ns() + int(WAIT_S * 1e9)
        return await self.bus.call(subject, subjects.PREFILL, request, deadline)

    async def cancel(self, request_id: str, attempt: int | None = None) -> None:
        """Tells both workers that the client left."""
        for role in ("prefill", "decode"):
            cancel = Cancel(request_id=request_id, attempt=attempt)
            await self.bus.publish(subjects.cancel(role), cancel)


@dataclass
class Pair:
    """The two workers and the test's end of the bus."""

    gateway: Gateway
    fabric: MemoryFabric
    prefill: EngineParts
    decode: EngineParts
    prefill_task: asyncio.Task[K3Error | None]
    decode_task: asyncio.Task[K3Error | None]

    @property
    def num_pages(self) -> int:
        """Pages of either arena."""
        return self.prefill.core.load.num_pages

    async def kill_decode(self) -> None:
        """Ends the decode worker without a farewell."""
        self.decode_task.cancel()
        await asyncio.wait([self.decode_task])


def scripted_parts(role: Role, script: Script = ANSWERS, sizes: EngineSizes = SIZES) -> EngineParts:
    """An engine whose line is chosen by the last prompt token."""
    return scripted_engine(script, role, sizes, lambda ids: ids[-1])


async def ended(worker: Coroutine[object, object, None]) -> K3Error | None:
    """Runs a worker to its end; its error is a result, so that its neighbour goes on."""
    try:
        await worker
    except K3Error as error:
        return error
    return None


@asynccontextmanager
async def worker_pair(
    prefill: EngineParts | None = None,
    decode: EngineParts | None = None,
    prefill_settings: PrefillSettings | None = None,
    decode_settings: DecodeSettings | None = None,
    prefill_bus: Callable[[Bus], Bus] = lambda bus: bus,
) -> AsyncIterator[Pair]:
    """Runs both workers until the block ends; `prefill_bus` may put itself between."""
    bus, fabric = MemoryBus(), MemoryFabric()
    gateway = Gateway(bus)
    await gateway.listen()
    prefill = prefill or scripted_parts("prefill")
    decode = decode or scripted_parts("decode")
    async with asyncio.TaskGroup() as group:
        prefill_task = group.create_task(
            ended(
                run_prefill(
                    prefill_settings or PrefillSettings(),
                    prefill_bus(bus),
                    fabric.engine(),
                    prefill,
                )
            )
        )
        decode_task = group.create_task(
            ended(run_decode(decode_settings or DecodeSettings(), bus, fabric.engine(), decode))
        )
        try:
            await gateway.until_ready("prefill", "decode")
            yield Pair(gateway, fabric, prefill, decode, prefill_task, decode_task)
        finally:
            prefill_task.cancel()
            decode_task.cancel()
