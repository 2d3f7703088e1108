"""Traces across services: W3C context in call headers, about two spans a stage, none a token.

Spans go to an OTLP endpoint if `OTEL_EXPORTER_OTLP_ENDPOINT` is set and the exporter is installed,
and as JSON lines to one file a process if a folder is given; both may be on. With neither, spans
are not recorded at all.
"""

import contextlib
import logging
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import msgspec
from opentelemetry import context, propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind

from k3wire.messages.base import StageReport

logger = logging.getLogger(__name__)

TRACER_NAME = "k3"
EXPORT_INTERVAL_MS = 200
OTLP_TIMEOUT_S = 1.5
"""An export with its retries; spans that a collector does not take in time are lost."""

OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


class JsonLinesExporter(SpanExporter):
    """Appends finished spans to a file, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        """Opens the file for appending; the folder is made if missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes spans; called from the processor's thread."""
        for span in spans:
            self._file.write(msgspec.json.encode(span_record(span)) + b"\n")
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Closes the file."""
        self._file.close()


def span_record(span: ReadableSpan) -> dict[str, object]:
    """Gives a span's record: ids in hexadecimal, times in Unix nanoseconds, attributes."""
    own = span.context
    assert own is not None
    return {
        "trace_id": f"{own.trace_id:032x}",
        "span_id": f"{own.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "name": span.name,
        "service": str(span.resource.attributes.get("service.name", "")),
        "worker_id": str(span.resource.attributes.get("service.instance.id", "")),
        "start_unix_ns": span.start_time or 0,
        "end_unix_ns": span.end_time or 0,
        "attributes": dict(span.attributes or {}),
        "is_error": not span.status.is_ok and span.status.status_code.name == "ERROR",
    }


class Tracing:
    """The tracer of this process, and its orderly end."""

    def __init__(self, service: str, worker_id: str, folder: str, ratio: float) -> None:
        """Sets up what the settings ask for.

        Args:
            service: role of the process.
            worker_id: which process.
            folder: for JSON lines, "" for none.
            ratio: share of traces that are recorded, decided where a trace begins.
        """
        names = {"service.name": service, "service.instance.id": worker_id}
        sampler = ParentBased(TraceIdRatioBased(ratio))
        self._provider = TracerProvider(resource=Resource(names), sampler=sampler)
        exporters: list[SpanExporter] = []
        if folder:
            exporters.append(JsonLinesExporter(Path(folder) / f"{worker_id}.jsonl"))
        if os.environ.get(OTLP_VARIABLE):
            otlp = _otlp_exporter()
            if otlp is not None:
                exporters.append(otlp)
        self.is_recording = bool(exporters)
        for exporter in exporters:
            self._provider.add_span_processor(
                BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_INTERVAL_MS)
            )
        self._tracer = self._provider.get_tracer(TRACER_NAME)

    @contextlib.contextmanager
    def span(
        self, name: str, headers: Mapping[str, str] | None = None, *, is_server: bool = False
    ) -> Generator[Span, None, None]:
        """Runs a block inside a span, the child of the caller's if headers carry one.

        Args:
            name: constant, never from a request.
            headers: of the call that is being answered, or None inside a process.
            is_server: the span answers a call.
        """
        if not self.is_recording:
            yield trace.INVALID_SPAN
            return
        token = context.attach(propagate.extract(dict(headers))) if headers is not None else None
        kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
        try:
            with self._tracer.start_as_current_span(name, kind=kind) as span:
                yield span
        finally:
            if token is not None:
                context.detach(token)

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        """Starts a span that may end in another task than it began in; the caller ends it.

        It is current for the rest of this task and the tasks made from here on, so it is for tasks
        that serve one request.

        Args:
            name: constant, never from a request.
            headers: of the request; the span is the child of the caller's if they carry one.
        """
        if not self.is_recording:
            return trace.INVALID_SPAN
        # An empty context first: this task may have been made by that of another request.
        parent = propagate.extract(headers, context=context.Context())
        span = self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER)
        context.attach(trace.set_span_in_context(span, parent))
        return span

    def close(self) -> None:
        """Writes what is pending; blocks for a moment; safe twice."""
        self._provider.shutdown()


def _otlp_exporter() -> SpanExporter | None:
    try:
        # Optional: the `otlp` extra; importing it costs a tenth of a second that most do not need.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        logger.warning("otlp exporter not installed", extra={"install": "k3wire[otlp]"})
        return None
    # The exporter's own ten seconds, twice over, would outlast a grace period at the end.
    return OTLPSpanExporter(timeout=OTLP_TIMEOUT_S)


def note_report(span: Span, report: StageReport) -> None:
    """Puts a stage's report on its span, where `k3 trace` and every viewer find it."""
    span.set_attributes(
        {
            "k3.stage": report.stage,
            "k3.tier": report.tier,
            "k3.outcome": report.outcome,
            "k3.duration_ms": report.duration_ns / 1e6,
            "k3.wait_ms": report.wait_ns / 1e6,
            "k3.saved_ms": report.saved_ns / 1e6,
            "k3.size_bytes": report.size_bytes,
            "k3.num_items": report.num_items,
            "k3.num_hits": report.num_hits,
            "k3.detail": report.detail,
        }
    )
