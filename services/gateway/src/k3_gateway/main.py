"""The gateway's composition root: adapters, rooms and the HTTP server, joined and ended in order."""

import asyncio
import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from k3_gateway.admission import Admission
from k3_gateway.checkpoint import read_context_tokens
from k3_gateway.generation import Fleet
from k3_gateway.heap import give_back_large_blocks
from k3_gateway.http_server import Server, make_server
from k3_gateway.images import ImageResolver
from k3_gateway.inbox import TokenInbox
from k3_gateway.openai.app import build_app
from k3_gateway.openai.auth import KeyRing
from k3_gateway.openai.body_intake import BodyLimits
from k3_gateway.openai.chat_completions import ChatService
from k3_gateway.pipeline import Pipeline, ServedModel
from k3_gateway.routing import Router
from k3_gateway.settings import GatewaySettings
from k3_gateway.turns import Turns
from k3text.images.config import read_processor_config
from k3text.tokenizer import Tokenizer
from k3wire import subjects
from k3wire.blobs.redis_store import RedisBlobStore
from k3wire.bus.nats_bus import NatsBus
from k3wire.errors import ShuttingDown
from k3wire.messages.base import Stage
from k3wire.messages.control import Heartbeat, WorkerLoad
from k3wire.messages.stream import TokenFrame
from k3wire.service.collector import settle_memory
from k3wire.service.directory import Directory
from k3wire.service.patience import Peers
from k3wire.service.pieces import PieceHolder
from k3wire.service.runtime import ServiceRuntime, resident_bytes
from k3wire.service.settings import settings_or_exit

GRACE_SHARE = 0.8
"""Of the grace period, for answers to finish; the rest is for telling those that did not."""
NEEDED_STAGES: tuple[Stage, ...] = ("prefill", "decode", "encoder", "preprocessor", "fetcher")


def serve_model(settings: GatewaySettings) -> ServedModel:
    """Reads what the gateway must know of the checkpoint.

    Raises:
        OSError: the folder or a file of it is missing.
    """
    folder = Path(settings.checkpoint)
    return ServedModel(
        name=settings.model_name or folder.resolve().name,
        fingerprint=f"k3-{folder.resolve().name}",
        max_context_tokens=settings.max_context_tokens or read_context_tokens(folder),
        tokenizer=Tokenizer.from_directory(folder),
        created_s=int(time.time()),
    )


async def serve(settings: GatewaySettings) -> None:
    """Runs the gateway until it is told to stop."""
    give_back_large_blocks()
    model = serve_model(settings)
    bus = await NatsBus.connect(settings.nats_url, "gateway")
    store = RedisBlobStore.open(settings.redis_url)
    settle_memory()
    directory, inbox = Directory(), TokenInbox()
    admission = Admission(settings.max_running, settings.max_queued_bytes)

    def load() -> WorkerLoad:
        directory.sweep()
        return WorkerLoad(num_running=admission.num_running, rss_bytes=resident_bytes())

    runtime = ServiceRuntime("gateway", settings, bus, load=load)
    router = Router(runtime.worker_id, secrets.randbits(32))
    pieces = PieceHolder(subjects.direct(subjects.PIECE, runtime.worker_id))
    fleet = Fleet(runtime.worker_id, bus, directory, router, inbox, pieces, settings.route_wait_s)

    def on_departure(beat: Heartbeat) -> None:
        router.forget_worker(beat.worker_id)
        fleet.worker_left(beat)

    def why_not_ready() -> str:
        if runtime.is_draining:
            return "draining"
        missing = [stage for stage in NEEDED_STAGES if not directory.ready(stage)]
        return f"no worker is ready for: {', '.join(missing)}" if missing else ""

    directory.on_departure, directory.own_id = on_departure, runtime.worker_id
    chat = _build_chat(settings, runtime, _build_pipeline(settings, model, fleet, store), admission)
    async with runtime:
        await runtime.keep(await directory.follow(bus))
        await runtime.keep(await pieces.serve(bus))
        tokens = await bus.listen(subjects.tokens(runtime.worker_id), TokenFrame, inbox.on_frame)
        app = build_app(chat, model, why_not_ready)
        server = make_server(app, settings.host, settings.port, settings.grace_s)
        await _run(runtime, server, _Ending(admission, fleet, settings.grace_s))
        await tokens.drain()
    await store.close()
    await bus.close()


def _build_pipeline(
    settings: GatewaySettings, model: ServedModel, fleet: Fleet, store: RedisBlobStore
) -> Pipeline:
    turns = Turns()
    images = ImageResolver(
        bus=fleet.bus,
        store=store,
        pieces=fleet.pieces,
        config=read_processor_config(Path(settings.checkpoint)),
        worker_id=fleet.gateway_id,
        max_image_bytes=settings.max_image_bytes,
        ttl_s=settings.image_ttl_s,
        turns=turns,
        fetchers=Peers(fleet.directory, "fetcher"),
    )
    return Pipeline(
        model=model,
        fleet=fleet,
        images=images,
        worker_id=fleet.gateway_id,
        max_images=settings.max_images,
        request_timeout_s=settings.request_timeout_s,
        has_tenant_caches=settings.has_tenant_caches,
        turns=turns,
    )


def _build_chat(
    settings: GatewaySettings, runtime: ServiceRuntime, pipeline: Pipeline, admission: Admission
) -> ChatService:
    return ChatService(
        pipeline=pipeline,
        keys=KeyRing(settings.api_keys),
        admission=admission,
        tracing=runtime.tracing,
        body_limits=BodyLimits(
            max_bytes=settings.max_body_bytes,
            timeout_s=settings.body_timeout_s,
            idle_timeout_s=settings.body_idle_timeout_s,
        ),
        keep_alive_s=settings.keep_alive_s,
    )


@dataclass(frozen=True, slots=True)
class _Ending:
    """How the gateway goes: no new requests, time for the running ones, then a word to each."""

    admission: Admission
    fleet: Fleet
    grace_s: float

    async def end(self, server: Server, served: asyncio.Event) -> None:
        """Ends the HTTP server within the grace period."""
        self.admission.is_closed = True
        server.should_exit = True
        try:
            async with asyncio.timeout(self.grace_s * GRACE_SHARE):
                await served.wait()
        except TimeoutError:
            self.fleet.end_all(ShuttingDown("The server had to stop; ask again"))
            await served.wait()


async def _run(runtime: ServiceRuntime, server: Server, ending: _Ending) -> None:
    serving = asyncio.Event()

    async def serve_http() -> None:
        await server.serve()
        serving.set()
        runtime.stop()

    async def end_http() -> None:
        await ending.end(server, serving)

    async def announce() -> None:
        while not server.started and not serving.is_set():  # noqa: ASYNC110 - uvicorn has no event
            await asyncio.sleep(0.005)
        if server.started:
            host, port = server.servers[0].sockets[0].getsockname()[:2]
            runtime.endpoint = f"http://{host}:{port}"
            runtime.ready()

    runtime.on_stop(end_http)
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_http())
        group.create_task(announce())
        group.create_task(runtime.run())


def main() -> None:
    """Runs the process."""
    settings = settings_or_exit(GatewaySettings, os.environ)
    if not (Path(settings.checkpoint) / "config.json").is_file():
        sys.stderr.write("k3: K3_CHECKPOINT must name a folder that holds a config.json\n")
        raise SystemExit(2)
    uvloop.run(serve(settings))
