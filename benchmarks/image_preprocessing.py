"""Encoded image to patches, one core: ours against plain Pillow and NumPy, and transformers.

All make patches of one size from the same bytes, and all must agree before anything is timed: with
plain Pillow everywhere, with transformers where the picture keeps its size (it resizes with
another filter, so beyond that the mean difference is bounded). The least processor time of many
alternating rounds: other work on the machine only ever adds, and each side gets its quiet moments.

Two lines a size. `steps` is the work alone, as each side does it in its own process. `service` is
the whole call as a preprocessor makes it: the bytes go to a locked-in decode process, the patches
come back and are written as floats, with their checksum, into the encoder's memory. Both processes
count. The other sides then do what a user's server would do in one process, without any of that.

transformers takes part where it and torchvision can be imported; its image processor of Kimi K2.5
has K3's geometry.

    OMP_NUM_THREADS=1 python benchmarks/image_preprocessing.py
"""

import argparse
import asyncio
import importlib
import io
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from k3_preprocessor.delivery import Delivery
from k3_preprocessor.windows import Windows
from k3core.transfer.base import Region
from k3core.transfer.memory import MemoryFabric
from k3text.images.config import ProcessorConfig
from k3text.images.geometry import plan
from k3text.images.header import ImageLimits, read_header
from k3text.images.native.steps import native_steps
from k3text.images.patchify import normalise
from k3text.images.processor import cut
from k3text.images.sandbox import Sandbox, SandboxConfig
from k3wire.messages.base import BufferSpan

SIZES = ((320, 240), (1000, 800), (1920, 1080), (4000, 3000), (6000, 4000))
GOAL = 1.5
"""How many times faster than each other side ours should be."""

CONFIG = ProcessorConfig(version="benchmark")
TRANSFORMERS_MODULE = "transformers.models.kimi_k25.image_processing_kimi_k25"
EXACT_TO = 1e-6
"""Largest difference where no other filter is in play; floats lie between -1 and 1."""

OTHER_FILTER_TO = 0.02
"""Largest mean difference after a resize with another filter."""

TURN_PIXELS = 600_000
"""Pixels that a side works on before the next has its turn, at least."""

ROUND_PIXELS = 24_000_000
"""Pixels of a round, about: short turns, and many where pictures are small, find quiet moments."""

ALLOCATOR_BYTES = 31 * 1024 * 1024
"""Freed once before anything is timed. glibc then keeps blocks up to this size instead of handing
each back and faulting it in anew, as in a server that has seen a large picture; without it, plain
NumPy looks three times as slow on small ones."""

WINDOW_BYTES = 16 * 1024 * 1024
LARGEST_BYTES = 160_000_000

Floats = npt.NDArray[np.float32]
Side = Callable[[bytes], Floats]


