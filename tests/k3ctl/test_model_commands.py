"""`k3 verify`, `k3 inspect` and `k3 make-checkpoint` as an operator meets them."""

import argparse
import json
from pathlib import Path

import pytest
from support.golden_model import MICRO_A
from support.shared_data import shared_path

from k3ctl.commands import inspect, make_checkpoint, verify

GOLDEN = str(MICRO_A / "golden.safetensors")


def k3(*arguments: str) -> int:
    """Run a command as the entry point does."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(required=True)
    for module in (verify, inspect, make_checkpoint):
        module.add_parser(subparsers)
    args = parser.parse_args(arguments)
    return args.run(args)


def test_verify_prints_a_table_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert k3("verify", str(MICRO_A), "--golden", GOLDEN, "--atol", "1e-4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["logits", "layer0.attn_out"]
    assert lines[-1].endswith("passed")


def test_verify_fails_past_the_tolerance_and_says_where(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("verify", str(MICRO_A), "--golden", GOLDEN, "--atol", "1e-9", "--json")
    assert k3(*arguments, "--mode", "absorbed", "--chunk", "40", "--decode-from", "80") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert {row["name"] for row in report["tensors"]} >= {"logits", "image0.embeds"}
    assert all(row["max_abs"] > 1e-9 for row in report["tensors"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "nowhere", "--golden", GOLDEN),
        ("verify", str(MICRO_A), "--golden", "nowhere.safetensors"),
        ("verify", str(MICRO_A), "--golden", GOLDEN, "--kernels", "nothing"),
        ("inspect", "nowhere"),
    ],
)
def test_what_cannot_run_says_why_on_standard_error(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert k3(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"k3 {arguments[0]}: ")


@pytest.mark.slow
def test_inspect_counts_the_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = shared_path("golden/official-config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert k3("inspect", str(tmp_path), "--tp", "8", "--row-dtype", "fp8", "--memory", "40") == 0
    out = capsys.readouterr().out
    # Source: K3 architecture sheet, sections 1.2, 3.1 and 6.
    for fact in (
        "69 KDA, 24 MLA",
        "2,779,931,837,184",
        "1,560,860,324,864",
        "497,220",
        "13,824 B a token",
        "56,171,520 B in all",
    ):
        assert fact in out, fact


def test_inspect_refuses_ranks_that_heads_do_not_divide_among() -> None:
    assert k3("inspect", str(MICRO_A), "--tp", "3") == 2


def test_a_made_checkpoint_has_every_file_and_can_be_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made"
    assert k3("make-checkpoint", "--out", str(out), "--seed", "4") == 0
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "preprocessor_config.json",
        "tiktoken.model",
        "tokenizer_config.json",
    } <= {path.name for path in out.iterdir()}
    assert k3("inspect", str(out), "--memory", "1") == 0
    assert "3 KDA, 2 MLA" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    num_ranks = len((out / "tiktoken.model").read_text().splitlines())
    assert config["text_config"]["vocab_size"] == num_ranks + 256


def test_a_made_checkpoint_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    assert k3("make-checkpoint", "--out", str(tmp_path)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
