"""The vision tower on its own thread: images of mixed sizes, batched by a token budget.

Enters: patches in host memory. Leaves: embeddings in host memory. The loop never computes: it
queues jobs and is told when they are done. An image's rows do not depend on its batch.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from k3core.config import VisionConfig
from k3core.model.vision import VisionModel
from k3core.weights.config_file import load_config
from k3core.weights.loading import LoadOptions
from k3core.weights.vision_loading import load_vision_model
from k3wire.errors import InternalError

logger = logging.getLogger(__name__)

PATCH_CHANNELS = 3

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TowerJob:
    """One image.

    Attributes:
        pixels: float32 patches [N, 3, patch, patch].
        grid_thw: of the patches.
        num_tokens: embeddings it gives.
        dtype: of the embeddings, `float32` or `bfloat16`.
        target: where they go, [num_tokens, hidden] in that dtype.
    """

    pixels: memoryview
    grid_thw: tuple[int, int, int]
    num_tokens: int
    dtype: str
    target: memoryview


@dataclass(slots=True)
class QueuedJob:
    """A job on its way.

    Attributes:
        job: what is to be done.
        done: set once, on the loop, whatever comes of it.
        is_dropped: nobody waits for it; set on the loop at any time, read by the thread.
    """

    job: TowerJob
    done: "asyncio.Future[float]"
    is_dropped: bool = False


def part(queued: Sequence[QueuedJob]) -> tuple[list[QueuedJob], list[QueuedJob]]:
    """Splits jobs into wanted and dropped; each into exactly one, whatever the loop does now.

    The flag is read once a job: one dropped between two looks would be in neither list, and
    whoever winds down with it would wait for ever.
    """
    parts: tuple[list[QueuedJob], list[QueuedJob]] = ([], [])
    for each in queued:
        parts[each.is_dropped].append(each)
    return parts


class Tower:
    """Runs the vision model.

    Attributes:
        hidden_size: width of an embedding.
        patch_bytes: bytes of one patch.
    """

    def __init__(self, model: VisionModel, config: VisionConfig, batch_tokens: int) -> None:
        """Takes a loaded model; `start` begins."""
        self._model = model
        self._batch_tokens = batch_tokens
        self._patch = config.patch_size
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        self._jobs: queue.SimpleQueue[QueuedJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tower")
        self._loop: asyncio.AbstractEventLoop | None = None
        self.hidden_size = config.text_hidden_size
        self.patch_bytes = PATCH_CHANNELS * config.patch_size**2 * 4

    @classmethod
    def load(cls, checkpoint: Path, device: str, dtype: str, batch_tokens: int) -> "Tower | None":
        """Loads the tower of a checkpoint; None if the checkpoint has no vision.

        Raises:
            CheckpointError: files are missing or do not fit.
        """
        config = load_config(checkpoint)
        if config.vision is None:
            return None
        name = ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype
        options = LoadOptions(torch.device(device), DTYPES[name])
        return cls(
            load_vision_model(checkpoint, config.vision, options), config.vision, batch_tokens
        )

    def start(self) -> None:
        """Starts the thread; call on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def encode(self, job: TowerJob) -> float:
        """Computes one image's embeddings into its target.

        Cancelling takes back a job that waits, and does not stop one that runs: this coroutine
        ends when its memory is read and written no more.

        Returns:
            seconds of computing, its share of the batch.
        """
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        queued = QueuedJob(job, done)
        self._jobs.put(queued)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            queued.is_dropped = True
            await asyncio.wait([done])
            raise

    async def close(self) -> None:
        """Ends the thread after what is queued; safe twice."""
        if self._thread.is_alive():
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        pending: QueuedJob | None = None
        while True:
            first = pending or self._jobs.get()
            pending = None
            if first is None:
                return
            batch, tokens, is_last = [first], first.job.num_tokens, False
            while not self._jobs.empty():
                found = self._jobs.get()
                if found is None:
                    is_last = True
                    break
                if tokens + found.job.num_tokens > self._batch_tokens:
                    pending = found
                    break
                batch.append(found)
                tokens += found.job.num_tokens
            self._start(batch)
            if is_last:
                return

    def _start(self, queued: Sequence[QueuedJob]) -> None:
        """Runs what is still wanted; the rest ends at once."""
        wanted, dropped = part(queued)
        if dropped:
            self._tell(dropped, [0.0] * len(dropped))
        if wanted:
            self._run(wanted)

    def _run(self, batch: Sequence[QueuedJob]) -> None:
        start_s = time.perf_counter()
        num_tokens = sum(queued.job.num_tokens for queued in batch)
        try:
            rows = self._forward([queued.job for queued in batch])
            for queued, embeddings in zip(batch, rows, strict=True):
                self._store(queued.job, embeddings)
        except Exception as error:  # noqa: BLE001 - the thread must outlive a bad image
            self._fail(batch, error)
            return
        spent_s = time.perf_counter() - start_s
        shares = [spent_s * queued.job.num_tokens / num_tokens for queued in batch]
        self._tell(batch, shares)

    def _fail(self, batch: Sequence[QueuedJob], error: Exception) -> None:
        """Fails the image at fault; its neighbours in the batch are run again without it."""
        if len(batch) > 1:
            for queued in batch:
                self._run([queued])
            return
        logger.warning("image not encoded", exc_info=error)
        failure = InternalError("The image could not be encoded")
        failure.__cause__ = error
        self._tell(batch, [failure])

    @torch.inference_mode()
    def _forward(self, jobs: Sequence[TowerJob]) -> list[torch.Tensor]:
        shape = (-1, PATCH_CHANNELS, self._patch, self._patch)
        parts = [torch.frombuffer(job.pixels, dtype=torch.float32).view(shape) for job in jobs]
        pixels = torch.cat(parts).to(self._device, self._dtype)
        return self._model(pixels, [job.grid_thw for job in jobs])

    def _store(self, job: TowerJob, embeddings: torch.Tensor) -> None:
        target = torch.frombuffer(job.target, dtype=DTYPES[job.dtype])
        # A copy from a device waits for it here, which is where the result is wanted.
        target.view(job.num_tokens, self.hidden_size).copy_(embeddings)

    def _tell(self, batch: Sequence[QueuedJob], results: Sequence[float | InternalError]) -> None:
        loop = self._loop
        assert loop is not None

        def deliver() -> None:
            for queued, result in zip(batch, results, strict=True):
                if queued.done.done():
                    continue
                match result:
                    case InternalError():
                        queued.done.set_exception(result)
                    case seconds:
                        queued.done.set_result(seconds)

        loop.call_soon_threadsafe(deliver)
