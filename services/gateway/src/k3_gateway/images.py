"""Images of a request, resolved to what the prompt and the fleet need: sizes, keys, ways to bytes.

http and https go to the fetcher, which answers with metadata; data URLs are decoded, checked by
their header and put into L1 here, and their bytes are held until the request ends, so that a stage
that finds L1 empty can read them from this process.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field

from k3_gateway.chat_request.messages import ImageInput
from k3_gateway.data_url import decode_data_url, is_data_url, max_payload_chars
from k3_gateway.turns import Turns
from k3text.chat_format.conversation import ImageSize
from k3text.images.config import ProcessorConfig
from k3text.images.geometry import grid, num_tokens
from k3text.images.header import ImageHeader, ImageLimits, read_header
from k3text.images.keys import content_key, feature_key
from k3wire import subjects
from k3wire.blobs.base import BlobStore
from k3wire.blobs.image_keys import image_bytes_key
from k3wire.bus.base import Bus
from k3wire.errors import InvalidImageUrl, NoResponders, TierUnavailable
from k3wire.messages.base import StageReport
from k3wire.messages.fetch import MAX_URL_CHARS, ResolveRequest
from k3wire.messages.media import ImageRef, ImageSlot
from k3wire.service.patience import Peers, call_patiently
from k3wire.service.pieces import PieceHolder

MAX_AT_ONCE = 8
"""Images of one request that are resolved side by side."""

MAX_URL_HEAD_CHARS = 4096
"""Room before a data URL's payload, and for a few escapes of its JSON."""

RESOLVE_TIMEOUT_S = 30.0
"""All downloads of a request together."""


@dataclass(slots=True)
class ResolvedImages:
    """Images of one request, in the order of their parts.

    Attributes:
        slots: offsets are still 0.
        reports: of the fetcher, and of L1 for data URLs.
        waited_ns: time the gateway spent waiting for them.
    """

    slots: tuple[ImageSlot, ...] = ()
    reports: tuple[StageReport, ...] = ()
    waited_ns: int = 0

    @property
    def sizes(self) -> tuple[ImageSize, ...]:
        """What the renderer needs."""
        return tuple(
            ImageSize(width=slot.image.width, height=slot.image.height, num_tokens=slot.num_tokens)
            for slot in self.slots
        )


