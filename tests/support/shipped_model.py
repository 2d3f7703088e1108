"""The shipped demo checkpoint's language model, loaded once for the tests that run it bare."""

from functools import cache
from pathlib import Path

import torch

from k3core.kernels.registry import select_kernels
from k3core.model.text import TextModel
from k3core.weights.config_file import load_config
from k3core.weights.loading import LoadOptions, load_text_model

NANO = Path(__file__).resolve().parents[2] / "checkpoints" / "k3-nano"


@cache
def nano_model() -> TextModel:
    """k3-nano's language model in float32 on the CPU."""
    device = torch.device("cpu")
    options = LoadOptions(device, torch.float32)
    return load_text_model(NANO, load_config(NANO), select_kernels(device), options)
