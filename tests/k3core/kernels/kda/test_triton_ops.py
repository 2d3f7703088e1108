"""The Triton kernels: in the interpreter everywhere, compiled where a GPU is."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3core.kernels.errors import BackendUnavailableError
from k3core.kernels.registry import select_kernels

SCRIPT = Path(__file__).with_name("triton_in_interpreter.py")
TESTS = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.mark.slow
def test_kernels_meet_the_float64_loop_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_the_backend_says_so() -> None:
    with pytest.raises(BackendUnavailableError, match="no CUDA device"):
        select_kernels(torch.device("cuda"), "cuda-triton")
