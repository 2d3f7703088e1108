"""Building the library: once per source, safe for many at once, refused with a reason."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k3core.kernels.errors import BackendUnavailableError
from k3core.kernels.native import build
from k3core.kernels.native.compiled import load_library

# Without optimisation the compiler takes a third of the time; what is built is not run.
QUICK = [("-O0",)]


def test_a_second_build_takes_the_first_ones_file(tmp_path: Path) -> None:
    toolchain = build.find_toolchain()
    first = build.build_library(tmp_path / "cache", toolchain, QUICK)
    written = first.stat().st_mtime_ns
    assert build.build_library(tmp_path / "cache", toolchain, QUICK) == first
    assert first.stat().st_mtime_ns == written
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_builds_that_start_together_all_load(tmp_path: Path) -> None:
    toolchain = build.find_toolchain()
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: build.build_library(tmp_path, toolchain, QUICK), range(3)))
    assert len(set(paths)) == 1
    assert load_library(paths[0]).get_threads() >= 1
    assert [path.name for path in tmp_path.iterdir()] == [paths[0].name]


def test_no_compiler_is_said_by_name() -> None:
    with pytest.raises(BackendUnavailableError, match="no-such-cc"):
        build.find_toolchain(["no-such-cc"])


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho 'cannot do this' >&2\nexit 3\n")
    compiler.chmod(0o755)
    toolchain = build.Toolchain(str(compiler), "broken 1.0")
    with pytest.raises(BackendUnavailableError, match="cannot do this"):
        build.build_library(tmp_path / "cache", toolchain)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "shared"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(BackendUnavailableError, match="other users"):
        build.build_library(cache, build.find_toolchain())


def test_an_unusable_folder_gives_way_to_the_next(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    chosen = build.usable_cache_dir([blocked / "cache", tmp_path / "second"])
    assert chosen == tmp_path / "second"
    assert chosen.stat().st_mode & 0o777 == 0o700


def test_a_chosen_folder_has_no_substitute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("K3_KERNEL_CACHE", str(tmp_path))
    assert build.cache_dirs() == (tmp_path,)
    monkeypatch.delenv("K3_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dirs()[0] == tmp_path / "k3core" / "kernels"


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "k3.so"
    broken.write_bytes(b"not an object")
    with pytest.raises(BackendUnavailableError, match="do not load"):
        load_library(broken)


def test_loading_leaves_small_numbers_alone() -> None:
    """A library linked with -ffast-math would flush denormals for the whole thread."""
    script = (
        "from k3core.kernels.cpu_native import native_library\n"
        "native_library()\n"
        "assert 1e-310 * 0.5 != 0.0\n"
        "import torch\n"
        "assert (torch.tensor([1e-40]) * 0.5).item() != 0.0\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
