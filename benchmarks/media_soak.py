"""Whether memory stays flat while pictures that nobody has seen pass through the stages.

Starts fetcher, preprocessor and encoder with the micro checkpoint and small tiers, and asks them
over the bus as a gateway and a prefill worker do: resolve each picture, then have its embeddings
brought to memory of ours. With `--whole` the whole stack is asked over HTTP instead, which takes
longer. Pictures are random and small, most of them new, so that every tier is full soon and puts
out as much as it takes in.

    python benchmarks/media_soak.py [--requests 20000] [--warm-up 5000] [--at-once 16]
        [--bound 1.0] [--whole]

**Warm-up.** Memory grows by design until every bounded table is full, and says nothing before. With
the sizes set here and 1.4 new pictures a request: the fetcher's front and what it knows of addresses
(1 MiB, some 1,600 of them) after 1,200 requests, L2 and L3 sooner, pages and their entries in a
prefill worker after some 3,000, the 4,096 ended requests that it remembers after as many. So the
first `--warm-up` requests are not judged. The tables of a gateway that are longer (65,536 prefixes
of 512 tokens) get nothing from prompts as short as these.

**Verdict.** Prints each service's resident memory as it goes, and the slope of a line through the
samples after the warm-up; ends with status 1 if one is steeper than the bound. The bound is in MB a
thousand requests, so in kilobytes a request. It is not zero because the resident memory of a process
that computes goes up and down by some 2 MB from sample to sample; over a few hundred requests that
alone is a slope of several MB a thousand. So fewer than 5,000 requests after the warm-up are shown
and not judged, with status 1 too.
"""

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from media_stack import PictureHost, Stack, jpeg, picture_host, running_stack

from k3core.engine.host_memory import HostMemory
from k3core.transfer.base import Region
from k3core.transfer.mooncake import MooncakeTransferEngine
from k3core.weights.config_file import load_config
from k3core.weights.fingerprint import checkpoint_fingerprint
from k3ctl.stack.plan import SERVICES
from k3ctl.stack.state import resident_bytes
from k3text.images.config import ProcessorConfig, read_processor_config
from k3text.images.geometry import grid, num_tokens
from k3text.images.keys import feature_key
from k3wire import subjects
from k3wire.bus.nats_bus import NatsBus
from k3wire.errors import K3Error
from k3wire.messages.base import BufferSpan
from k3wire.messages.encode import EncodeItem, EncodeRequest
from k3wire.messages.fetch import ResolveRequest
from k3wire.messages.media import ImageSlot

MIB = 1024 * 1024
SMALL = {
    "K3_FETCHER_FRONT": str(8 * MIB),
    "K3_UP_REDIS_BYTES": str(32 * MIB),
    "K3_UP_SEGMENT_BYTES": str(64 * MIB),
    "K3_PREPROCESSOR_CACHE": str(16 * MIB),
    "K3_ENCODER_CACHE": str(4 * MIB),
    "K3_ENCODER_PIXELS": str(32 * MIB),
    "K3_PREFILL_ARENA": str(32 * MIB),
    "K3_DECODE_ARENA": str(32 * MIB),
}
"""Tiers that a few hundred requests fill: growth after that is nobody's cache."""

NUM_SAMPLES = 80
MIN_JUDGED = 5000
"""Requests after the warm-up that it takes to tell a leak from ups and downs."""

REPEATED = 0.3
"""Share of requests about a picture that was seen before, so that hits are exercised too."""

REMEMBERED = 200
"""Pictures that may come again, the latest ones."""


STAGES = ("fetcher", "preprocessor", "encoder")

MAX_PICTURES = 3
PLACE_BYTES = 64 * 1024
"""Room for one picture's embeddings, 121 at most."""

DEADLINE_S = 120


@dataclass(frozen=True)
class Link:
    """What it takes to ask the stages: a bus, registered memory, the checkpoint's rules."""

    bus: NatsBus
    session: str
    memory: HostMemory
    config: ProcessorConfig
    fingerprint: str
    token_bytes: int


