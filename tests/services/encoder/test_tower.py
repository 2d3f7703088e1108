import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fake_preprocessor import patches_of, slot_of
from support.golden_model import MICRO_A, golden

from k3_encoder import tower as tower_module
from k3_encoder.tower import QueuedJob, Tower, TowerJob
from k3core.model.vision import Grid, VisionModel
from k3core.weights.loading import LoadOptions
from k3core.weights.vision_loading import load_vision_model
from k3wire.errors import InternalError

WAIT_S = 10.0
WIDTH = 64


class Watched(torch.nn.Module):
    """The vision model, held at a gate and counted."""

    def __init__(self, model: VisionModel) -> None:
        super().__init__()
        self.model = model
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[Grid]] = []

    def forward(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        self.batches.append(list(grids))
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        return self.model(pixels, grids)


def job(name: str, rows: int = 2, columns: int = 2, *, num_tokens: int = 0) -> TowerJob:
    slot = slot_of(name, rows, columns)
    tokens = num_tokens or slot.num_tokens
    target = np.zeros(tokens * WIDTH, dtype=np.float32).view(np.uint8).data
    pixels = patches_of(slot).reshape(-1).view(np.uint8).data
    return TowerJob(pixels, slot.grid_thw, tokens, "float32", target)


def rows_of(found: TowerJob) -> np.ndarray:
    return np.frombuffer(found.target, dtype=np.float32).reshape(found.num_tokens, WIDTH)


def with_tower(
    test: Callable[[Tower, Watched], Awaitable[None]], *, batch_tokens: int = 64
) -> None:
    config = golden().config.vision
    assert config is not None
    options = LoadOptions(torch.device("cpu"), torch.float32)
    watched = Watched(load_vision_model(MICRO_A, config, options))

    async def run() -> None:
        # The tower asks for a vision model and calls it; this one only watches.
        tower = Tower(watched, config, batch_tokens)  # pyright: ignore[reportArgumentType]
        tower.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await test(tower, watched)
        finally:
            watched.gate.set()
            await tower.close()
            await tower.close()

    asyncio.run(run())


async def start_behind_gate(
    group: asyncio.TaskGroup, tower: Tower, watched: Watched, jobs: Sequence[TowerJob]
) -> list["asyncio.Task[float]"]:
    """Queues jobs while the first one is held in the tower."""
    first = group.create_task(tower.encode(jobs[0]))
    await asyncio.to_thread(watched.entered.wait, WAIT_S)
    rest = [group.create_task(tower.encode(each)) for each in jobs[1:]]
    await asyncio.sleep(0)
    return [first, *rest]


def test_images_that_wait_are_computed_together_within_the_budget() -> None:
    async def test(tower: Tower, watched: Watched) -> None:
        shapes = [(2, 2), (2, 4), (4, 4), (4, 4), (8, 8), (2, 2)]
        jobs = [job(f"picture {i}", *shape) for i, shape in enumerate(shapes)]
        async with asyncio.TaskGroup() as group:
            tasks = await start_behind_gate(group, tower, watched, jobs)
            watched.gate.set()
        tokens = [[h * w // 4 for _, h, w in batch] for batch in watched.batches]
        # The budget is eight tokens; an image above it goes alone.
        assert tokens == [[1], [2, 4], [4], [16], [1]]
        assert all(task.result() > 0 for task in tasks)

    with_tower(test, batch_tokens=8)


def test_rows_do_not_depend_on_the_batch() -> None:
    async def test(tower: Tower, watched: Watched) -> None:
        alone = job("a", 4, 6)
        watched.gate.set()
        await tower.encode(alone)
        watched.gate.clear()
        watched.entered.clear()
        jobs = [job("held"), job("b", 4, 4), job("a", 4, 6), job("c", 2, 8)]
        async with asyncio.TaskGroup() as group:
            await start_behind_gate(group, tower, watched, jobs)
            watched.gate.set()
        assert len(watched.batches[-1]) == 3
        assert np.array_equal(rows_of(jobs[2]), rows_of(alone))

    with_tower(test)


def test_a_bad_image_fails_alone() -> None:
    async def test(tower: Tower, watched: Watched) -> None:
        bad = job("bad", 2, 4, num_tokens=3)
        jobs = [job("held"), job("b", 4, 4), bad, job("c")]
        failed: list[BaseException] = []

        async def encode_bad() -> None:
            with pytest.raises(InternalError) as caught:
                await tower.encode(bad)
            failed.append(caught.value)

        async with asyncio.TaskGroup() as group:
            await start_behind_gate(group, tower, watched, jobs[:2])
            group.create_task(encode_bad())
            group.create_task(tower.encode(jobs[3]))
            await asyncio.sleep(0)
            watched.gate.set()
        assert len(failed) == 1
        assert all(rows_of(each).any() for each in (jobs[0], jobs[1], jobs[3]))
        after = job("after")
        await tower.encode(after)
        assert rows_of(after).any()

    with_tower(test)


def test_a_cancelled_caller_is_let_go_only_when_its_memory_is_untouched() -> None:
    async def test(tower: Tower, watched: Watched) -> None:
        leaving = job("leaving")
        task = asyncio.get_running_loop().create_task(tower.encode(leaving))
        await asyncio.to_thread(watched.entered.wait, WAIT_S)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        watched.gate.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert rows_of(leaving).any()

    with_tower(test)


def test_a_waiting_job_that_is_cancelled_is_never_computed() -> None:
    async def test(tower: Tower, watched: Watched) -> None:
        jobs = [job("held"), job("left", 4, 4), job("wanted", 2, 4)]
        async with asyncio.TaskGroup() as group:
            held, left, wanted = await start_behind_gate(group, tower, watched, jobs)
            left.cancel()
            await asyncio.sleep(0)
            watched.gate.set()
        assert left.cancelled()
        assert held.result() > 0
        assert wanted.result() > 0
        assert [[grid for _, *grid in batch] for batch in watched.batches] == [[[2, 2]], [[2, 4]]]
        assert not rows_of(jobs[1]).any()
        assert rows_of(jobs[2]).any()

    with_tower(test)


class DroppedBetweenLooks(QueuedJob):
    """A job whose caller leaves right after the thread has looked at it for the first time."""

    num_looks = 0

    @property
    def is_dropped(self) -> bool:  # type: ignore[override]  # an attribute that changes by itself
        self.num_looks += 1
        return self.num_looks > 1

    @is_dropped.setter
    def is_dropped(self, value: bool) -> None:
        pass


def test_a_job_that_is_dropped_while_the_thread_sorts_still_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tower_module, "QueuedJob", DroppedBetweenLooks)

    async def test(tower: Tower, watched: Watched) -> None:
        watched.gate.set()
        assert await tower.encode(job("a")) > 0

    with_tower(test)


def test_a_checkpoint_without_vision_has_no_tower(tmp_path: Path) -> None:
    config = json.loads((MICRO_A / "config.json").read_text())
    del config["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Tower.load(tmp_path, "cpu", "float32", 8) is None
