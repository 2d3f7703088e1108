"""Spans of one process, read back from its JSON-lines file."""

import asyncio
import json
import logging
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import propagate
from opentelemetry.trace import Span

from k3wire.telemetry.tracing import Tracing


@pytest.fixture
def tracing(tmp_path: Path) -> Generator[Tracing, None, None]:
    tracing = Tracing("gateway", "gateway-1", str(tmp_path), 1.0)
    yield tracing
    tracing.close()


def spans(tracing: Tracing, folder: Path) -> dict[str, dict[str, Any]]:
    tracing.close()
    lines = (folder / "gateway-1.jsonl").read_text().splitlines()
    return {span["name"]: span for span in map(json.loads, lines)}


async def test_a_span_may_end_in_another_task_than_it_began_in(
    tracing: Tracing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def end(span: Span) -> None:
        span.end()

    async def serve() -> None:
        span = tracing.begin("request", {})
        with tracing.span("work"):
            pass
        await asyncio.get_running_loop().create_task(end(span))

    with caplog.at_level(logging.WARNING):
        await asyncio.get_running_loop().create_task(serve())
    assert caplog.records == []
    found = spans(tracing, tmp_path)
    assert found["work"]["parent_id"] == found["request"]["span_id"]
    assert found["request"]["parent_id"] == ""


async def test_a_request_served_by_a_task_of_another_request_begins_its_own_trace(
    tracing: Tracing, tmp_path: Path
) -> None:
    async def second() -> None:
        tracing.begin("second", {}).end()

    async def first() -> None:
        span = tracing.begin("first", {})
        await asyncio.get_running_loop().create_task(second())
        span.end()

    await asyncio.get_running_loop().create_task(first())
    found = spans(tracing, tmp_path)
    assert found["first"]["trace_id"] != found["second"]["trace_id"]
    assert found["second"]["parent_id"] == ""


async def test_a_callers_trace_is_continued_and_passed_on(tracing: Tracing, tmp_path: Path) -> None:
    given = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    passed_on: dict[str, str] = {}

    async def serve() -> None:
        span = tracing.begin("request", given)
        propagate.inject(passed_on)
        span.end()

    await asyncio.get_running_loop().create_task(serve())
    found = spans(tracing, tmp_path)["request"]
    assert (found["trace_id"], found["parent_id"]) == ("a" * 32, "b" * 16)
    assert passed_on["traceparent"] == f"00-{'a' * 32}-{found['span_id']}-01"


def test_without_a_folder_nothing_is_recorded() -> None:
    tracing = Tracing("gateway", "gateway-1", "", 1.0)
    span = tracing.begin("request", {})
    assert not span.is_recording()
    span.end()
    tracing.close()


def test_a_collector_that_is_away_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracing = Tracing("gateway", "gateway-1", str(tmp_path), 1.0)
    with tracing.span("work"):
        pass
    closing = threading.Thread(target=tracing.close, daemon=True)
    closing.start()
    closing.join(timeout=8)
    assert not closing.is_alive()
    assert "work" in (tmp_path / "gateway-1.jsonl").read_text()