@dataclass(frozen=True, slots=True)
class ImageResolver:
    """Resolves image parts.

    Attributes:
        bus: to the fetcher.
        store: L1.
        pieces: holds data URLs' bytes.
        config: of the image processor, for sizes and feature keys.
        worker_id: of this gateway.
        max_image_bytes: longest encoded image.
        ttl_s: how long L1 keeps a data URL's bytes.
        turns: where data URLs are decoded and hashed.
        fetchers: the loss of one ends a wait for it.
    """

    bus: Bus
    store: BlobStore
    pieces: PieceHolder
    config: ProcessorConfig
    worker_id: str
    max_image_bytes: int
    ttl_s: float
    turns: Turns = field(default_factory=Turns)
    fetchers: Peers | None = None

    @property
    def max_url_bytes(self) -> int:
        """Longest data URL that may be of use."""
        return max_payload_chars(self.max_image_bytes) + MAX_URL_HEAD_CHARS

    @contextlib.asynccontextmanager
    async def resolve(
        self, images: Sequence[ImageInput], request_id: str, tenant: str, deadline_unix_ns: int
    ) -> AsyncGenerator[ResolvedImages, None]:
        """Resolves all images; the first that fails fails all, with its path.

        `images` is not looked at any more once the block has begun.

        Raises:
            ImageError: an image cannot be used.
            K3Error: the fetcher is away.
        """
        if not images:
            yield ResolvedImages()
            return
        started_ns = time.monotonic_ns()
        until_ns = min(deadline_unix_ns, time.time_ns() + int(RESOLVE_TIMEOUT_S * 1e9))
        slots = asyncio.Semaphore(MAX_AT_ONCE)
        held: list[bytes] = []

        async def one(image: ImageInput) -> tuple[ImageRef, StageReport]:
            async with slots:
                if is_data_url(image.url):
                    return await self._take_data(image, held)
                if len(image.url) > MAX_URL_CHARS:
                    raise InvalidImageUrl(
                        f"An image URL must have at most {MAX_URL_CHARS} characters",
                        param=image.param,
                    )
                request = ResolveRequest(
                    request_id=request_id,
                    url=image.url,
                    tenant=tenant,
                    param=image.param,
                    deadline_unix_ns=until_ns,
                )
                return await self._ask_fetcher(request)

        try:
            found = await _gather([one(image) for image in images])
            yield ResolvedImages(
                slots=tuple(
                    self._slot(ref, image.param)
                    for (ref, _), image in zip(found, images, strict=True)
                ),
                reports=tuple(report for _, report in found),
                waited_ns=time.monotonic_ns() - started_ns,
            )
        finally:
            for digest in held:
                self.pieces.release(digest)

    async def _ask_fetcher(self, request: ResolveRequest) -> tuple[ImageRef, StageReport]:
        subject, until_ns = subjects.shared(subjects.RESOLVE), request.deadline_unix_ns
        try:
            reply = await call_patiently(
                self.bus, subject, subjects.RESOLVE, request, until_ns, self.fetchers
            )
        except NoResponders as error:
            raise NoResponders(
                "No worker is ready for: fetcher; try again in a moment, or send the image as a "
                "data URL"
            ) from error
        return reply.image, reply.report

    async def _take_data(
        self, image: ImageInput, held: list[bytes]
    ) -> tuple[ImageRef, StageReport]:
        start_unix_ns, started_ns = time.time_ns(), time.monotonic_ns()
        data, header, key = await self.turns.run(len(image.url), lambda: self._decode(image))
        self.pieces.hold(data, digest=key, store_key=image_bytes_key(key))
        held.append(key)
        outcome, detail = "bypass", "unavailable"
        with contextlib.suppress(TierUnavailable):
            is_new = await self.store.put_if_absent(image_bytes_key(key), data, ttl_s=self.ttl_s)
            outcome, detail = ("miss", "stored") if is_new else ("hit", "shared")
        ref = ImageRef(
            content_key=key,
            media_type=header.media_type,
            width=header.width,
            height=header.height,
            size_bytes=len(data),
            holder=self.pieces.subject,
        )
        report = StageReport(
            # No fetcher was asked: this is the gateway's own work, though the tier is theirs.
            stage="gateway",
            tier="L1",
            outcome=outcome,
            worker_id=self.worker_id,
            start_unix_ns=start_unix_ns,
            duration_ns=time.monotonic_ns() - started_ns,
            size_bytes=len(data),
            num_hits=int(outcome == "hit"),
            detail=f"data URL, {detail}",
        )
        return ref, report

    def _decode(self, image: ImageInput) -> tuple[bytes, ImageHeader, bytes]:
        data = decode_data_url(image.url, self.max_image_bytes, image.param)
        limits = ImageLimits(max_bytes=self.max_image_bytes)
        return data, read_header(data, limits, param=image.param), content_key(data)

    def _slot(self, ref: ImageRef, param: str) -> ImageSlot:
        return ImageSlot(
            image=ref,
            feature_key=feature_key(ref.content_key, self.config),
            offset=0,
            num_tokens=num_tokens(ref.width, ref.height, self.config),
            grid_thw=grid(ref.width, ref.height, self.config),
            param=param,
        )


async def _gather(
    jobs: Sequence[Coroutine[None, None, tuple[ImageRef, StageReport]]],
) -> list[tuple[ImageRef, StageReport]]:
    failure: BaseException | None = None
    tasks: list[asyncio.Task[tuple[ImageRef, StageReport]]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(job) for job in jobs)
        return [task.result() for task in tasks]
    except BaseExceptionGroup as errors:
        # One image's failure is the request's; its siblings were cancelled with it. A group that is
        # raised refers to itself by its traceback, and a failure to the group it is raised in: the
        # body and the pictures of a refused request would wait for the garbage collector.
        failure = errors.with_traceback(None).exceptions[0]
    tasks.clear()
    try:
        raise failure
    finally:
        del failure
