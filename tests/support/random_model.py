"""Random models of any layer pattern, in the sizes of micro-a."""

from dataclasses import replace
from pathlib import Path

import torch
from support.golden_model import golden

from k3core.config import Attention, ModelConfig, TextConfig
from k3core.kernels.registry import reference_kernels
from k3core.model.initialise import initialise
from k3core.model.text import TextModel
from k3core.weights.config_file import load_config
from k3core.weights.loading import allocate
from k3core.weights.saving import save_checkpoint, training_config


def base() -> TextConfig:
    return golden().config.text


def layers(kinds: str, dense: int = 1) -> TextConfig:
    """The base model with layers K (KDA) and M (MLA), the first `dense` of them dense."""
    names: dict[str, Attention] = {"K": "kda", "M": "mla"}
    attention = tuple(names[kind] for kind in kinds)
    is_moe = tuple(index >= dense for index in range(len(kinds)))
    return replace(
        base(),
        num_layers=len(kinds),
        attention=attention,
        is_moe=is_moe,
        kda=base().kda if "K" in kinds else None,
        mla=base().mla if "M" in kinds else None,
        moe=base().moe if any(is_moe) else None,
    )


def write_model(directory: Path, text: TextConfig) -> ModelConfig:
    """A random checkpoint of this shape, written and read back."""
    with torch.device("meta"):
        model = TextModel(training_config(text), reference_kernels())
    allocate(model, torch.device("cpu"), torch.float32)
    initialise(model, seed=1)
    config = replace(golden().config, text=text, vision=None)
    save_checkpoint(directory, config, model, None)
    return load_config(directory)
