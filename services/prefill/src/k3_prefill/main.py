"""Builds a prefill worker out of its parts and runs it until it is told to stop."""

import asyncio
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

from k3_prefill.embeddings import EmbeddingDesk, EmbeddingFormat
from k3_prefill.hand_off import DecodeLink
from k3_prefill.handler import PrefillHandler
from k3_prefill.journey import Worker
from k3_prefill.last_user import last_user_text
from k3_prefill.settings import PrefillSettings
from k3core.engine.frames import FrameAssembler, FrameSender
from k3core.engine.host_memory import HostMemory
from k3core.engine.parts import EngineParts, EngineSizes, scripted_engine
from k3core.engine.script import Script, load_script, split_markers
from k3core.engine.thread import EngineThread
from k3core.engine.words import EngineEvent
from k3core.transfer.base import Region, TransferEngine
from k3core.transfer.mooncake import MooncakeTransferEngine
from k3core.transfer.page_exchange import Arena, layout_info
from k3text.tokenizer import Tokenizer
from k3wire import subjects
from k3wire.bus.base import Bus
from k3wire.bus.nats_bus import NatsBus
from k3wire.errors import InternalError
from k3wire.messages.control import WorkerLoad
from k3wire.service.collector import settle_memory
from k3wire.service.directory import Directory
from k3wire.service.patience import Peers
from k3wire.service.prompts import read_prompt
from k3wire.service.runtime import ServiceRuntime, resident_bytes


async def run(settings: PrefillSettings) -> None:
    """Runs a worker over NATS and Mooncake."""
    bus = await NatsBus.connect(settings.nats_url, "prefill")
    try:
        parts = await asyncio.to_thread(build_engine, settings)
        settle_memory()
        transfer = await MooncakeTransferEngine.open(
            settings.transfer_host, settings.transfer_protocol
        )
        try:
            await run_worker(settings, bus, transfer, parts)
        finally:
            await transfer.close()
    finally:
        await bus.close()


def build_engine(settings: PrefillSettings) -> EngineParts:
    """Builds the engine that the settings ask for; takes as long as loading a checkpoint."""
    sizes = EngineSizes(
        arena_bytes=settings.arena_bytes,
        unit_tokens=settings.unit_tokens,
        chunk_tokens=settings.chunk_tokens,
        max_rows=settings.max_requests,
        host_bytes=settings.host_bytes,
        codec=settings.checkpoint_codec,
    )
    if settings.engine == "scripted":
        tokenizer = Tokenizer.from_directory(Path(settings.checkpoint))
        script = load_script(
            Path(settings.script), lambda text: tokenizer.encode_segments(split_markers(text))
        )
        return scripted_engine(script, "prefill", sizes, _chooser(script, tokenizer))
    return _model_engine(settings, sizes)


async def run_worker(
    settings: PrefillSettings, bus: Bus, transfer: TransferEngine, parts: EngineParts
) -> None:
    """Runs a worker on the given adapters until the process is told to stop."""
    handlers: list[PrefillHandler] = []
    failures: list[BaseException] = []

    def load() -> WorkerLoad:
        return handlers[0].load(resident_bytes()) if handlers else WorkerLoad()

    async with ServiceRuntime("prefill", settings, bus, load=load) as runtime:
        await transfer.register(Region(parts.base_address, parts.size_bytes))
        encoders = Peers(Directory(), "encoder")
        await runtime.keep(await encoders.follow(bus))
        desk = await _open_desk(settings, bus, transfer, parts, encoders)
        sender = FrameSender(FrameAssembler(runtime.worker_id, runtime.epoch), bus.publish)

        def on_failure(error: BaseException) -> None:
            # The engine is down: every stream ends, then the process, to be started afresh.
            failures.append(error)
            runtime.not_ready(f"engine failed: {type(error).__name__}")
            handlers[0].fail_all()
            runtime.stop()

        engine: EngineThread[EngineEvent] = EngineThread(
            parts.core, lambda events: handlers[0].hear(events), on_failure
        )
        arena = Arena(transfer.session, parts.base_address, parts.layout)
        worker = Worker(
            worker_id=runtime.worker_id,
            engine=engine,
            core=parts.core,
            link=DecodeLink(bus, transfer, arena, parts.view_page),
            desk=desk,
            layout=layout_info(parts.layout, parts.model_fingerprint),
            read_prompt=partial(read_prompt, bus),
            tracing=runtime.tracing,
            send=sender.add,
            flush=sender.flush,
        )
        handler = PrefillHandler(
            worker, sender, epoch=runtime.epoch, max_requests=settings.max_requests
        )
        handlers.append(handler)
        runtime.model_fingerprint = parts.model_fingerprint
        async with asyncio.TaskGroup() as group:
            owner = group.create_task(handler.run())
            try:
                await _serve(runtime, engine, handler)
            finally:
                owner.cancel()
                await engine.close()
                if desk is not None:
                    desk.close()
    if failures:
        raise InternalError("The engine failed.") from failures[0]


async def _serve(
    runtime: ServiceRuntime, engine: EngineThread[EngineEvent], handler: PrefillHandler
) -> None:
    await engine.start()
    await runtime.serve_direct(subjects.PREFILL, handler.prefill, max_concurrency=1024)
    await runtime.listen_cancel(handler.cancel)
    runtime.on_drain(handler.drain)
    runtime.ready()
    await runtime.run()


async def _open_desk(
    settings: PrefillSettings,
    bus: Bus,
    transfer: TransferEngine,
    parts: EngineParts,
    encoders: Peers,
) -> EmbeddingDesk | None:
    """Registers memory for embeddings, where the engine reads any."""
    if not parts.embedding_row_bytes:
        return None
    memory = HostMemory(settings.embedding_bytes)
    await transfer.register(Region(memory.address, memory.size_bytes))
    embedding_format = EmbeddingFormat(
        row_bytes=parts.embedding_row_bytes,
        dtype=parts.embedding_dtype,
        weights_fingerprint=parts.weights_fingerprint,
    )
    return EmbeddingDesk(bus, memory, transfer.session, embedding_format, encoders)


def _model_engine(settings: PrefillSettings, sizes: EngineSizes) -> EngineParts:
    # Imported here because torch must not be loaded for the scripted engine: it takes seconds and
    # hundreds of megabytes.
    import torch

    from k3core.engine.assembly import ModelOptions, model_engine

    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    options = ModelOptions(
        checkpoint=Path(settings.checkpoint),
        device=settings.device,
        dtype=settings.dtype,
        kernels=settings.kernels,
    )
    return model_engine(options, "prefill", sizes)


def _chooser(script: Script, tokenizer: Tokenizer) -> Callable[["array[int]"], int]:
    return lambda token_ids: script.find(last_user_text(tokenizer, token_ids))
