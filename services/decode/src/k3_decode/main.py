"""Builds a decode worker out of its parts and runs it until it is told to stop."""

import asyncio
from functools import partial
from pathlib import Path

from k3_decode.handler import DecodeHandler, Worker
from k3_decode.settings import DecodeSettings
from k3core.engine.frames import FrameAssembler, FrameSender
from k3core.engine.parts import EngineParts, EngineSizes, scripted_engine
from k3core.engine.script import load_script, split_markers
from k3core.engine.thread import EngineThread
from k3core.engine.words import EngineEvent
from k3core.transfer.base import Region, TransferEngine
from k3core.transfer.mooncake import MooncakeTransferEngine
from k3core.transfer.page_exchange import Arena, layout_info
from k3text.tokenizer import Tokenizer
from k3wire import subjects
from k3wire.bus.base import Bus, Headers
from k3wire.bus.nats_bus import NatsBus
from k3wire.errors import InternalError
from k3wire.messages.base import Admitted
from k3wire.messages.control import WorkerLoad
from k3wire.messages.decode import CommitRequest
from k3wire.service.collector import settle_memory
from k3wire.service.directory import Directory
from k3wire.service.prompts import read_prompt
from k3wire.service.runtime import ServiceRuntime, resident_bytes

MAX_CONCURRENCY = 1024
"""Calls answered at once; each holds a seat, whose number has a limit of its own."""


async def run(settings: DecodeSettings) -> None:
    """Runs a worker over NATS and Mooncake."""
    bus = await NatsBus.connect(settings.nats_url, "decode")
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


def build_engine(settings: DecodeSettings) -> EngineParts:
    """Builds the engine that the settings ask for; takes as long as loading a checkpoint."""
    sizes = EngineSizes(
        arena_bytes=settings.arena_bytes,
        unit_tokens=settings.unit_tokens,
        max_rows=settings.max_batch,
    )
    if settings.engine == "scripted":
        tokenizer = Tokenizer.from_directory(Path(settings.checkpoint))
        script = load_script(
            Path(settings.script), lambda text: tokenizer.encode_segments(split_markers(text))
        )
        return scripted_engine(script, "decode", sizes, None)
    return _model_engine(settings, sizes)


async def run_worker(
    settings: DecodeSettings, bus: Bus, transfer: TransferEngine, parts: EngineParts
) -> None:
    """Runs a worker on the given adapters until the process is told to stop."""
    handlers: list[DecodeHandler] = []
    failures: list[BaseException] = []

    def load() -> WorkerLoad:
        return handlers[0].load(resident_bytes()) if handlers else WorkerLoad()

    async with ServiceRuntime("decode", settings, bus, load=load) as runtime:

        def on_failure(error: BaseException) -> None:
            # The engine is down: every stream ends, then the process, to be started afresh.
            failures.append(error)
            runtime.not_ready(f"engine failed: {type(error).__name__}")
            handlers[0].fail_all()
            runtime.stop()

        engine: EngineThread[EngineEvent] = EngineThread(
            parts.core, lambda events: handlers[0].hear(events), on_failure
        )
        await transfer.register(Region(parts.base_address, parts.size_bytes))
        assembler = FrameAssembler(runtime.worker_id, runtime.epoch)
        worker = Worker(
            worker_id=runtime.worker_id,
            epoch=runtime.epoch,
            engine=engine,
            core=parts.core,
            arena=Arena(transfer.session, parts.base_address, parts.layout),
            layout=layout_info(parts.layout, parts.model_fingerprint),
            view_page=parts.view_page,
            read_prompt=partial(read_prompt, bus),
            sender=FrameSender(assembler, bus.publish),
            max_requests=settings.max_requests,
        )
        handler = DecodeHandler(worker)
        handlers.append(handler)
        runtime.model_fingerprint = parts.model_fingerprint
        async with asyncio.TaskGroup() as group:
            owner = group.create_task(handler.run())
            try:
                await engine.start()
                await _serve(runtime, bus, handler)
            finally:
                owner.cancel()
                await engine.close()
    if failures:
        raise InternalError("The engine failed.") from failures[0]


async def _serve(runtime: ServiceRuntime, bus: Bus, handler: DecodeHandler) -> None:
    await runtime.serve_direct(subjects.RESERVE, handler.reserve, max_concurrency=MAX_CONCURRENCY)

    async def commit(request: CommitRequest, headers: Headers) -> Admitted:
        with runtime.tracing.span("decode commit", headers, is_server=True):
            return await handler.commit(request)

    # Not the runtime's: while it drains, what was reserved must still be able to come in.
    commits = await bus.serve(
        subjects.direct(subjects.COMMIT, runtime.worker_id),
        subjects.COMMIT,
        commit,
        max_concurrency=MAX_CONCURRENCY,
    )
    directory = Directory(on_departure=handler.worker_left, own_id=runtime.worker_id)
    following = await directory.follow(bus)
    await runtime.listen_cancel(handler.cancel)
    runtime.on_drain(handler.drain)
    runtime.on_drain(commits.drain)
    runtime.on_drain(following.drain)
    runtime.ready()
    await runtime.run()


def _model_engine(settings: DecodeSettings, sizes: EngineSizes) -> EngineParts:
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
    return model_engine(options, "decode", sizes)
