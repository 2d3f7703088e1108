"""A span of ours: what a trace needs and nothing more, because every request pays for it.

OpenTelemetry's own span costs almost five times as much, mostly for limits, events and links that are
not used here. This one is of its API, so propagators and whoever asks for the current span find
it; `otlp` turns it into the SDK's form for a collector.
"""

import random
import re
import time
from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.types import Attributes, AttributeValue

MASK_64 = 2**64 - 1

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
UNSAMPLED = TraceFlags(TraceFlags.DEFAULT)


# A subclass, because the API tells spans from other things by their class.
class OurSpan(trace.Span):
    """One span that is recorded.

    Attributes:
        name: constant, never from a request.
        parent_id: 0 for a root.
        kind: server or internal.
        start_unix_ns: wall clock.
        end_unix_ns: likewise; 0 while it runs.
        attributes: what was noted.
        is_error: the block raised.
    """

    __slots__ = (
        "_context", "_on_end", "attributes", "end_unix_ns", "is_error", "kind", "name",
        "parent_id", "start_unix_ns",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent_id: int,
        kind: SpanKind,
        on_end: "Callable[[OurSpan], None]",
    ) -> None:
        """Starts it."""
        self.name = name
        self.parent_id = parent_id
        self.kind = kind
        self.start_unix_ns = time.time_ns()
        self.end_unix_ns = 0
        self.attributes: dict[str, AttributeValue] = {}
        self.is_error = False
        self._context = context
        self._on_end = on_end

    def end(self, end_time: int | None = None) -> None:
        """Ends it and hands it to its recorder; safe twice."""
        if not self.end_unix_ns:
            self.end_unix_ns = end_time or time.time_ns()
            self._on_end(self)

    def get_span_context(self) -> SpanContext:
        """Its ids."""
        return self._context

    def is_recording(self) -> bool:
        """Whether attributes still count."""
        return not self.end_unix_ns

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Notes one thing."""
        self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Notes several things."""
        self.attributes.update(attributes)

    def update_name(self, name: str) -> None:
        """Renames it."""
        self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Notes whether it failed."""
        code = status.status_code if isinstance(status, Status) else status
        self.is_error = code is StatusCode.ERROR

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Notes the exception's type; its text may hold what a user wrote."""
        self.is_error = True
        self.attributes.setdefault("error.type", type(exception).__name__)

    def add_event(
        self, name: str, attributes: Attributes = None, timestamp: int | None = None
    ) -> None:
        """Notes nothing: there are no events in our traces."""


def read_parent(headers: Mapping[str, str]) -> SpanContext | None:
    """Reads the caller's span from a `traceparent` header; None if there is none of use.

    Source: W3C Trace Context, section 3.2.
    """
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
    if found is None:
        return None
    version, trace_text, span_text, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest):
        return None
    context = SpanContext(
        int(trace_text, 16),
        int(span_text, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
    )
    return context if context.is_valid else None


def write_parent(context: SpanContext) -> str:
    """Gives the `traceparent` header of a span."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def child_context(parent: SpanContext | None, ratio: float) -> SpanContext:
    """Makes the ids of a new span.

    Args:
        parent: whose child it is; its decision to be recorded is inherited.
        ratio: share of traces that are recorded; decided by the low 64 bits of the trace's id, as
            OpenTelemetry does, so that processes agree.
    """
    span_id = random.getrandbits(64) or 1
    if parent is not None:
        is_sampled = bool(parent.trace_flags & TraceFlags.SAMPLED)
        trace_id, state = parent.trace_id, parent.trace_state
    else:
        trace_id, state = random.getrandbits(128) or 1, None
        is_sampled = (trace_id & MASK_64) < ratio * 2**64
    flags = SAMPLED if is_sampled else UNSAMPLED
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags, trace_state=state)
