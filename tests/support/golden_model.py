"""The small golden checkpoint, loaded once for the tests that need its numbers."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from k3core.config import ModelConfig
from k3core.kernels.registry import select_kernels
from k3core.model.plans import MlaForm
from k3core.model.text import TextModel
from k3core.weights.config_file import load_config
from k3core.weights.loading import LoadOptions, load_text_model

MICRO_A = Path(__file__).resolve().parents[1] / "data" / "micro-a"


@dataclass(frozen=True)
class Golden:
    """Inputs and results of the reference code, image rows already placed."""

    config: ModelConfig
    token_ids: torch.Tensor
    image_rows: torch.Tensor
    image_embeds: torch.Tensor
    logits: torch.Tensor
    recorded: dict[str, torch.Tensor]


@cache
def golden() -> Golden:
    """The recorded run of micro-a."""
    recorded = load_file(MICRO_A / "golden.safetensors")
    config = load_config(MICRO_A)
    ids = recorded["input_ids"]
    names = sorted(name for name in recorded if name.endswith(".embeds"))
    return Golden(
        config=config,
        token_ids=ids,
        image_rows=(ids == config.media_placeholder_token_id).nonzero().flatten(),
        image_embeds=torch.cat([recorded[name] for name in names]),
        logits=recorded["logits"],
        recorded=recorded,
    )


@cache
def micro_model(kernels: str = "auto", mla_form: MlaForm = "auto") -> TextModel:
    """The micro-a language model in float32 on the CPU."""
    device = torch.device("cpu")
    options = LoadOptions(device, torch.float32, mla_form)
    return load_text_model(MICRO_A, golden().config, select_kernels(device, kernels), options)
