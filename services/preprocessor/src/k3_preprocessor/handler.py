"""Answers preprocess calls: patches of one image, from tier L2 or made now, into the encoder.

A request enters with the image's slot and a destination; a reply leaves after the patches lie
there. Always true: patches written belong to the feature key asked for, under this processor's
version and rules; one image is made once, however many ask; a cancelled request leaves no queued
work behind, unless another request waits for the same image.
"""

import asyncio
import time
from dataclasses import dataclass

from opentelemetry import trace

from k3_preprocessor.delivery import Delivery, float_bytes
from k3_preprocessor.patch_tier import Patches, PatchTier
from k3_preprocessor.refusals import Refusals
from k3_preprocessor.sources import ByteSource
from k3text.images.config import ProcessorConfig
from k3text.images.geometry import plan
from k3text.images.keys import feature_key
from k3text.images.patchify import CHANNELS
from k3text.images.sandbox import CutImage, Sandbox
from k3wire.blobs.single_flight import SingleFlight
from k3wire.costs import CostFit
from k3wire.errors import Cancelled, ImageError, InternalError, K3Error
from k3wire.messages.base import Outcome, StageReport
from k3wire.messages.control import Cancel, WorkerLoad
from k3wire.messages.preprocess import PreprocessReply, PreprocessRequest
from k3wire.telemetry import metrics
from k3wire.telemetry.tracing import note_report

DOUBTS = (0.01, 0.0)
"""Against the cost of an image whatever its size, and of its pixels."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a preprocessor is made of.

    Attributes:
        worker_id: for reports.
        config: the checkpoint's rules and the version of the code.
        sandbox: started.
        source: of encoded bytes.
        tier: L2.
        delivery: to encoders.
    """

    worker_id: str
    config: ProcessorConfig
    sandbox: Sandbox
    source: ByteSource
    tier: PatchTier
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class _Made:
    """Patches as one flight got them; times are nanoseconds."""

    patches: Patches
    outcome: Outcome
    detail: str
    wait_ns: int = 0
    deeper_ns: int = 0
    reports: tuple[StageReport, ...] = ()


