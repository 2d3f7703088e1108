"""Encoded image to patches, one core: ours against plain Pillow and NumPy, and transformers.

All make patches of one size from the same bytes. The plain side must agree with ours first;
transformers resizes with another filter, so there only the shape is compared. Medians of processor
time over alternating rounds, so that a busy machine slows all sides alike. transformers takes part
where it and torchvision can be imported; its image processor of Kimi K2.5 has K3's geometry.

    OMP_NUM_THREADS=1 python benchmarks/image_preprocessing.py
"""

import argparse
import importlib
import io
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image

from k3text.images.config import ProcessorConfig
from k3text.images.geometry import plan
from k3text.images.patchify import normalise
from k3text.images.processor import cut

SIZES = ((320, 240), (1000, 800), (1920, 1080), (4000, 3000))
GOAL = 1.5
"""How many times faster than each other side ours should be."""

TRANSFORMERS_MODULE = "transformers.models.kimi_k25.image_processing_kimi_k25"

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
    config = ProcessorConfig(version="benchmark")
    return normalise(cut(data, config).pixels, config)


def plain(data: bytes) -> Floats:
    """What one writes with Pillow and NumPy."""
    config = ProcessorConfig(version="benchmark")
    image = Image.open(io.BytesIO(data)).convert("RGB")
    geometry = plan(image.width, image.height, config)
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
        module = importlib.import_module(TRANSFORMERS_MODULE)
        torch = importlib.import_module("torch")
        processor = module.Kimi_K25ImageProcessor(
            max_patches=65_536, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
    except (ImportError, RuntimeError) as error:
        print(f"transformers does not take part: {type(error).__name__}", file=sys.stderr)
        return None
    torch.set_num_threads(1)

    def side(data: bytes) -> Floats:
        image = Image.open(io.BytesIO(data))
        found: Floats = processor(images=[image], return_tensors="pt")["pixel_values"].numpy()
        return found

    return side


def main() -> int:
    """Runs, prints a line a size, and fails where sides disagree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    sides: dict[str, Side] = {"ours": ours, "plain": plain}
    fast = transformers_side()
    if fast is not None:
        sides["transformers"] = fast
    print(json.dumps({"machine": platform.processor() or platform.machine(), "goal": GOAL}))
    for width, height in SIZES:
        data = picture(width, height)
        expected = ours(data)
        if not np.allclose(plain(data), expected, rtol=0, atol=1e-6):
            print("sides disagree, nothing is measured", file=sys.stderr)
            return 1
        if fast is not None and fast(data).shape != expected.shape:
            print("transformers makes other shapes, nothing is measured", file=sys.stderr)
            return 1
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                start_s = time.process_time()
                side(data)
                times[name].append((time.process_time() - start_s) * 1000)
        medians = {
            f"{name}_ms": round(statistics.median(found), 2) for name, found in times.items()
        }
        speedups = {
            f"against_{name}": round(medians[f"{name}_ms"] / medians["ours_ms"], 2)
            for name in sides
            if name != "ours"
        }
        print(json.dumps({"size": f"{width}x{height}", "bytes": len(data), **medians, **speedups}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
