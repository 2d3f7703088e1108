"""Builds an encoder out of its parts and runs it until it is told to stop."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import torch
import uvloop

from k3_encoder.handler import EncoderHandler, EncoderParts
from k3_encoder.room import Room
from k3_encoder.settings import EncoderSettings
from k3_encoder.shelf import Shelf
from k3_encoder.tower import Tower
from k3core.transfer.base import ObjectStore, Region, TransferEngine
from k3core.transfer.mooncake import MooncakeStore, MooncakeTransferEngine
from k3core.weights.fingerprint import checkpoint_fingerprint
from k3text.images.config import read_processor_config
from k3wire import subjects
from k3wire.blobs.base import BlobStore
from k3wire.blobs.redis_store import RedisBlobStore
from k3wire.bus.base import Bus
from k3wire.bus.nats_bus import NatsBus
from k3wire.messages.control import WorkerLoad
from k3wire.service.directory import Directory
from k3wire.service.patience import Peers
from k3wire.service.runtime import ServiceRuntime, resident_bytes
from k3wire.service.settings import settings_or_exit


async def run(settings: EncoderSettings) -> None:
    """Runs a worker over NATS, Mooncake and Redis."""
    async with contextlib.AsyncExitStack() as stack:
        bus = await NatsBus.connect(settings.nats_url, "encoder")
        stack.push_async_callback(bus.close)
        transfer = await MooncakeTransferEngine.open(
            settings.transfer_host, settings.transfer_protocol
        )
        stack.push_async_callback(transfer.close)
        store: MooncakeStore | None = None
        turns: RedisBlobStore | None = None
        if settings.mooncake_master and settings.cache_bytes:
            store = MooncakeStore(
                settings.mooncake_master, settings.transfer_host, settings.transfer_protocol
            )
            stack.push_async_callback(store.close)
            # Now, because it holds the interpreter for a moment; without a master a later use tries.
            await store.connect()
            if settings.redis_url:
                turns = RedisBlobStore.open(settings.redis_url)
                stack.push_async_callback(turns.close)
        await run_worker(settings, bus, transfer, store, turns)


async def run_worker(
    settings: EncoderSettings,
    bus: Bus,
    transfer: TransferEngine,
    store: ObjectStore | None,
    turns: BlobStore | None,
) -> None:
    """Runs a worker on the given adapters until the process is told to stop."""
    handlers: list[EncoderHandler] = []

    def load() -> WorkerLoad:
        return handlers[0].load(resident_bytes()) if handlers else WorkerLoad()

    async with ServiceRuntime("encoder", settings, bus, load=load) as runtime:
        checkpoint = Path(settings.checkpoint)
        tower = await asyncio.to_thread(_load, settings, checkpoint)
        if tower is None:
            runtime.not_ready("the checkpoint has no vision tower")
            await runtime.run()
            return
        # No memory of no bytes can be mapped; one byte holds no embedding, and that is the tier off.
        cache_room, pixel_room = Room(max(1, settings.cache_bytes)), Room(settings.pixel_bytes)
        for room in (cache_room, pixel_room):
            await transfer.register(Region(room.memory.address, room.memory.size_bytes))
        if store is not None:
            await store.register(Region(cache_room.memory.address, cache_room.memory.size_bytes))
        fingerprint = await asyncio.to_thread(checkpoint_fingerprint, checkpoint)
        preprocessors = Peers(Directory(), "preprocessor")
        await runtime.keep(await preprocessors.follow(bus))
        parts = EncoderParts(
            bus=bus,
            transfer=transfer,
            tower=tower,
            shelf=Shelf(cache_room, store, f"l3/{fingerprint}/", turns),
            pixel_room=pixel_room,
            worker_id=runtime.worker_id,
            fingerprint=fingerprint,
            processor_version=read_processor_config(checkpoint).version,
            preprocessors=preprocessors,
        )
        handlers.append(EncoderHandler(parts))
        tower.start()
        try:
            await _serve(runtime, handlers[0])
        finally:
            await tower.close()
            pixel_room.close()


async def _serve(runtime: ServiceRuntime, handler: EncoderHandler) -> None:
    await runtime.serve_shared(subjects.ENCODE, handler.encode)
    await runtime.listen_cancel(handler.cancel)
    runtime.on_drain(handler.drain)
    runtime.ready()
    await runtime.run()


def _load(settings: EncoderSettings, checkpoint: Path) -> Tower | None:
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    return Tower.load(checkpoint, settings.device, settings.dtype, settings.batch_tokens)


def main() -> None:
    """Runs the process."""
    settings = settings_or_exit(EncoderSettings, os.environ)
    if not (Path(settings.checkpoint) / "config.json").is_file():
        sys.stderr.write("k3: K3_CHECKPOINT must name a folder that holds a config.json\n")
        raise SystemExit(2)
    uvloop.run(run(settings))
