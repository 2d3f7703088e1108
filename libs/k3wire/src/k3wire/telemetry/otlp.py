"""Spans to a collector, by OpenTelemetry's own exporter; needs the `otlp` extra."""

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext
from opentelemetry.trace.status import Status, StatusCode

from k3wire.telemetry.spans import SAMPLED, OurSpan

SCOPE = InstrumentationScope("k3")


class OtlpExport:
    """Sends finished spans."""

    def __init__(self, service: str, worker_id: str, timeout_s: float) -> None:
        """Prepares; nothing is connected yet.

        Args:
            service: role of the process.
            worker_id: which process.
            timeout_s: of one export with its retries.
        """
        names = {"service.name": service, "service.instance.id": worker_id}
        self._resource = Resource.create(names)
        self._exporter = OTLPSpanExporter(timeout=timeout_s)

    def __call__(self, spans: Sequence[OurSpan]) -> None:
        """Sends spans; none ends it. What the collector does not take in time is lost."""
        if spans:
            self._exporter.export([self._readable(span) for span in spans])
        else:
            self._exporter.shutdown()

    def _readable(self, span: OurSpan) -> ReadableSpan:
        own = span.get_span_context()
        parent = None
        if span.parent_id:
            parent = SpanContext(own.trace_id, span.parent_id, is_remote=True, trace_flags=SAMPLED)
        return ReadableSpan(
            name=span.name,
            context=own,
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            kind=span.kind,
            instrumentation_scope=SCOPE,
            status=Status(StatusCode.ERROR if span.is_error else StatusCode.UNSET),
            start_time=span.start_unix_ns,
            end_time=span.end_unix_ns,
        )