def picture(width: int, height: int) -> bytes:
    """A JPEG with detail at every scale."""
    rng = np.random.default_rng(width)
    total = np.zeros((height, width, 3), dtype=np.float32)
    for step in (4, 16, 64):
        coarse = rng.integers(0, 256, (height // step + 1, width // step + 1, 3)).astype(np.uint8)
        grown = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        total += np.asarray(grown) / np.float32(3)
    target = io.BytesIO()
    Image.fromarray(total.astype(np.uint8)).save(target, "JPEG", quality=88)
    return target.getvalue()


def ours(data: bytes) -> Floats:
    """What a decode worker does, and the floats on the way out; without the process boundary."""
    return normalise(cut(data, CONFIG).pixels, CONFIG)


def plain(data: bytes) -> Floats:
    """What one writes with Pillow and NumPy."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    geometry = plan(image.width, image.height, CONFIG)
    resized = image.resize((geometry.width, geometry.height), Image.Resampling.BICUBIC)
    padded = np.zeros((geometry.padded_height, geometry.padded_width, 3), dtype=np.float32)
    padded[: geometry.height, : geometry.width] = np.asarray(resized)
    padded = (padded / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    _, rows, columns = geometry.grid_thw
    patches = padded.reshape(rows, 14, columns, 14, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(patches).reshape(-1, 3, 14, 14)


def transformers_side() -> Side | None:
    """transformers' fast processor, or None where it cannot be imported."""
    try:
        torch = importlib.import_module("torch")
        operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            # A torchvision built for CUDA does not load its own beside a CPU torch, and asks for
            # their names while it is imported. Images use none of them.
            if not hasattr(torch.ops.torchvision, name):
                operators.define(f"{name}(Tensor dets, Tensor scores, float iou) -> Tensor")
        module = importlib.import_module(TRANSFORMERS_MODULE)
        processor = module.Kimi_K25ImageProcessor(
            max_patches=65_536, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
    except (ImportError, RuntimeError) as error:
        print(f"transformers does not take part: {type(error).__name__}", file=sys.stderr)
        return None
    torch.set_num_threads(1)

    def side(data: bytes) -> Floats:
        # The operators live as long as this.
        assert operators is not None
        image = Image.open(io.BytesIO(data))
        found: Floats = processor(images=[image], return_tensors="pt")["pixel_values"].numpy()
        return found

    return side


class Service:
    """A sandbox with one process, and a way into a registered buffer as an encoder has it."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._windows = Windows(WINDOW_BYTES, 1)
        self._target = np.zeros(LARGEST_BYTES, dtype=np.uint8)
        self._address = int(self._target.ctypes.data)
        self._found: Floats = self._target[:0].view(np.float32)
        self.sandbox = Sandbox(CONFIG, ImageLimits(), SandboxConfig(num_workers=1))
        runner.run(self._open())

    async def _open(self) -> None:
        fabric = MemoryFabric()
        own, encoder = fabric.engine(), fabric.engine()
        await own.register(self._windows.region)
        await encoder.register(Region(self._address, self._target.size))
        self._session = encoder.session
        self._delivery = Delivery(own, self._windows, CONFIG)
        await self.sandbox.__aenter__()

    async def _preprocess(self, data: bytes) -> None:
        patched = (await self.sandbox.cut(data)).patched
        size = patched.pixels.size * 4
        span = BufferSpan(session=self._session, address=self._address, size_bytes=size)
        await self._delivery.deliver(patched.pixels, span)
        self._found = self._target[:size].view(np.float32).reshape(patched.pixels.shape)

    def __call__(self, data: bytes) -> Floats:
        # The runner would print a result of its own accord, for a message that nobody sees.
        self._runner.run(self._preprocess(data))
        return self._found

    def worker_ns(self) -> int:
        """Processor time that the decode process has taken, by the scheduler's own count."""
        (pid,) = self.sandbox.pids
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])

    def close(self) -> None:
        self._runner.run(self.sandbox.__aexit__(None, None, None))


def disagreement(sides: dict[str, Side], data: bytes, is_resized: bool) -> str:
    """Says which side makes something else than ours, or nothing."""
    expected = ours(data)
    for name, side in sides.items():
        found = side(data)
        if found.shape != expected.shape:
            return f"{name} makes {found.shape}, ours {expected.shape}"
        difference = np.abs(found - expected)
        if name == "transformers" and is_resized:
            if float(difference.mean()) > OTHER_FILTER_TO:
                return f"{name} differs by {difference.mean():.4f} on average"
        elif float(difference.max()) > EXACT_TO:
            return f"{name} differs by up to {difference.max():.6f}"
    return ""


def measure(sides: dict[str, Side], service: Service, data: bytes, rounds: int) -> dict[str, float]:
    """Least milliseconds of processor time a picture and side, rounds alternating.

    Small pictures come several times in a turn: no side should pay for the caches that the one
    before it has emptied, which a server that does one thing does not.
    """
    header = read_header(data, None)
    num_pixels = header.width * header.height
    repeats = max(1, TURN_PIXELS // num_pixels)
    turns = rounds * max(1, ROUND_PIXELS // (num_pixels * repeats))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, side in sides.items():
            start_ns = time.process_time_ns() + service.worker_ns()
            for _ in range(repeats):
                side(data)
            end_ns = time.process_time_ns() + service.worker_ns()
            times[name].append((end_ns - start_ns) / 1e6 / repeats)
    return {name: round(min(found), 3) for name, found in times.items()}


def report(table: str, size: str, own: str, times: dict[str, float]) -> None:
    """Prints one line of a table: a side of ours against those of others."""
    others = [name for name in times if name not in ("ours", "service")]
    line = {"table": table, "size": size, f"{own}_ms": times[own]}
    line |= {f"{name}_ms": times[name] for name in others}
    line |= {f"against_{name}": round(times[name] / times[own], 2) for name in others}
    print(json.dumps(line), flush=True)


def main() -> int:
    """Runs, prints two lines a size, and fails where sides disagree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-pixels", type=int, default=10**9)
    arguments = parser.parse_args()
    # Made and freed at once.
    np.ones(ALLOCATOR_BYTES, dtype=np.uint8)
    with asyncio.Runner() as runner:
        service = Service(runner)
        sides: dict[str, Side] = {"ours": ours, "service": service, "plain": plain}
        fast = transformers_side()
        if fast is not None:
            sides["transformers"] = fast
        machine = platform.processor() or platform.machine()
        is_compiled = native_steps() is not None
        print(json.dumps({"machine": machine, "goal": GOAL, "compiled": is_compiled}))
        try:
            for width, height in SIZES:
                if width * height > arguments.max_pixels:
                    continue
                data = picture(width, height)
                geometry = plan(width, height, CONFIG)
                is_resized = (geometry.width, geometry.height) != (width, height)
                fault = disagreement(sides, data, is_resized)
                if fault:
                    print(f"sides disagree, nothing is measured: {fault}", file=sys.stderr)
                    return 1
                times = measure(sides, service, data, arguments.rounds)
                size = f"{width}x{height}"
                report("steps", size, "ours", times)
                report("service", size, "service", times)
        finally:
            service.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
