"""A fetcher in the test's process: real sockets, memory for Redis and NATS, names that lie."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from k3_fetcher.addresses import AddressPolicy, parse_networks
from k3_fetcher.download import Downloader
from k3_fetcher.gate import Gate, SystemResolver
from k3_fetcher.handler import FetcherHandler
from k3_fetcher.records import ImageRecords
from k3_fetcher.settings import FetcherSettings
from k3wire.blobs.base import BlobStore
from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.errors import K3Error, TierUnavailable
from k3wire.messages.fetch import ReadReply, ReadRequest, ResolveReply, ResolveRequest
from k3wire.messages.media import ImageRef
from k3wire.service.pieces import PieceHolder

T = TypeVar("T")

LOOPBACK = ("127.0.0.0/8",)
QUICK: dict[str, Any] = {"allowed_networks": LOOPBACK, "total_timeout_s": 5.0}


def start(job: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Runs a job beside the test, which awaits it."""
    return asyncio.get_running_loop().create_task(job)


async def until(is_so: Callable[[], object]) -> None:
    """Lets others run until something is so."""
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)


@dataclass
class Names:
    """A name server of ours; a name with several lists gives them one after the other.

    Names that it does not know go to the system, as far as that can be answered without a network.
    """

    known: dict[str, list[Sequence[str]]] = field(default_factory=dict)
    num_lookups: int = 0
    system: SystemResolver = field(default_factory=SystemResolver)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.num_lookups += 1
        lists = self.known.get(host)
        if lists is None:
            return await self.system.resolve(host, port)
        return lists.pop(0) if len(lists) > 1 else lists[0]


@dataclass
class Fetcher:
    """The parts that a test may want to look at."""

    handler: FetcherHandler
    gate: Gate
    names: Names
    store: BlobStore
    pieces: PieceHolder

    async def resolve(
        self, url: str, *, tenant: str = "", param: str = "", request_id: str = "r"
    ) -> ResolveReply:
        request = ResolveRequest(
            request_id=request_id,
            url=url,
            tenant=tenant,
            param=param,
            deadline_unix_ns=time.time_ns() + 10**10,
        )
        async with asyncio.timeout(10):
            return await self.handler.resolve(request)

    async def read(self, image: ImageRef, request_id: str = "r") -> ReadReply:
        request = ReadRequest(
            request_id=request_id, image=image, deadline_unix_ns=time.time_ns() + 10**10
        )
        async with asyncio.timeout(10):
            return await self.handler.read(request)


@contextlib.asynccontextmanager
async def fetcher(
    names: Names | None = None,
    store: BlobStore | None = None,
    tls: ssl.SSLContext | None = None,
    **settings: Any,
) -> AsyncIterator[Fetcher]:
    """Builds a fetcher; settings default to short times and an open loopback."""
    chosen = FetcherSettings(**{**QUICK, **settings})
    names = names or Names()
    store = store or MemoryBlobStore()
    policy = AddressPolicy(
        parse_networks(chosen.allowed_networks), parse_networks(chosen.denied_networks)
    )
    gate = Gate(chosen, policy, names.resolve)
    downloader = Downloader(chosen, gate, tls)
    await downloader.open()
    pieces = PieceHolder("k3.test.pieces")
    records = ImageRecords(store, chosen.front_bytes, chosen.max_ttl_s)
    handler = FetcherHandler(chosen, gate, downloader, records, pieces, "fetcher-test")
    try:
        yield Fetcher(handler, gate, names, store, pieces)
    finally:
        await downloader.close()
        names.system.close()


@dataclass
class AbsentStore:
    """A store that is away while `is_gone`."""

    inner: MemoryBlobStore = field(default_factory=MemoryBlobStore)
    is_gone: bool = True

    def _check(self) -> None:
        if self.is_gone:
            raise TierUnavailable("away")

    async def get(self, key: str) -> bytes | None:
        self._check()
        return await self.inner.get(key)

    async def put(self, key: str, data: bytes, *, ttl_s: float) -> None:
        self._check()
        await self.inner.put(key, data, ttl_s=ttl_s)

    async def put_if_absent(self, key: str, data: bytes, *, ttl_s: float) -> bool:
        self._check()
        return await self.inner.put_if_absent(key, data, ttl_s=ttl_s)

    async def delete(self, key: str) -> None:
        self._check()
        await self.inner.delete(key)

    async def touch(self, key: str, *, ttl_s: float) -> bool:
        self._check()
        return await self.inner.touch(key, ttl_s=ttl_s)


@dataclass
class LateStore:
    """A store whose turns are given only when a test lets them go; `puts` are the keys written."""

    inner: MemoryBlobStore = field(default_factory=MemoryBlobStore)
    puts: list[str] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def get(self, key: str) -> bytes | None:
        return await self.inner.get(key)

    async def put(self, key: str, data: bytes, *, ttl_s: float) -> None:
        self.puts.append(key)
        await self.inner.put(key, data, ttl_s=ttl_s)

    async def put_if_absent(self, key: str, data: bytes, *, ttl_s: float) -> bool:
        self.asked.set()
        await self.go.wait()
        return await self.inner.put_if_absent(key, data, ttl_s=ttl_s)

    async def delete(self, key: str) -> None:
        await self.inner.delete(key)

    async def touch(self, key: str, *, ttl_s: float) -> bool:
        return await self.inner.touch(key, ttl_s=ttl_s)


async def failure(found: Fetcher, url: str, **arguments: Any) -> K3Error:
    with pytest.raises(K3Error) as caught:
        await found.resolve(url, **arguments)
    return caught.value
