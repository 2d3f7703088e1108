"""Whether memory stays flat while pictures that nobody has seen pass through all the stages.

Starts the whole stack with the micro checkpoint and small tiers, and asks about random small
pictures, each with a prefix of its own, so that every tier is full soon and puts out as much as it
takes in. Prints each service's resident memory as it goes and a line fitted to its later half, and
ends with status 1 if one grows past the bound.

    python benchmarks/media_soak.py [--requests 20000] [--at-once 16] [--bound 1.0]

The bound is bytes a request times a thousand, in MB: what a leak of one kilobyte a request costs.
"""

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from media_stack import PictureHost, Stack, jpeg, picture_host, running_stack

from k3ctl.stack.plan import SERVICES
from k3ctl.stack.state import resident_bytes

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

NUM_SAMPLES = 40
REPEATED = 0.3
"""Share of requests about a picture that was seen before, so that hits are exercised too."""

REMEMBERED = 200
"""Pictures that may come again, the latest ones."""


@dataclass
class Soak:
    """One run.

    Attributes:
        samples: requests done and resident bytes by service, in order of time.
        num_done: requests answered.
        statuses: how they were.
    """

    stack: Stack
    host: PictureHost
    rng: random.Random
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

    async def ask(self, salt: int) -> None:
        """One request with one to three pictures."""
        urls = [self.host.url(self.draw()) for _ in range(self.rng.randint(1, 3))]
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}
        status, _ = await self.stack.ask(
            [message],
            max_completion_tokens=1,
            thinking={"type": "disabled"},
            cache_salt=str(salt),
        )
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.num_done += 1

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

    def slopes(self) -> dict[str, float]:
        """Bytes a request by service: a line through the later half, when every tier is full."""
        later = self.samples[len(self.samples) // 2 :]
        done = np.array([number for number, _ in later], dtype=np.float64)
        return {
            name: float(np.polyfit(done, [sizes[name] for _, sizes in later], 1)[0])
            for name in later[0][1]
        }


async def soak(folder: Path, num_requests: int, num_at_once: int) -> Soak:
    """Runs the requests, a fixed number at a time."""
    async with picture_host() as host, running_stack(folder, **SMALL) as stack:
        found = Soak(stack, host, random.Random(0))
        found.sample()
        salts = iter(range(num_requests))
        started_s = time.perf_counter()

        async def client() -> None:
            for salt in salts:
                await found.ask(salt)
                if found.num_done % max(1, num_requests // NUM_SAMPLES) == 0:
                    found.sample()
                    rate = found.num_done / (time.perf_counter() - started_s)
                    print(f"{found.line()}  {rate:.1f} requests/s", flush=True)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(client())
        return found


def main() -> None:
    """Runs the soak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--bound", type=float, default=1.0, help="MB a thousand requests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="k3-soak-") as name:
        found = asyncio.run(soak(Path(name), arguments.requests, arguments.at_once))
    print(f"\nanswers by status: {found.statuses}")
    print(f"{'service':18}{'first MiB':>12}{'last MiB':>12}{'MB/1000 requests':>20}")
    grown: list[str] = []
    first, last = found.samples[1][1], found.samples[-1][1]
    for service, slope in sorted(found.slopes().items()):
        per_thousand = slope * 1000 / 1e6
        print(
            f"{service:18}{first[service] / MIB:12.1f}{last[service] / MIB:12.1f}"
            f"{per_thousand:20.3f}"
        )
        if per_thousand > arguments.bound:
            grown.append(service)
    if grown or set(found.statuses) != {200}:
        raise SystemExit(f"grown past {arguments.bound} MB a thousand requests: {grown}")


if __name__ == "__main__":
    main()
