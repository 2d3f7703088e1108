"""Choosing a backend: once, by what is there, said aloud, never in silence."""

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from k3core.kernels import cpu_native
from k3core.kernels.errors import BackendUnavailableError
from k3core.kernels.registry import reference_kernels, select_kernels

CPU = torch.device("cpu")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    """A machine without a compiler on its path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    cpu_native.native_library.cache_clear()
    yield
    cpu_native.native_library.cache_clear()


def test_a_compiler_gives_the_compiled_backend() -> None:
    chosen, plain = select_kernels(CPU), reference_kernels()
    assert chosen.name == "cpu-native"
    assert chosen.kda_prefill is not plain.kda_prefill
    assert chosen.experts is not plain.experts


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_numba_is_taken_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        chosen = select_kernels(CPU)
    assert chosen.name == "cpu-numba"
    assert chosen.experts is reference_kernels().experts
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert [record.__dict__["backend"] for record in warnings] == ["cpu-native"]
    assert "no C compiler" in warnings[0].__dict__["why"]


@pytest.mark.usefixtures("no_compiler")
def test_without_numba_either_torch_remains_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "k3core.kernels.kda.numba_ops", None)
    with caplog.at_level(logging.INFO):
        chosen = select_kernels(CPU)
    assert chosen.name == "reference"
    warned = [r.__dict__["backend"] for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == ["cpu-native", "cpu-numba"]


@pytest.mark.usefixtures("no_compiler")
def test_a_backend_asked_for_by_name_is_not_replaced() -> None:
    with pytest.raises(BackendUnavailableError, match="compiler"):
        select_kernels(CPU, "cpu-native")


def test_numba_can_be_asked_for_where_a_compiler_is() -> None:
    assert select_kernels(CPU, "cpu-numba").name == "cpu-numba"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(BackendUnavailableError, match="warp-drive"):
        select_kernels(CPU, "warp-drive")
