"""Builds a fetcher out of its parts and runs it until it is told to stop."""

import contextlib
import os
import sys

import uvloop

from k3_fetcher.addresses import AddressPolicy, parse_networks
from k3_fetcher.download import Downloader
from k3_fetcher.gate import Gate, SystemResolver
from k3_fetcher.handler import FetcherHandler
from k3_fetcher.records import ImageRecords
from k3_fetcher.settings import FetcherSettings
from k3wire import subjects
from k3wire.blobs.redis_store import RedisBlobStore
from k3wire.bus.nats_bus import NatsBus
from k3wire.messages.control import WorkerLoad
from k3wire.service.pieces import PieceHolder
from k3wire.service.runtime import ServiceRuntime, resident_bytes
from k3wire.service.settings import settings_or_exit


async def run(settings: FetcherSettings, policy: AddressPolicy) -> None:
    """Runs a worker over NATS and Redis."""
    handlers: list[FetcherHandler] = []

    def load() -> WorkerLoad:
        return handlers[0].load(resident_bytes()) if handlers else WorkerLoad()

    async with contextlib.AsyncExitStack() as stack:
        bus = await NatsBus.connect(settings.nats_url, "fetcher")
        stack.push_async_callback(bus.close)
        store = RedisBlobStore.open(settings.redis_url)
        stack.push_async_callback(store.close)
        resolver = SystemResolver()
        stack.callback(resolver.close)
        gate = Gate(settings, policy, resolver.resolve)
        downloader = Downloader(settings, gate)
        await downloader.open()
        stack.push_async_callback(downloader.close)
        runtime = await stack.enter_async_context(
            ServiceRuntime("fetcher", settings, bus, load=load)
        )
        pieces = PieceHolder(subjects.direct(subjects.PIECE, runtime.worker_id))
        await runtime.keep(await pieces.serve(bus))
        handler = FetcherHandler(
            settings=settings,
            gate=gate,
            downloader=downloader,
            records=ImageRecords(store, settings.front_bytes, settings.max_ttl_s),
            pieces=pieces,
            worker_id=runtime.worker_id,
        )
        handlers.append(handler)
        await runtime.serve_shared(subjects.RESOLVE, handler.resolve)
        await runtime.serve_shared(subjects.READ, handler.read)
        await runtime.listen_cancel(handler.cancel)
        runtime.ready()
        await runtime.run()


def main() -> None:
    """Runs the process."""
    settings = settings_or_exit(FetcherSettings, os.environ)
    try:
        policy = AddressPolicy(
            parse_networks(settings.allowed_networks), parse_networks(settings.denied_networks)
        )
    except ValueError as error:
        sys.stderr.write(f"k3: K3_FETCHER_ALLOWED_NETWORKS or _DENIED_NETWORKS: {error}\n")
        raise SystemExit(2) from error
    uvloop.run(run(settings, policy))
