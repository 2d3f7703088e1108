"""`k3 doctor` on this machine, and on one where something is wrong."""

import json
import socket
from pathlib import Path

import pytest

from k3ctl.main import main


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("K3_UP_FOLDER", str(tmp_path))


def findings(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["doctor", "--json"])
    return status, {one["what"]: one for one in json.loads(capsys.readouterr().out)}


def test_a_machine_that_runs_these_tests_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = findings(capsys)
    assert status == 0, found
    for what in ("nats-server", "mooncake_master", "redis", "libibverbs", "kernels", "memory"):
        assert found[what]["verdict"] == "ok"
    assert "is used: " in found["kernels"]["found"]


def test_a_fixed_port_that_is_taken_must_be_fixed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
        other.close()
        monkeypatch.setenv("K3_UP_NATS_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("K3_UP_REDIS_PORT", str(free))
        status, found = findings(capsys)
    assert status == 1
    assert found["K3_UP_NATS_PORT"]["verdict"] == "fix"
    assert "K3_UP_NATS_PORT=0" in found["K3_UP_NATS_PORT"]["advice"]
    assert found["K3_UP_REDIS_PORT"]["verdict"] == "ok"


def test_missing_programs_are_named_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3ctl.commands.doctor.find_program", lambda name: None)
    status = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    (line,) = [line for line in lines if "nats-server" in line]
    assert line.startswith("FIX")
    assert "make setup" in line
