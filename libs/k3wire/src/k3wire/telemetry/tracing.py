"""Traces across services: W3C context in call headers, about two spans a stage, none a token.

Spans go to an OTLP endpoint if `OTEL_EXPORTER_OTLP_ENDPOINT` is set and the exporter is installed,
and as JSON lines to one file a process if a folder is given; both may be on. With neither, spans
are not recorded at all. A thread writes them a few times a second, so that a request pays for
a span only what its fields cost.
"""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import msgspec
from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind

from k3wire.messages.base import StageReport
from k3wire.telemetry.spans import OurSpan, child_context, read_parent

logger = logging.getLogger(__name__)

EXPORT_INTERVAL_S = 0.2
MAX_WAITING_SPANS = 16384
"""Spans that may wait for the next export; past that new ones are lost, and counted."""

OTLP_TIMEOUT_S = 1.5
"""An export with its retries; spans that a collector does not take in time are lost."""

OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"

Export = Callable[[Sequence[OurSpan]], None]
"""Writes finished spans somewhere; called from one thread, and with none at the end."""


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
        self._ratio = ratio
        self._exports: list[Export] = []
        if folder:
            path = Path(folder) / f"{worker_id}.jsonl"
            self._exports.append(_JsonLines(path, service, worker_id))
        if os.environ.get(OTLP_VARIABLE):
            otlp = _otlp_export(service, worker_id)
            if otlp is not None:
                self._exports.append(otlp)
        self.is_recording = bool(self._exports)
        self._ended: deque[OurSpan] = deque()
        self._num_lost = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if self.is_recording:
            # Joined by `close`; a process that fails before that must not hang on it.
            self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
            self._thread.start()

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
        current = trace.get_current_span().get_span_context()
        parent = read_parent(headers) if headers is not None else None
        parent = parent or (current if current.is_valid else None)
        span = self._start(name, parent, SpanKind.SERVER if is_server else SpanKind.INTERNAL)
        token = context.attach(trace.set_span_in_context(span))
        try:
            yield span
        except Exception as error:
            span.record_exception(error)
            raise
        finally:
            context.detach(token)
            span.end()

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
        span = self._start(name, read_parent(headers), SpanKind.SERVER)
        # An empty context first: this task may have been made by that of another request.
        context.attach(trace.set_span_in_context(span, context.Context()))
        return span

    def _start(self, name: str, parent: SpanContext | None, kind: SpanKind) -> Span:
        own = child_context(parent, self._ratio)
        if not own.trace_flags.sampled:
            return NonRecordingSpan(own)
        return OurSpan(name, own, parent.span_id if parent else 0, kind, self._take)

    def _take(self, span: OurSpan) -> None:
        if len(self._ended) < MAX_WAITING_SPANS:
            self._ended.append(span)
        else:
            self._num_lost += 1

    def _run(self) -> None:
        while not self._stop.wait(EXPORT_INTERVAL_S):
            self._export()
        self._export()
        for export in self._exports:
            export(())

    def _export(self) -> None:
        # One by one: the loop may add to the queue meanwhile.
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        if not ended:
            return
        for export in self._exports:
            try:
                export(ended)
            except Exception:
                logger.exception("spans not written", extra={"num": len(ended)})

    def close(self) -> None:
        """Writes what is pending; blocks for a moment; safe twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._num_lost:
                logger.warning("spans lost", extra={"num": self._num_lost})


class _JsonLines:
    """Appends finished spans to a file, one JSON object a line."""

    def __init__(self, path: Path, service: str, worker_id: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._service = service
        self._worker_id = worker_id
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    def __call__(self, spans: Sequence[OurSpan]) -> None:
        """Writes spans; none closes the file."""
        if not spans:
            self._file.close()
            return
        self._file.write(self._encoder.encode_lines([self._record(span) for span in spans]))
        self._file.flush()

    def _record(self, span: OurSpan) -> dict[str, object]:
        """A span's record: ids in hexadecimal, times in Unix nanoseconds, attributes."""
        own = span.get_span_context()
        return {
            "trace_id": f"{own.trace_id:032x}",
            "span_id": f"{own.span_id:016x}",
            "parent_id": f"{span.parent_id:016x}" if span.parent_id else "",
            "name": span.name,
            "service": self._service,
            "worker_id": self._worker_id,
            "start_unix_ns": span.start_unix_ns,
            "end_unix_ns": span.end_unix_ns,
            "attributes": span.attributes,
            "is_error": span.is_error,
        }


def _otlp_export(service: str, worker_id: str) -> Export | None:
    try:
        # Optional: the `otlp` extra; importing it costs a tenth of a second that most do not need.
        from k3wire.telemetry.otlp import OtlpExport
    except ImportError:
        logger.warning("otlp exporter not installed", extra={"install": "k3wire[otlp]"})
        return None
    # The exporter's own ten seconds, twice over, would outlast a grace period at the end.
    return OtlpExport(service, worker_id, OTLP_TIMEOUT_S)


def note_report(span: Span, report: StageReport) -> None:
    """Puts a stage's report on its span, where `k3 trace` and every viewer find it."""
    if not span.is_recording():
        return
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
