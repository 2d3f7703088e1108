"""The fetcher's business: what an image URL holds, and its bytes when L1 lost them.

Always true: a URL is downloaded by one task of one process at a time; what was refused is refused
again without asking; a hit does not make a record live longer; bytes are named by their own hash.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field

import msgspec

from k3_fetcher.download import Downloader
from k3_fetcher.freshness import read_freshness
from k3_fetcher.records import ImageRecords, UrlRecord, bytes_key, url_key
from k3_fetcher.settings import FetcherSettings
from k3_fetcher.urls import ImageUrl, parse_url
from k3text.images.header import ImageLimits, read_header
from k3text.images.keys import content_key
from k3wire.blobs.single_flight import SingleFlight
from k3wire.errors import BlobLost, FailedToDownloadImage, K3Error
from k3wire.messages.base import StageReport
from k3wire.messages.control import Cancel, WorkerLoad
from k3wire.messages.fetch import ReadReply, ReadRequest, ResolveReply, ResolveRequest
from k3wire.messages.media import ImageRef
from k3wire.service.pieces import PieceHolder

REFUSAL_LIFE_S = 20.0
"""How long a permanent refusal is remembered."""

FAILURE_LIFE_S = 1.5
"""How long a failure that may pass is remembered."""

MAX_REFUSALS = 10_000
HOLD_S = 60.0
"""How long bytes are handed out by pieces after a read."""

LOCK_LIFE_S = 20.0
LOCK_POLL_S = 0.05
COST_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class _Found:
    record: UrlRecord
    outcome: str
    detail: str


@dataclass(slots=True)
class FetcherHandler:
    """Answers resolve and read requests."""

    settings: FetcherSettings
    downloader: Downloader
    records: ImageRecords
    pieces: PieceHolder
    worker_id: str
    num_downloads: int = 0
    _flights: SingleFlight[str, _Found] = field(default_factory=SingleFlight[str, _Found])
    _refusals: OrderedDict[str, tuple[float, K3Error]] = field(
        default_factory=OrderedDict[str, tuple[float, K3Error]]
    )
    _running: dict[str, set["asyncio.Task[_Found]"]] = field(
        default_factory=dict[str, set["asyncio.Task[_Found]"]]
    )
    _download_ns: float = 0.0

    def load(self, rss_bytes: int) -> WorkerLoad:
        """How busy this worker is."""
        return WorkerLoad(num_running=self._flights.num_flights, rss_bytes=rss_bytes)

    def cancel(self, message: Cancel) -> None:
        """Drops what runs for a request; downloads that others wait for go on."""
        for task in self._running.get(message.request_id, ()):
            task.cancel()

    async def resolve(self, request: ResolveRequest) -> ResolveReply:
        """Says what an image URL holds.

        Raises:
            ImageError: refused, not to be had, or no image.
        """
        start_unix_ns, started_ns = time.time_ns(), time.perf_counter_ns()
        url = self._parse(request.url, request.param)
        found = await self._tracked(
            request.request_id, self._find(url, request.tenant, request.param)
        )
        spent_ns = time.perf_counter_ns() - started_ns
        is_hit = found.outcome == "hit"
        record = found.record
        report = StageReport(
            stage="fetcher",
            tier="L1",
            outcome="hit" if is_hit else "miss",
            worker_id=self.worker_id,
            start_unix_ns=start_unix_ns,
            duration_ns=spent_ns,
            saved_ns=max(0, int(self._download_ns) - spent_ns) if is_hit else 0,
            size_bytes=record.size_bytes,
            num_hits=int(is_hit),
            detail=found.detail,
        )
        image = ImageRef(
            content_key=record.content_key,
            media_type=record.media_type,
            width=record.width,
            height=record.height,
            size_bytes=record.size_bytes,
            url=url.text,
            tenant=request.tenant,
        )
        return ResolveReply(image=image, report=report)

    async def read(self, request: ReadRequest) -> ReadReply:
        """Brings back the bytes of an image that L1 lost.

        Raises:
            BlobLost: the address now holds something else.
            ImageError: it cannot be had any more.
        """
        start_unix_ns, started_ns = time.time_ns(), time.perf_counter_ns()
        image = request.image
        data = await self.records.read_bytes(image.content_key)
        is_hit = data is not None
        if data is None:
            url = self._parse(image.url, "")
            await self.downloader.check(url, "")
            downloaded = await self.downloader.fetch(url, {}, "")
            self.num_downloads += 1
            data = downloaded.data
            if content_key(data) != image.content_key:
                raise BlobLost("The image changed at its address; send the request again")
        stored = await self.records.keep_bytes(image.content_key, data)
        key = bytes_key(image.content_key) if stored else ""
        blob = self.pieces.hold(data, digest=image.content_key, store_key=key)
        loop = asyncio.get_running_loop()
        loop.call_later(HOLD_S, self.pieces.release, image.content_key)
        report = StageReport(
            stage="fetcher",
            tier="L1",
            outcome="hit" if is_hit else "miss",
            worker_id=self.worker_id,
            start_unix_ns=start_unix_ns,
            duration_ns=time.perf_counter_ns() - started_ns,
            size_bytes=len(data),
            num_hits=int(is_hit),
            detail="read again",
        )
        return ReadReply(blob=blob, report=report)

    def _parse(self, text: str, param: str) -> ImageUrl:
        return parse_url(text, param, allows_http=self.settings.allows_http)

    async def _tracked(self, request_id: str, job: Coroutine[None, None, _Found]) -> _Found:
        task = asyncio.get_running_loop().create_task(job)
        running = self._running.setdefault(request_id, set())
        running.add(task)
        try:
            return await task
        finally:
            task.cancel()
            running.discard(task)
            if not running:
                self._running.pop(request_id, None)

    async def _find(self, url: ImageUrl, tenant: str, param: str) -> _Found:
        key = url_key(url.text, tenant)
        self._raise_refusal(key, param)
        record = await self.records.find(key)
        if record is not None and record.is_fresh:
            # The lists may have changed since; addresses are judged at every download.
            self.downloader.check_lists(url, param)
            return _Found(record, "hit", "fresh")
        return await self._flights.run(key, lambda: self._download_once(url, key, param))

    def _raise_refusal(self, key: str, param: str) -> None:
        found = self._refusals.get(key)
        if found is None:
            return
        until_s, error = found
        if time.monotonic() >= until_s:
            del self._refusals[key]
            return
        raise type(error)(error.message, param=param or None)

    def _remember(self, key: str, error: K3Error) -> None:
        is_passing = isinstance(error, FailedToDownloadImage)
        life_s = FAILURE_LIFE_S if is_passing else REFUSAL_LIFE_S
        self._refusals[key] = (time.monotonic() + life_s, error)
        while len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    async def _download_once(self, url: ImageUrl, key: str, param: str) -> _Found:
        has_lock = await self._take_turn(key)
        try:
            record = await self.records.find(key)
            if record is not None and record.is_fresh:
                return _Found(record, "hit", "another process downloaded it")
            return await self._download(url, key, record, param)
        except K3Error as error:
            self._remember(key, error)
            raise
        finally:
            if has_lock:
                await self.records.unlock(key)

    async def _take_turn(self, key: str) -> bool:
        """Waits while another process downloads the same URL, for as long as that may take."""
        until_s = time.monotonic() + self.settings.total_timeout_s
        while not await self.records.lock(key, LOCK_LIFE_S):
            record = await self.records.find(key)
            if (record is not None and record.is_fresh) or time.monotonic() > until_s:
                return False
            await asyncio.sleep(LOCK_POLL_S)
        return True

    async def _download(self, url: ImageUrl, key: str, old: UrlRecord | None, param: str) -> _Found:
        started_ns = time.perf_counter_ns()
        validators = old.validators if old is not None else {}
        found = await self.downloader.fetch(url, validators, param)
        self.num_downloads += 1
        settings = self.settings
        fresh = read_freshness(found.headers, settings.default_ttl_s, settings.max_ttl_s)
        until_s = time.time() + fresh.ttl_s
        if found.is_unchanged and old is not None:
            record = msgspec.structs.replace(old, fresh_until_unix_s=until_s)
            await self.records.keep(key, record)
            return _Found(record, "hit", "revalidated")
        limits = ImageLimits(max_bytes=settings.max_image_bytes)
        header = read_header(found.data, limits, param)
        record = UrlRecord(
            content_key=content_key(found.data),
            media_type=header.media_type,
            width=header.width,
            height=header.height,
            size_bytes=len(found.data),
            fresh_until_unix_s=until_s,
            etag=fresh.etag,
            last_modified=fresh.last_modified,
        )
        await self.records.keep_bytes(record.content_key, found.data)
        if fresh.is_storable:
            await self.records.keep(key, record)
        cost_ns = time.perf_counter_ns() - started_ns
        last = self._download_ns or cost_ns
        self._download_ns = last + COST_WEIGHT * (cost_ns - last)
        return _Found(record, "miss", "downloaded")
