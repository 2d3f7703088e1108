"""Spans as a collector gets them, over a real socket."""

import http.server
import threading
from collections.abc import Generator

import pytest

from k3wire.telemetry.tracing import Tracing

proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Says nothing."""


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> Generator[list[bytes], None, None]:
    Collector.bodies = []
    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    yield Collector.bodies
    server.shutdown()
    thread.join(timeout=5)
    server.server_close()


def test_a_collector_gets_parents_attributes_and_failures(bodies: list[bytes]) -> None:
    tracing = Tracing("prefill", "prefill-1", "", 1.0)
    with (
        tracing.span("outer", is_server=True) as outer,
        pytest.raises(ValueError, match="secret"),
        tracing.span("inner") as inner,
    ):
        inner.set_attribute("k3.num_items", 3)
        raise ValueError("secret")
    tracing.close()
    [resource] = [
        resource
        for body in bodies
        for resource in proto.ExportTraceServiceRequest.FromString(body).resource_spans
    ]
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("prefill", "prefill-1")
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert spans["inner"].parent_span_id == spans["outer"].span_id
    assert spans["outer"].span_id == outer.get_span_context().span_id.to_bytes(8, "big")
    noted = {each.key: each.value for each in spans["inner"].attributes}
    assert noted["k3.num_items"].int_value == 3
    assert noted["error.type"].string_value == "ValueError"
    assert (spans["inner"].status.code, spans["outer"].status.code) == (2, 0)
    assert b"secret" not in b"".join(bodies)