@contextlib.asynccontextmanager
async def open_link(stack: Stack) -> AsyncIterator[Link]:
    """Connects."""
    vision = load_config(stack.checkpoint).vision
    assert vision is not None
    bus = await NatsBus.connect(stack.nats_url, "soak")
    engine = await MooncakeTransferEngine.open("127.0.0.1")
    memory = HostMemory(256 * MAX_PICTURES * PLACE_BYTES)
    await engine.register(Region(memory.address, memory.size_bytes))
    try:
        yield Link(
            bus=bus,
            session=engine.session,
            memory=memory,
            config=read_processor_config(stack.checkpoint),
            fingerprint=checkpoint_fingerprint(stack.checkpoint),
            token_bytes=4 * vision.text_hidden_size,
        )
    finally:
        await engine.close()
        await bus.close()


@dataclass
class Stages:
    """One client's way to the stages; `place` is its own part of the memory, below 256."""

    link: Link
    place: int
    num_asked: int = 0

    async def ask(self, urls: Sequence[str]) -> int:
        """Has pictures resolved and encoded; gives 200, or the status of the error."""
        self.num_asked += 1
        request_id = f"soak-{self.place}-{self.num_asked}"
        deadline_unix_ns = time.time_ns() + DEADLINE_S * 10**9
        try:
            items = [
                await self._item(request_id, url, index, deadline_unix_ns)
                for index, url in enumerate(urls)
            ]
            request = EncodeRequest(
                request_id=request_id,
                items=tuple(items),
                dtype="float32",
                weights_fingerprint=self.link.fingerprint,
                deadline_unix_ns=deadline_unix_ns,
            )
            subject = subjects.shared(subjects.ENCODE)
            reply = await self.link.bus.call(subject, subjects.ENCODE, request, deadline_unix_ns)
        except K3Error as error:
            return error.http_status
        for asked, item in zip(items, reply.items, strict=True):
            offset = asked.destination.address - self.link.memory.address
            if zlib.crc32(self.link.memory.view(offset, item.size_bytes)) != item.checksum:
                raise SystemExit("embeddings arrived damaged")
        return 200

    async def _item(
        self, request_id: str, url: str, index: int, deadline_unix_ns: int
    ) -> EncodeItem:
        link = self.link
        request = ResolveRequest(request_id=request_id, url=url, deadline_unix_ns=deadline_unix_ns)
        subject = subjects.shared(subjects.RESOLVE)
        reply = await link.bus.call(subject, subjects.RESOLVE, request, deadline_unix_ns)
        image = reply.image
        slot = ImageSlot(
            image=image,
            feature_key=feature_key(image.content_key, link.config),
            offset=0,
            num_tokens=num_tokens(image.width, image.height, link.config),
            grid_thw=grid(image.width, image.height, link.config),
        )
        size = slot.num_tokens * link.token_bytes
        assert size <= PLACE_BYTES
        address = link.memory.address + (self.place * MAX_PICTURES + index) * PLACE_BYTES
        span = BufferSpan(session=link.session, address=address, size_bytes=size)
        return EncodeItem(slot=slot, destination=span)


@dataclass
class Soak:
    """One run.

    Attributes:
        num_warm_up: requests that are not judged, see above.
        samples: requests done and resident bytes by service, in order of time.
        num_done: requests answered.
        statuses: how they were.
    """

    stack: Stack
    host: PictureHost
    rng: random.Random
    num_warm_up: int
    samples: list[tuple[int, dict[str, int]]] = field(default_factory=list[Any])
    num_done: int = 0
    statuses: dict[int, int] = field(default_factory=dict[int, int])
    next_picture: int = 0

    def draw(self) -> int:
        """A new picture, or one of the latest."""
        if self.next_picture and self.rng.random() < REPEATED:
            return self.next_picture - 1 - self.rng.randrange(min(self.next_picture, REMEMBERED))
        number = self.next_picture
        self.next_picture += 1
        width, height = self.rng.randrange(20, 300), self.rng.randrange(20, 300)
        self.host.pictures[number] = jpeg(number, width, height)
        # What this process holds must not be what grows.
        self.host.pictures.pop(number - 2 * REMEMBERED, None)
        self.host.num_asked.pop(number - 2 * REMEMBERED, None)
        return number

    async def ask(self, number: int, stages: Stages | None) -> None:
        """One request with one to three pictures, to some stages or to the whole stack."""
        urls = [self.host.url(self.draw()) for _ in range(self.rng.randint(1, MAX_PICTURES))]
        status = await (self._ask_whole(number, urls) if stages is None else stages.ask(urls))
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.num_done += 1

    async def _ask_whole(self, number: int, urls: Sequence[str]) -> int:
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
        status, _ = await self.stack.ask(
            [message],
            max_completion_tokens=1,
            thinking={"type": "disabled"},
            cache_salt=str(number),
        )
        return status

    def sample(self) -> None:
        """Notes memory now."""
        found = {
            name: resident_bytes(pid)
            for name, (role, pid) in self.stack.processes().items()
            if role in SERVICES
        }
        self.samples.append((self.num_done, found))

    def line(self) -> str:
        """The newest sample for a person."""
        done, found = self.samples[-1]
        memory = "  ".join(
            f"{name.removesuffix('-0')} {size / MIB:.1f}" for name, size in sorted(found.items())
        )
        return f"{done:7} requests  {memory} MiB"

    @property
    def judged(self) -> list[tuple[int, dict[str, int]]]:
        """Samples after the warm-up, when every table is full."""
        return [sample for sample in self.samples if sample[0] >= self.num_warm_up]

    def slopes(self) -> dict[str, float]:
        """Bytes a request by service: a line through what is judged; none without two samples."""
        if len(self.judged) < 2:
            return {}
        done = np.array([number for number, _ in self.judged], dtype=np.float64)
        return {
            name: float(np.polyfit(done, [sizes[name] for _, sizes in self.judged], 1)[0])
            for name in self.judged[0][1]
        }


