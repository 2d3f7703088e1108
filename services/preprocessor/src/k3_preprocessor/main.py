"""Builds a preprocessor out of its parts and runs it until it is told to stop."""

import asyncio
import contextlib
from pathlib import Path

from k3_preprocessor.delivery import Delivery
from k3_preprocessor.handler import Parts, PreprocessHandler
from k3_preprocessor.patch_tier import PatchTier
from k3_preprocessor.settings import PreprocessorSettings
from k3_preprocessor.sources import ByteSource
from k3_preprocessor.windows import Windows
from k3core.transfer.base import ObjectStore, TransferEngine
from k3core.transfer.mooncake import MooncakeStore, MooncakeTransferEngine
from k3text.images.config import ProcessorConfig, read_processor_config
from k3text.images.header import DEFAULT_MEDIA_TYPES, OPTIONAL_MEDIA_TYPES, ImageLimits
from k3text.images.sandbox import Sandbox, SandboxConfig
from k3text.images.sandbox_process import ProcessLimits
from k3text.images.self_check import check_pixels
from k3wire import subjects
from k3wire.blobs.base import BlobStore
from k3wire.blobs.redis_store import RedisBlobStore
from k3wire.bus.base import Bus
from k3wire.bus.nats_bus import NatsBus
from k3wire.messages.control import WorkerLoad
from k3wire.service.directory import Directory
from k3wire.service.patience import Peers
from k3wire.service.runtime import ServiceRuntime, resident_bytes
from k3wire.service.settings import SettingsError


async def run(settings: PreprocessorSettings) -> None:
    """Runs a preprocessor over NATS, Redis and Mooncake."""
    async with contextlib.AsyncExitStack() as stack:
        bus = await NatsBus.connect(settings.nats_url, "preprocessor")
        stack.push_async_callback(bus.close)
        blobs: RedisBlobStore | None = None
        if settings.redis_url:
            blobs = RedisBlobStore.open(settings.redis_url)
            stack.push_async_callback(blobs.close)
        engine = await MooncakeTransferEngine.open(
            settings.transfer_host, settings.transfer_protocol
        )
        stack.push_async_callback(engine.close)
        windows = Windows(settings.window_bytes, settings.num_windows)
        store: MooncakeStore | None = None
        if settings.mooncake_master and settings.cache_bytes:
            store = MooncakeStore(
                settings.mooncake_master, settings.transfer_host, settings.transfer_protocol
            )
            stack.push_async_callback(store.close)
            # Now, because it holds the interpreter for a moment; without a master a later use tries.
            await store.connect()
        await run_service(settings, bus, blobs, engine, windows, store)


async def run_service(
    settings: PreprocessorSettings,
    bus: Bus,
    blobs: BlobStore | None,
    engine: TransferEngine,
    windows: Windows,
    store: ObjectStore | None,
) -> None:
    """Runs a preprocessor on the given adapters until the process is told to stop."""
    config = await asyncio.to_thread(_read_config, settings)
    handlers: list[PreprocessHandler] = []

    def load() -> WorkerLoad:
        return handlers[0].load(resident_bytes()) if handlers else WorkerLoad()

    await engine.register(windows.region)
    if store is not None:
        await store.register(windows.region)
    tier = PatchTier(settings.cache_bytes, windows, store)
    async with (
        ServiceRuntime("preprocessor", settings, bus, load=load) as runtime,
        Sandbox(config, _image_limits(settings), _sandbox_config(settings)) as sandbox,
        asyncio.TaskGroup() as group,
    ):
        fetchers = Peers(Directory(), "fetcher")
        await runtime.keep(await fetchers.follow(bus))
        handler = PreprocessHandler(
            Parts(
                worker_id=runtime.worker_id,
                config=config,
                sandbox=sandbox,
                source=ByteSource(bus, blobs, fetchers),
                tier=tier,
                delivery=Delivery(engine, windows, config),
            )
        )
        handlers.append(handler)
        sharing = group.create_task(tier.share())
        try:
            await runtime.serve_shared(
                subjects.PREPROCESS, handler.preprocess, max_concurrency=settings.max_concurrency
            )
            await runtime.listen_cancel(handler.cancel)
            runtime.on_drain(tier.settle)
            runtime.ready()
            await runtime.run()
        finally:
            sharing.cancel()


def _read_config(settings: PreprocessorSettings) -> ProcessorConfig:
    check_pixels()
    if not settings.checkpoint:
        return ProcessorConfig()
    return read_processor_config(Path(settings.checkpoint))


def _image_limits(settings: PreprocessorSettings) -> ImageLimits:
    unknown = set(settings.media_types) - DEFAULT_MEDIA_TYPES - OPTIONAL_MEDIA_TYPES
    if unknown:
        raise SettingsError(
            f"K3_PREPROCESSOR_MEDIA_TYPES has formats that no decoder takes: {sorted(unknown)}"
        )
    return ImageLimits(
        max_bytes=settings.max_image_bytes,
        max_pixels=settings.max_pixels,
        media_types=frozenset(settings.media_types),
    )


def _sandbox_config(settings: PreprocessorSettings) -> SandboxConfig:
    return SandboxConfig(
        num_workers=settings.num_workers,
        max_waiting=settings.max_waiting,
        limits=ProcessLimits(
            memory_bytes=settings.decode_memory_bytes,
            cpu_s=settings.decode_cpu_s,
            wall_s=settings.decode_wall_s,
        ),
    )
