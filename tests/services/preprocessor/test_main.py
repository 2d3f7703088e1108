"""A preprocessor as a process: real NATS, Redis, Mooncake and signals."""

import asyncio
import os
import signal
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.mooncake import mooncake_store
from support.nats_server import nats_server
from support.preprocess_stage import CONFIG, PICTURE, request_for
from support.redis_server import redis_server

from k3core.engine.host_memory import HostMemory
from k3core.transfer.base import Region
from k3core.transfer.mooncake import MooncakeTransferEngine
from k3core.transfer.system_libraries import preload
from k3text.images.keys import content_key
from k3text.images.processor import process
from k3wire import subjects
from k3wire.blobs.image_keys import image_bytes_key
from k3wire.blobs.redis_store import RedisBlobStore
from k3wire.bus.nats_bus import NatsBus
from k3wire.messages.base import BufferSpan
from k3wire.messages.preprocess import PreprocessReply
from k3wire.service.directory import Directory

START_S = 60.0
STOP_S = 10.0

MEDIA = """{"media_proc_cfg": {"in_patch_limit": 4096}}"""


async def start(environment: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "k3_preprocessor", env={**os.environ, **environment}
    )


async def ask(bus: NatsBus, data: bytes, span: BufferSpan) -> PreprocessReply:
    subject = subjects.shared(subjects.PREPROCESS)
    request = request_for(data, span)
    return await bus.call(subject, subjects.PREPROCESS, request, time.time_ns() + int(20e9))


@pytest.mark.slow
async def test_a_process_delivers_over_mooncake_and_its_successor_finds_the_patches_shared(
    tmp_path: Path,
) -> None:
    if not preload():
        pytest.skip("Mooncake's libraries are not here")
    (tmp_path / "preprocessor_config.json").write_text(MEDIA)
    bus_folder = tmp_path / "nats"
    bus_folder.mkdir()
    async with (
        nats_server(bus_folder) as nats_url,
        redis_server() as redis_url,
        mooncake_store() as mooncake,
    ):
        environment = {
            "K3_NATS_URL": nats_url,
            "K3_REDIS_URL": redis_url,
            "K3_MOONCAKE_MASTER": mooncake.master,
            "K3_CHECKPOINT": str(tmp_path),
            "K3_PREPROCESSOR_WORKERS": "1",
        }
        blobs = RedisBlobStore.open(redis_url)
        await blobs.put(image_bytes_key(content_key(PICTURE)), PICTURE, ttl_s=60)
        await blobs.close()
        bus = await NatsBus.connect(nats_url, "test")
        directory = Directory()
        await directory.follow(bus)
        engine = await MooncakeTransferEngine.open("127.0.0.1")
        memory = HostMemory(1 << 24)
        await engine.register(Region(memory.address, memory.size_bytes))
        span = BufferSpan(
            session=engine.session, address=memory.address, size_bytes=memory.size_bytes
        )
        try:
            found: list[tuple[str, str]] = []
            for _ in range(2):
                child = await start(environment)
                try:
                    deadline_s = asyncio.get_running_loop().time() + START_S
                    assert await directory.wait_for("preprocessor", deadline_s)
                    for _ in range(2):
                        memory.view(0, 1 << 20)[:] = b"\xa5" * (1 << 20)
                        reply = await ask(bus, PICTURE, span)
                        found.append((reply.reports[0].outcome, reply.reports[0].detail))
                        view = memory.view(0, reply.size_bytes)
                        assert zlib.crc32(view) == reply.checksum
                        patches = np.frombuffer(view, np.float32).reshape(-1, 3, 14, 14)
                        np.testing.assert_array_equal(patches, process(PICTURE, CONFIG).patches)
                    child.send_signal(signal.SIGTERM)
                    async with asyncio.timeout(STOP_S):
                        assert await child.wait() == 0
                finally:
                    if child.returncode is None:
                        child.kill()
                        await child.wait()
            assert found == [("miss", ""), ("hit", "local"), ("hit", "shared"), ("hit", "local")]
        finally:
            await engine.close()
            await bus.close()