class PreprocessHandler:
    """The calls under way."""

    def __init__(self, parts: Parts) -> None:
        """Starts idle."""
        self._parts = parts
        self._flights: SingleFlight[bytes, _Made] = SingleFlight()
        self._refusals = Refusals()
        self._scopes: dict[str, set[asyncio.Timeout]] = {}
        self._costs = CostFit(DOUBTS)

    def load(self, rss_bytes: int) -> WorkerLoad:
        """How busy the process is, for heartbeats."""
        return WorkerLoad(
            num_running=self._parts.sandbox.num_running,
            num_waiting=self._parts.sandbox.num_waiting,
            rss_bytes=rss_bytes,
        )

    @property
    def num_requests(self) -> int:
        """Calls under way."""
        return sum(map(len, self._scopes.values()))

    def cancel(self, message: Cancel) -> None:
        """Ends every call of a request; unknown ones are fine."""
        now_s = asyncio.get_running_loop().time()
        for scope in self._scopes.get(message.request_id, ()):
            if not scope.expired():
                scope.reschedule(now_s)

    async def preprocess(self, request: PreprocessRequest) -> PreprocessReply:
        """Puts the patches of one image where the request says.

        Raises:
            ImageError: the image cannot be used; names the request's part.
            InternalError: the encoder and this process would make different patches.
            BlobLost: nobody has the image's bytes any more.
            SlowDown: too many images wait.
            TierUnavailable: the encoder did not take the patches.
            Cancelled: the request was cancelled.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                scopes = self._scopes.setdefault(request.request_id, set())
                scopes.add(scope)
                try:
                    return await self._answer(request)
                finally:
                    scopes.discard(scope)
                    if not scopes:
                        self._scopes.pop(request.request_id, None)
        except TimeoutError as error:
            assert scope.expired(), "only a cancel ends the scope"
            raise Cancelled("The request was cancelled") from error
        except ImageError as error:
            raise type(error)(error.message, param=request.slot.param or None) from error

    async def _answer(self, request: PreprocessRequest) -> PreprocessReply:
        start_unix_ns, start_ns = time.time_ns(), time.perf_counter_ns()
        shape = self._check(request)
        made = await self._get(request, shape)
        got_ns = time.perf_counter_ns() - start_ns
        checksum = await self._parts.delivery.deliver(made.patches.pixels, request.destination)
        own_ns = time.perf_counter_ns() - start_ns - made.deeper_ns - made.wait_ns
        is_hit = made.outcome == "hit"
        report = StageReport(
            stage="preprocessor",
            tier="L2",
            outcome=made.outcome,
            worker_id=self._parts.worker_id,
            start_unix_ns=start_unix_ns,
            duration_ns=max(0, own_ns),
            wait_ns=made.wait_ns,
            saved_ns=self._saved_ns(request, made, got_ns),
            size_bytes=float_bytes(shape),
            num_hits=int(is_hit),
            detail=made.detail,
        )
        _publish(report)
        return PreprocessReply(
            grid_thw=request.slot.grid_thw,
            size_bytes=float_bytes(shape),
            checksum=checksum,
            reports=(report, *made.reports),
        )

    def _check(self, request: PreprocessRequest) -> tuple[int, int, int, int]:
        """Refuses a request whose sender works by other rules; gives the patches' shape."""
        config, slot = self._parts.config, request.slot
        if request.processor_version != config.version:
            raise InternalError(
                f"The encoder's image processor is {request.processor_version!r}, the "
                f"preprocessor's is {config.version!r}; run one release of both"
            )
        if slot.feature_key != feature_key(slot.image.content_key, config):
            raise InternalError(
                "The gateway's image rules differ from the preprocessor's; serve one checkpoint"
            )
        geometry = plan(max(1, slot.image.width), max(1, slot.image.height), config)
        if slot.grid_thw != geometry.grid_thw:
            raise InternalError(
                f"The image's grid is {geometry.grid_thw}, not {slot.grid_thw} as asked for"
            )
        _, rows, columns = geometry.grid_thw
        shape = (rows * columns, CHANNELS, config.patch_size, config.patch_size)
        if request.destination.size_bytes < float_bytes(shape):
            raise InternalError("The image's patches do not fit the encoder's buffer")
        return shape

    async def _get(self, request: PreprocessRequest, shape: tuple[int, int, int, int]) -> _Made:
        key = request.slot.feature_key
        while True:
            local = self._parts.tier.find_local(key)
            if local is not None:
                return _Made(local, "hit", "local")
            is_joining = self._flights.is_flying(key)
            try:
                made = await self._flights.run(key, lambda: self._make(request, shape))
            except ImageError:
                raise
            except K3Error:
                # The first asker may have had less time or a source that is gone; this one tries
                # again by itself.
                if not is_joining:
                    raise
                continue
            if is_joining and made.outcome == "miss":
                return _Made(made.patches, "hit", "joined")
            return made

    async def _make(self, request: PreprocessRequest, shape: tuple[int, int, int, int]) -> _Made:
        """Gets patches from the shared store, or makes and keeps them."""
        parts, slot = self._parts, request.slot
        shared = await parts.tier.find_shared(slot.feature_key, shape)
        if shared is not None:
            return _Made(shared, "hit", "shared")
        self._refusals.check(slot.image.content_key)
        asked_ns = time.perf_counter_ns()
        found = await parts.source.read(request.request_id, slot.image, request.deadline_unix_ns)
        deeper_ns = time.perf_counter_ns() - asked_ns if found.reports else 0
        cut = await self._cut(slot.image.content_key, found.data)
        if cut.patched.grid_thw != slot.grid_thw:
            raise InternalError(
                f"The image's grid is {cut.patched.grid_thw}, not {slot.grid_thw} as asked for"
            )
        num_pixels = cut.patched.width * cut.patched.height
        self._costs.learn((1, num_pixels), max(1, cut.work_ns) / 1e9)
        patches = Patches(cut.patched.pixels)
        parts.tier.keep(slot.feature_key, patches)
        return _Made(patches, "miss", "", cut.wait_ns, deeper_ns, found.reports)

    async def _cut(self, content_key: bytes, data: bytes) -> CutImage:
        try:
            return await self._parts.sandbox.cut(data)
        except ImageError as error:
            self._refusals.note(content_key, error)
            raise

    def _saved_ns(self, request: PreprocessRequest, made: _Made, got_ns: int) -> int:
        """What a hit saved, by the cost of the images that were made here."""
        if made.outcome != "hit":
            return 0
        image = request.slot.image
        expected_ns = int(1e9 * self._costs.predict_s((1, image.width * image.height)))
        # Who joined another request's work still waited for what was left of it.
        return max(0, expected_ns - got_ns) if made.detail == "joined" else expected_ns


def _publish(report: StageReport) -> None:
    note_report(trace.get_current_span(), report)
    metrics.TIER_LOOKUPS.labels(report.tier, report.outcome).inc()
    metrics.TIER_SAVED.labels(report.tier).inc(report.saved_ns / 1e9)
    metrics.STAGE_DURATION.labels(report.stage).observe(report.duration_ns / 1e9)
