"""What a stack consists of."""

from dataclasses import replace
from pathlib import Path

import pytest

from k3ctl.checkpoints import SHIPPED_FOLDER
from k3ctl.commands.up import parse_workers
from k3ctl.stack.plan import SERVICES, Endpoints, StackPlan
from k3ctl.stack.settings import UpSettings

ENDPOINTS = Endpoints("nats://127.0.0.1:1", "redis://127.0.0.1:2/0", "127.0.0.1:3")


def plan(tmp_path: Path, environment: dict[str, str] | None = None, **rest: object) -> StackPlan:
    fields = {"folder": tmp_path, "checkpoint": tmp_path / "k3-nano", "settings": UpSettings()}
    return StackPlan(**fields, environment=environment or {}, **rest)  # type: ignore[arg-type]


def test_every_role_runs_once_and_counts_multiply_them(tmp_path: Path) -> None:
    assert sorted(role for _, role in plan(tmp_path).workers()) == sorted(SERVICES)
    names = [name for name, _ in plan(tmp_path, num_workers={"decode": 3}).workers()]
    assert len(names) == len(set(names)) == len(SERVICES) + 2
    assert {"decode-0", "decode-1", "decode-2"} < set(names)


def test_the_demo_checkpoint_gets_short_units_unless_told_otherwise(tmp_path: Path) -> None:
    units = ("K3_PREFILL_UNIT", "K3_DECODE_UNIT")
    shipped = replace(plan(tmp_path), checkpoint=SHIPPED_FOLDER)
    assert [shipped.worker_environment(ENDPOINTS)[name] for name in units] == ["32", "32"]
    told = replace(shipped, environment=dict.fromkeys(units, "64"))
    assert [told.worker_environment(ENDPOINTS)[name] for name in units] == ["64", "64"]
    assert not set(units) & set(plan(tmp_path).worker_environment(ENDPOINTS))


def test_only_leaves_the_others_out(tmp_path: Path) -> None:
    only = plan(tmp_path, only=("decode", "gateway"), num_workers={"decode": 2, "prefill": 9})
    assert sorted(name for name, _ in only.workers()) == ["decode-0", "decode-1", "gateway-0"]


def test_workers_are_told_where_things_are_and_nothing_that_is_not_theirs(tmp_path: Path) -> None:
    environment = {
        "PATH": "/bin", "K3_API_KEY": "secret", "K3_UP_NATS_PORT": "7", "K3_NATS_URL": "nats://x",
        "K3_TRACE_DIR": "/traces", "LD_LIBRARY_PATH": "/first",
    }  # fmt: skip
    told = plan(tmp_path, environment).worker_environment(ENDPOINTS)
    assert told["K3_NATS_URL"] == ENDPOINTS.nats_url
    assert told["K3_TRACE_DIR"] == "/traces"
    assert told["PATH"] == "/bin"
    assert told["LD_LIBRARY_PATH"].startswith("/first:")
    assert not {"K3_API_KEY", "K3_UP_NATS_PORT"} & set(told)


def test_a_gateways_free_port_is_drawn_once_and_a_fixed_one_is_kept(tmp_path: Path) -> None:
    drawn = plan(tmp_path).worker_environment(ENDPOINTS)["K3_GATEWAY_PORT"]
    assert 0 < int(drawn) < 65536
    fixed = plan(tmp_path, {"K3_GATEWAY_PORT": "8123"}).worker_environment(ENDPOINTS)
    assert fixed["K3_GATEWAY_PORT"] == "8123"


@pytest.mark.parametrize("text", ["decode", "decode=0", "decode=-1", "gateway=2", "cook=1", "=1"])
def test_a_count_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ROLE=N"):
        parse_workers([text])


def test_counts_are_read() -> None:
    assert parse_workers(["decode=2", "prefill=1", "decode=3"]) == {"decode": 3, "prefill": 1}
