"""`k3 trace` over files as the services write them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from k3ctl.main import main
from k3wire.telemetry.ledger import Ledger, LedgerLine

LINE = LedgerLine(
    stage="prefill", tier="L4", outcome="partial", spent_ms=4.0, wait_ms=0.0, saved_ms=77.5,
    num_items=400, num_hits=384, start_ms=2.0, detail="local",
)  # fmt: skip
LEDGER = Ledger(clock_ms=10.0, saved_ms=77.5, lines=(LINE,))


def span(name: str, span_id: str, parent_id: str, start_ms: int, end_ms: int, **rest: Any) -> Any:
    return {
        "trace_id": rest.pop("trace_id", "t1"), "span_id": span_id, "parent_id": parent_id,
        "name": name, "service": "s", "worker_id": "w", "start_unix_ns": start_ms * 10**6,
        "end_unix_ns": end_ms * 10**6, "attributes": rest, "is_error": False,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    first = {"k3.request_id": "req-1", "k3.ledger": msgspec.json.encode(LEDGER).decode()}
    second = {"k3.request_id": "req-2", "error.type": "slow_down"}
    files = {
        "gateway": [
            span("gateway chat", "a", "", 100, 120, **first),
            span("gateway chat", "z", "", 300, 301, trace_id="t2", **second),
        ],
        "prefill": [
            span("prefill run", "c", "b", 104, 118, **{"k3.tier": "L4", "k3.outcome": "partial"}),
            span("prefill call", "b", "a", 102, 103),
        ],
        "decode": [span("decode commit", "e", "lost", 119, 120)],
    }
    for name, spans in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(s) + "\n" for s in spans))
    with (tmp_path / "decode.jsonl").open("a") as half:
        half.write('{"trace_id": "t1", "na')
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["trace", *arguments])
    return status, capsys.readouterr().out


def test_a_request_is_drawn_with_its_ledger_and_every_span_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run(capsys, "req-1", "--folder", str(folder))
    assert status == 0
    rows = text.splitlines()
    for name in ("gateway chat", "  prefill call", "    prefill run", "  decode commit"):
        assert [row for row in rows if row.startswith(f"{name} ")], name
    assert "384/400" in text
    assert "77.5" in text
    bars = [row.partition("|")[2].partition("|")[0] for row in rows if row.startswith("  ")]
    assert all("#" in bar for bar in bars)
    assert len({len(bar) for bar in bars}) == 1


def test_the_latest_request_is_the_default_and_shows_its_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run(capsys, "--folder", str(folder))
    assert status == 0
    assert "req-2" in text
    assert "slow_down" in text
    assert "prefill" not in text


def test_requests_are_listed_oldest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run(capsys, "--list", "--folder", str(folder))
    assert [line.split()[0] for line in text.splitlines()] == ["req-1", "req-2"]


def test_the_json_form_is_the_spans_of_that_request(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = run(capsys, "req-1", "--json", "--folder", str(folder))
    assert {json.loads(line)["span_id"] for line in text.splitlines()} == {"a", "b", "c", "e"}


def test_an_unknown_request_is_said_to_be_unknown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "req-9", "--folder", str(folder)]) == 1
    assert "req-9" in capsys.readouterr().err
