"""The set-up step that gets Mooncake's system libraries without root."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3core.transfer.system_libraries import LIBRARIES, is_in_system, private_folder
from k3ctl import system_libraries


def run_step(folder: Path, path: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "K3_LIBRARY_PATH": str(folder), "PATH": path}
    return subprocess.run(
        [sys.executable, "-m", "k3ctl.system_libraries"],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


needs_bare_system = pytest.mark.skipif(is_in_system(), reason="the system has libibverbs")


@needs_bare_system
def test_without_a_package_manager_one_line_says_what_to_install(tmp_path: Path) -> None:
    done = run_step(tmp_path / "lib", path=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "libibverbs" in done.stderr


@needs_bare_system
def test_libraries_that_are_there_are_enough(tmp_path: Path) -> None:
    for name in LIBRARIES:
        (tmp_path / name).symlink_to((private_folder() / name).resolve())
    assert run_step(tmp_path, path=str(tmp_path)).returncode == 0


def test_a_package_that_cannot_be_had_leaves_no_half_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("apt-get", "dpkg"):
        (tools / name).write_text("#!/bin/sh\nexit 100\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    assert system_libraries.fetch(tmp_path / "lib") is False
    assert not (tmp_path / "lib").exists()
