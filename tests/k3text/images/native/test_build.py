"""Compiling the image steps: once per source, safe for many at once, refused with a reason."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k3text.images.native.build import NativeUnavailableError, build, folders
from k3text.images.native.steps import load, native_steps


def test_a_second_build_takes_the_first_ones_file(tmp_path: Path) -> None:
    first = build([tmp_path / "cache"])
    written = first.stat().st_mtime_ns
    assert build([tmp_path / "cache"]) == first
    assert first.stat().st_mtime_ns == written
    assert list(first.parent.iterdir()) == [first]


def test_builds_that_start_together_all_load(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(build, [[tmp_path]] * 3))
    (library,) = paths
    load(library)
    assert list(tmp_path.iterdir()) == [library]


def test_no_compiler_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match="no-such-cc"):
        build([tmp_path], ["no-such-cc"])


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] || { echo "cannot do this" >&2; exit 3; }\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(NativeUnavailableError, match="cannot do this"):
        build([tmp_path / "cache"], ["broken-cc"])
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_others_can_write_is_passed_over(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(NativeUnavailableError, match="other users"):
        build([shared])
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    library = build([shared, blocked / "cache", tmp_path / "own"])
    assert library.parent == tmp_path / "own"
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert list(shared.iterdir()) == []


def test_the_users_cache_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folders()[0] == tmp_path / "k3text" / "native"


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not an object")
    with pytest.raises(NativeUnavailableError, match="does not load"):
        load(broken)


def test_without_a_compiler_the_fallback_is_chosen_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    native_steps.cache_clear()
    try:
        assert native_steps() is None
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    finally:
        native_steps.cache_clear()