async def soak(
    folder: Path, num_requests: int, num_warm_up: int, num_at_once: int, is_whole: bool
) -> Soak:
    """Runs the requests, a fixed number at a time."""
    only = () if is_whole else [word for role in STAGES for word in ("--only", role)]
    async with contextlib.AsyncExitStack() as parts:
        host = await parts.enter_async_context(picture_host())
        stack = await parts.enter_async_context(running_stack(folder, *only, **SMALL))
        found = Soak(stack, host, random.Random(0), num_warm_up)
        found.sample()
        numbers = iter(range(num_requests))
        started_s = time.perf_counter()
        link = None if is_whole else await parts.enter_async_context(open_link(stack))

        async def client(place: int) -> None:
            stages = None if link is None else Stages(link, place)
            for number in numbers:
                await found.ask(number, stages)
                if found.num_done % max(1, num_requests // NUM_SAMPLES) == 0:
                    found.sample()
                    rate = found.num_done / (time.perf_counter() - started_s)
                    print(f"{found.line()}  {rate:.1f} requests/s", flush=True)

        async with asyncio.TaskGroup() as group:
            for place in range(num_at_once):
                group.create_task(client(place))
        return found


def report(found: Soak, bound: float) -> None:
    """Prints what was seen.

    Args:
        found: run to its end.
        bound: MB a thousand requests.

    Raises:
        SystemExit: a service grew past the bound, a request failed, or there were too few to judge.
    """
    print(f"\nanswers by status: {found.statuses}")
    warm = found.judged[0] if found.judged else found.samples[0]
    first, last = found.samples[1][1], found.samples[-1][1]
    slopes = found.slopes()
    heads = ("first MiB", f"at {warm[0]}", "last MiB", "MB/1000 requests")
    print(f"{'service':18}{heads[0]:>12}{heads[1]:>12}{heads[2]:>12}{heads[3]:>20}")
    for service in sorted(last):
        sizes = "".join(f"{each[service] / MIB:12.1f}" for each in (first, warm[1], last))
        slope = f"{slopes[service] / 1e3:.3f}" if slopes else "too few samples"
        print(f"{service:18}{sizes}{slope:>20}")
    if set(found.statuses) != {200}:
        raise SystemExit("not every request was answered with 200")
    if found.num_done - found.num_warm_up < MIN_JUDGED:
        raise SystemExit(
            f"not judged: {found.num_done} requests are fewer than a warm-up of "
            f"{found.num_warm_up} and {MIN_JUDGED} after it"
        )
    grown = [service for service, slope in sorted(slopes.items()) if slope / 1e3 > bound]
    if grown:
        raise SystemExit(f"grown past {bound} MB a thousand requests: {grown}")


def main() -> None:
    """Runs the soak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--warm-up", type=int, default=5000, help="requests that are not judged")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--bound", type=float, default=1.0, help="MB a thousand requests")
    parser.add_argument("--whole", action="store_true", help="ask the whole stack over HTTP")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="k3-soak-") as name:
        found = asyncio.run(
            soak(
                Path(name),
                arguments.requests,
                arguments.warm_up,
                arguments.at_once,
                arguments.whole,
            )
        )
    report(found, arguments.bound)


if __name__ == "__main__":
    main()
