"""The fetcher's business: what an image URL holds, and its bytes when L1 lost them.

Always true: a URL is downloaded by one task of one process at a time; what was refused is refused
again without asking; a hit does not make a record live longer; bytes are named by their own hash;
nobody's cancel stops a download that somebody else waits for.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from opentelemetry import trace

from k3_fetcher.download import Downloaded, Downloader, DownloadFailed
from k3_fetcher.freshness import read_freshness
from k3_fetcher.gate import Gate
from k3_fetcher.records import LOOP_BYTES, ImageRecords, UrlRecord, hash_bytes, url_key
from k3_fetcher.settings import FetcherSettings
from k3_fetcher.urls import ImageUrl, parse_url
from k3text.images.header import ImageHeader, ImageLimits, read_header
from k3wire.blobs.image_keys import image_bytes_key
from k3wire.blobs.single_flight import SingleFlight
from k3wire.errors import BlobLost, Cancelled, ImageError, SlowDown, from_info
from k3wire.messages.base import BlobRef, Outcome, StageReport
from k3wire.messages.control import Cancel, WorkerLoad
from k3wire.messages.fetch import ReadReply, ReadRequest, ResolveReply, ResolveRequest
from k3wire.messages.media import ImageRef
from k3wire.service.pieces import PieceHolder
from k3wire.telemetry import metrics
from k3wire.telemetry.tracing import note_report

logger = logging.getLogger(__name__)

T = TypeVar("T")

REFUSAL_LIFE_S = 20.0
"""How long a permanent refusal is remembered."""

FAILURE_LIFE_S = 1.5
"""How long a failure that may pass is remembered."""

HOLD_S = 60.0
"""How long bytes are handed out by pieces after a read."""


@dataclass(frozen=True, slots=True)
class _Found:
    record: UrlRecord
    outcome: Outcome
    detail: str


@dataclass(slots=True)
class FetcherHandler:
    """Answers resolve and read requests.

    Attributes:
        settings: limits and times.
        gate: judges hosts.
        downloader: open.
        records: tier L1.
        pieces: hands bytes out while Redis is away.
        worker_id: of this process.
        num_downloads: answers of hosts so far.
    """

    settings: FetcherSettings
    gate: Gate
    downloader: Downloader
    records: ImageRecords
    pieces: PieceHolder
    worker_id: str
    num_downloads: int = 0
    _flights: SingleFlight[str, _Found] = field(default_factory=SingleFlight[str, _Found])
    _reads: SingleFlight[bytes, bytes] = field(default_factory=SingleFlight[bytes, bytes])
    _running: dict[str, set["asyncio.Task[Any]"]] = field(
        default_factory=dict[str, set["asyncio.Task[Any]"]]
    )

    def load(self, rss_bytes: int) -> WorkerLoad:
        """How busy this worker is."""
        num_running = self._flights.num_waiting + self._reads.num_waiting
        return WorkerLoad(num_running=num_running, rss_bytes=rss_bytes)

    def cancel(self, message: Cancel) -> None:
        """Drops what runs for a request; downloads that others wait for go on."""
        for task in self._running.get(message.request_id, ()):
            task.cancel()

    async def resolve(self, request: ResolveRequest) -> ResolveReply:
        """Says what an image URL holds.

        Raises:
            ImageError: refused, not to be had, or no image.
            Cancelled: the request was cancelled.
        """
        start_unix_ns, started_ns = time.time_ns(), time.perf_counter_ns()
        try:
            url = self._parse(request.url)
            found = await self._tracked(request.request_id, self._find(url, request.tenant))
        except ImageError as error:
            _log(request.request_id, request.url, error.code, started_ns, 0)
            # Whoever shares a download has a path of his own in his request.
            raise type(error)(error.message, param=request.param or None) from error
        record = found.record
        spent_ns = time.perf_counter_ns() - started_ns
        report = StageReport(
            stage="fetcher",
            tier="L1",
            outcome=found.outcome,
            worker_id=self.worker_id,
            start_unix_ns=start_unix_ns,
            duration_ns=spent_ns,
            saved_ns=max(0, record.cost_ns - spent_ns) if found.outcome == "hit" else 0,
            size_bytes=record.size_bytes,
            num_hits=int(found.outcome == "hit"),
            detail=found.detail,
        )
        _note(report)
        _log(request.request_id, url.text, found.detail, started_ns, record.size_bytes)
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
            BlobLost: the address now holds something else, or there is none.
            ImageError: it cannot be had any more.
            SlowDown: this process hands out as much as it may.
            Cancelled: the request was cancelled.
        """
        start_unix_ns, started_ns = time.time_ns(), time.perf_counter_ns()
        key = request.image.content_key
        if request.image.url:
            self.gate.check_lists(self._parse(request.image.url).host, "")
        data = self.records.read_front(key)
        is_hit, is_stored = data is not None, False
        if data is None:
            data = await self.records.read_store(key)
            is_hit = is_stored = data is not None
        if data is None:
            job = self._reads.run(key, lambda: self._read_again(request.image))
            data = await self._tracked(request.request_id, job)
        if not is_stored:
            is_stored = await self.records.keep_bytes(key, data)
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
        blob = self._hand_out(key, data, image_bytes_key(key) if is_stored else "")
        _note(report)
        return ReadReply(blob=blob, report=report)

    def _hand_out(self, key: bytes, data: bytes, store_key: str) -> BlobRef:
        if self.pieces.size_bytes > max(self.settings.front_bytes, self.settings.max_image_bytes):
            if store_key:
                return BlobRef(digest=key, size_bytes=len(data), store_key=store_key)
            raise SlowDown("Too many images are being read; try again later", retry_after_s=1)
        blob = self.pieces.hold(data, digest=key, store_key=store_key)
        asyncio.get_running_loop().call_later(HOLD_S, self.pieces.release, key)
        return blob

    def _parse(self, text: str) -> ImageUrl:
        return parse_url(text, "", allows_http=self.settings.allows_http)

    async def _tracked(self, request_id: str, job: Coroutine[Any, Any, T]) -> T:
        task = asyncio.get_running_loop().create_task(job)
        running = self._running.setdefault(request_id, set())
        running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise
            raise Cancelled("The request was cancelled") from None
        finally:
            task.cancel()
            running.discard(task)
            if not running:
                self._running.pop(request_id, None)

    async def _find(self, url: ImageUrl, tenant: str) -> _Found:
        self.gate.check_lists(url.host, "")
        key = url_key(url.text, tenant)
        record = await self.records.find(key) if self.settings.keeps_images else None
        if record is not None and record.is_fresh and self.gate.permits_again(record.hops):
            return _Found(record, "hit", "fresh")
        return await self._flights.run(key, lambda: self._download_once(url, key, record))

    async def _download_once(self, url: ImageUrl, key: str, old: UrlRecord | None) -> _Found:
        refusal = await self.records.find_refusal(key)
        if refusal is not None:
            raise from_info(refusal)
        since_s = time.time()
        turn = await self.records.take_turn(key, self.settings.total_timeout_s)
        try:
            if turn.has_waited:
                # Whoever else waits need not queue behind us: either it is there, or it cannot
                # be kept and everybody has to ask for himself.
                await turn.end()
            if turn.may_be_late:
                refusal = await self.records.find_refusal(key)
                if refusal is not None:
                    raise from_info(refusal)
            if turn.may_be_late and self.settings.keeps_images:
                old = await self.records.find(key)
                if old is not None and self._is_others(old, since_s):
                    return _Found(old, "hit", "another process downloaded it")
            return await self._download_or_note(url, key, old)
        finally:
            await turn.end()

    async def _download_or_note(self, url: ImageUrl, key: str, old: UrlRecord | None) -> _Found:
        """Downloads, and remembers for a while why it came to nothing."""
        try:
            return await self._download(url, key, old)
        except DownloadFailed as failure:
            life_s = FAILURE_LIFE_S if failure.is_passing else REFUSAL_LIFE_S
            await self.records.keep_refusal(key, failure.error.to_info(), life_s)
            raise failure.error from failure
        except ImageError as error:
            await self.records.keep_refusal(key, error.to_info(), REFUSAL_LIFE_S)
            raise

    def _is_others(self, record: UrlRecord, since_s: float) -> bool:
        """Whether another process made a record, or renewed it, while this one got its turn."""
        is_new = max(record.validated_unix_s, record.fresh_until_unix_s) >= since_s
        return is_new and self.gate.permits_again(record.hops)

    async def _download(self, url: ImageUrl, key: str, old: UrlRecord | None) -> _Found:
        started_ns = time.perf_counter_ns()
        asked_s = time.time()
        found = await self.downloader.fetch(url, old.validators if old is not None else {})
        self.num_downloads += 1
        if found.is_unchanged and old is not None:
            record = self._renewed(old, found, asked_s)
            await self.records.keep(key, record)
            return _Found(record, "hit", "revalidated")
        record, _ = await self._keep(key, found, asked_s, started_ns)
        return _Found(record, "miss", "downloaded")

    def _renewed(self, old: UrlRecord, found: Downloaded, asked_s: float) -> UrlRecord:
        settings = self.settings
        fresh = read_freshness(found.headers, settings.default_ttl_s, settings.max_ttl_s)
        return msgspec.structs.replace(
            old,
            validated_unix_s=asked_s,
            fresh_until_unix_s=asked_s + fresh.ttl_s,
            etag=fresh.etag or old.etag,
            last_modified=fresh.last_modified or old.last_modified,
            hops=found.hops,
        )

    async def _keep(
        self, key: str, found: Downloaded, asked_s: float, started_ns: int
    ) -> tuple[UrlRecord, bytes]:
        settings = self.settings
        fresh = read_freshness(found.headers, settings.default_ttl_s, settings.max_ttl_s)
        is_storable = fresh.is_storable and settings.keeps_images
        header = await self._read_header(found.data)
        record = UrlRecord(
            content_key=await hash_bytes(found.data),
            media_type=header.media_type,
            width=header.width,
            height=header.height,
            size_bytes=len(found.data),
            validated_unix_s=asked_s,
            fresh_until_unix_s=asked_s + fresh.ttl_s,
            etag=fresh.etag,
            last_modified=fresh.last_modified,
            hops=found.hops,
            cost_ns=time.perf_counter_ns() - started_ns,
        )
        await self.records.keep_bytes(record.content_key, found.data, is_storable=is_storable)
        if is_storable:
            await self.records.keep(key, record)
        else:
            await self.records.forget(key)
        return record, found.data

    async def _read_header(self, data: bytes) -> ImageHeader:
        settings = self.settings
        limits = ImageLimits(
            max_bytes=settings.max_image_bytes,
            max_pixels=settings.max_pixels,
            media_types=frozenset(settings.media_types),
        )
        if len(data) <= LOOP_BYTES:
            return read_header(data, limits)
        return await asyncio.to_thread(read_header, data, limits)

    async def _read_again(self, image: ImageRef) -> bytes:
        if not image.url:
            raise BlobLost("The image is in no store and has no address")
        url = self._parse(image.url)
        started_ns, asked_s = time.perf_counter_ns(), time.time()
        try:
            found = await self.downloader.fetch(url, {})
        except DownloadFailed as failure:
            raise failure.error from failure
        self.num_downloads += 1
        # If it changed, the next resolve must not go by the old record.
        key = url_key(url.text, image.tenant)
        record, data = await self._keep(key, found, asked_s, started_ns)
        if record.content_key != image.content_key:
            raise BlobLost("The image changed at its address; send the request again")
        return data


def _note(report: StageReport) -> None:
    note_report(trace.get_current_span(), report)
    metrics.TIER_LOOKUPS.labels(report.tier, report.outcome).inc()
    metrics.TIER_SAVED.labels(report.tier).inc(report.saved_ns / 1e9)
    metrics.STAGE_DURATION.labels(report.stage).observe(report.duration_ns / 1e9)


def _log(request_id: str, url: str, outcome: str, started_ns: int, size_bytes: int) -> None:
    # Signed URLs carry keys: of a URL only scheme, host and a hash may stand in a log.
    scheme, _, rest = url.partition("://")
    host = rest.split("/")[0].split("?")[0].rsplit("@")[-1]
    logger.info(
        "image resolved",
        extra={
            "request_id": request_id,
            "scheme": scheme[:8],
            "host": host[:255],
            "url_hash": hashlib.sha256(url.encode()).hexdigest()[:16],
            "outcome": outcome,
            "size_bytes": size_bytes,
            "spent_ms": round((time.perf_counter_ns() - started_ns) / 1e6, 1),
        },
    )
