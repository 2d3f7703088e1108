"""An encoder as a process: real NATS, Mooncake and signals."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fake_preprocessor import FakePreprocessor, patches_of, slot_of
from support.fetchers import start
from support.golden_model import MICRO_A, golden
from support.mooncake import mooncake_store
from support.nats_server import nats_server
from support.redis_server import redis_server

from k3core.engine.host_memory import HostMemory
from k3core.transfer.base import Region
from k3core.transfer.mooncake import MooncakeTransferEngine
from k3core.transfer.system_libraries import preload
from k3core.weights.fingerprint import checkpoint_fingerprint
from k3core.weights.loading import LoadOptions
from k3core.weights.vision_loading import load_vision_model
from k3wire import subjects
from k3wire.bus.nats_bus import NatsBus
from k3wire.messages.base import BufferSpan
from k3wire.messages.control import Heartbeat
from k3wire.messages.encode import EncodeItem, EncodeReply, EncodeRequest
from k3wire.messages.media import ImageSlot
from k3wire.service.directory import Directory

START_S = 60.0
STOP_S = 10.0
WIDTH = 64
SLOTS = [slot_of("cat", 4, 6), slot_of("dog"), slot_of("fish", 2, 4)]

pytestmark = pytest.mark.slow


@asynccontextmanager
async def encoder(environment: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "k3_encoder", env={**os.environ, **environment}
    )
    try:
        yield child
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def ask(bus: NatsBus, session: str, memory: HostMemory, request_id: str = "r") -> EncodeReply:
    sizes = [slot.num_tokens * WIDTH * 4 for slot in SLOTS]
    items = [
        EncodeItem(
            slot=slot,
            destination=BufferSpan(
                session=session, address=memory.address + 4096 * index, size_bytes=size
            ),
        )
        for index, (slot, size) in enumerate(zip(SLOTS, sizes, strict=True))
    ]
    deadline_unix_ns = time.time_ns() + int(20e9)
    request = EncodeRequest(
        request_id=request_id,
        items=tuple(items),
        dtype="float32",
        weights_fingerprint=checkpoint_fingerprint(MICRO_A),
        deadline_unix_ns=deadline_unix_ns,
    )
    subject = subjects.shared(subjects.ENCODE)
    return await bus.call(subject, subjects.ENCODE, request, deadline_unix_ns)


def expected(slots: list[ImageSlot]) -> list[np.ndarray]:
    config = golden().config.vision
    assert config is not None
    model = load_vision_model(MICRO_A, config, LoadOptions(torch.device("cpu"), torch.float32))
    patches = torch.cat([torch.from_numpy(patches_of(slot)) for slot in slots])
    with torch.inference_mode():
        return [rows.numpy() for rows in model(patches, [slot.grid_thw for slot in slots])]


async def test_a_process_delivers_over_mooncake_and_its_successor_finds_the_rows_shared(
    tmp_path: Path,
) -> None:
    if not preload():
        pytest.skip("Mooncake's libraries are not here")
    wanted = expected(SLOTS)
    async with nats_server(tmp_path) as nats_url, mooncake_store() as mooncake:
        environment = {
            "K3_NATS_URL": nats_url,
            "K3_MOONCAKE_MASTER": mooncake.master,
            "K3_CHECKPOINT": str(MICRO_A),
            "K3_ENCODER_THREADS": "1",
        }
        bus = await NatsBus.connect(nats_url, "test")
        directory = Directory()
        await directory.follow(bus)
        ours = await MooncakeTransferEngine.open("127.0.0.1")
        theirs = await MooncakeTransferEngine.open("127.0.0.1")
        memory = HostMemory(1 << 16)
        await ours.register(Region(memory.address, memory.size_bytes))
        preprocessor = FakePreprocessor(bus, theirs)
        await preprocessor.start()
        found: list[str] = []
        try:
            for _ in range(2):
                async with encoder(environment):
                    deadline_s = asyncio.get_running_loop().time() + START_S
                    assert await directory.wait_for("encoder", deadline_s)
                    for _ in range(2):
                        memory.view(0, memory.size_bytes)[:] = b"\xa5" * memory.size_bytes
                        reply = await ask(bus, ours.session, memory)
                        found += {r.detail for r in reply.reports if r.stage == "encoder"}
                        for index, rows in enumerate(wanted):
                            view = memory.view(4096 * index, rows.nbytes)
                            arrived = np.frombuffer(view, np.float32).reshape(rows.shape)
                            np.testing.assert_allclose(arrived, rows, rtol=0, atol=1e-5)
            assert found == ["computed", "local", "shared", "local"]
            assert len(preprocessor.requests) == len(SLOTS)
        finally:
            await ours.close()
            await theirs.close()
            await bus.close()


def num_running(directory: Directory) -> int:
    return sum(beat.load.num_running for beat in directory.ready("encoder"))


async def test_two_processes_asked_for_one_new_picture_compute_it_once(tmp_path: Path) -> None:
    if not preload():
        pytest.skip("Mooncake's libraries are not here")
    async with (
        nats_server(tmp_path) as nats_url,
        redis_server() as redis_url,
        mooncake_store() as mooncake,
    ):
        environment = {
            "K3_NATS_URL": nats_url, "K3_REDIS_URL": redis_url,
            "K3_MOONCAKE_MASTER": mooncake.master, "K3_CHECKPOINT": str(MICRO_A),
            "K3_ENCODER_THREADS": "1",
        }  # fmt: skip
        bus = await NatsBus.connect(nats_url, "test")
        directory = Directory()
        await directory.follow(bus)
        ours = await MooncakeTransferEngine.open("127.0.0.1")
        theirs = await MooncakeTransferEngine.open("127.0.0.1")
        memory = HostMemory(1 << 16)
        await ours.register(Region(memory.address, memory.size_bytes))
        preprocessor = FakePreprocessor(bus, theirs)
        await preprocessor.start()
        preprocessor.gate.clear()
        try:
            async with encoder(environment), encoder(environment), asyncio.timeout(START_S):
                while len(directory.ready("encoder")) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                beats = {beat.worker_id: beat for beat in directory.ready("encoder")}
                asks = [start(ask(bus, ours.session, memory, f"r{i}")) for i in range(12)]
                while num_running(directory) < len(asks):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                # Each picture is being made by one of them, and the other waits for it.
                assert len(preprocessor.requests) == len(SLOTS)
                preprocessor.gate.set()
                replies = await asyncio.gather(*asks)
                reports = [r for reply in replies for r in reply.reports if r.stage == "encoder"]
                assert {r.worker_id for r in reports} == set(beats)
                assert len(preprocessor.requests) == len(SLOTS)
                assert sum(r.outcome == "miss" for r in reports) == len(SLOTS)
        finally:
            await ours.close()
            await theirs.close()
            await bus.close()


async def test_a_checkpoint_without_vision_says_so_and_is_never_ready(tmp_path: Path) -> None:
    if not preload():
        pytest.skip("Mooncake's libraries are not here")
    config = json.loads((MICRO_A / "config.json").read_text())
    del config["vision_config"]
    checkpoint = tmp_path / "text"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(config))
    async with nats_server(tmp_path) as nats_url:
        bus = await NatsBus.connect(nats_url, "test")
        reasons: asyncio.Queue[str] = asyncio.Queue()

        def hear(beat: Heartbeat) -> None:
            assert not beat.is_ready
            reasons.put_nowait(beat.reason)

        await bus.listen(subjects.heartbeats(), Heartbeat, hear)
        environment = {"K3_NATS_URL": nats_url, "K3_CHECKPOINT": str(checkpoint)}
        try:
            async with encoder(environment), asyncio.timeout(START_S):
                assert "vision" in await reasons.get()
        finally:
            await bus.close()


async def test_a_missing_checkpoint_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "k3_encoder",
        env={**os.environ, "K3_CHECKPOINT": str(tmp_path)},
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(START_S):
        _, errors = await child.communicate()
    assert child.returncode == 2
    assert b"K3_CHECKPOINT" in errors
