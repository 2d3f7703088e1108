"""A training state written as a checkpoint in the released layout."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from k3core.kernels.mxfp4.reference import dequantise, quantise
from k3core.kernels.registry import reference_kernels
from k3core.model.text import TextModel
from k3core.model.vision import VisionModel
from k3core.weights.loading import allocate
from k3core.weights.saving import save_checkpoint, training_config
from k3ctl.commands.make_checkpoint import token_files
from k3text.images.config import FILE_NAME as PROCESSOR_FILE
from k3text.tokenizer import VOCABULARY_FILE
from train_nano.model import NUM_RANKS, Nano, build_nano, nano_config

STATE_FILE = "state.pt"


@dataclass(frozen=True, slots=True)
class State:
    """What a training run wrote last.

    Attributes:
        weights: by name, experts unrounded.
        num_steps: taken.
        minutes: trained.
    """

    weights: dict[str, torch.Tensor]
    num_steps: int
    minutes: float


def read_state(folder: Path) -> State:
    """Reads a run's folder.

    Raises:
        FileNotFoundError: nothing was saved yet.
    """
    state = torch.load(folder / STATE_FILE, weights_only=True)
    return State(state["weights"], state["num_steps"], state["minutes"])


def trained_nano(folder: Path) -> Nano:
    """The modules of a run, float32, with experts rounded as the checkpoint packs them."""
    state = read_state(folder)
    nano = build_nano()
    moe = nano.config.text.moe
    assert moe is not None, "nano has experts"
    assert moe.mxfp4_group is not None, "nano's experts are packed"
    for name, parameter in nano.named_parameters().items():
        weight = state.weights[name]
        if name.endswith((".w13", ".w2")):
            weight = dequantise(*quantise(weight, moe.mxfp4_group), moe.mxfp4_group, torch.float32)
        parameter.data.copy_(weight)
    return nano


def export(folder: Path, out: Path) -> None:
    """Writes weights, configs, vocabulary and image rules of a run to a directory."""
    out.mkdir(parents=True, exist_ok=True)
    config = nano_config()
    trained = trained_nano(folder)
    with torch.device("meta"):
        text = TextModel(training_config(config.text), reference_kernels())
        assert config.vision is not None, "nano sees"
        vision = VisionModel(config.vision)
    for module, source in ((text, trained.text), (vision, trained.vision)):
        allocate(module, torch.device("cpu"), torch.bfloat16)
        weights = dict(source.named_parameters())
        for name, parameter in module.named_parameters():
            parameter.data.copy_(weights[name].detach())
    save_checkpoint(out, config, text, vision)
    for name in (VOCABULARY_FILE, PROCESSOR_FILE):
        (out / name).write_bytes((folder / name).read_bytes())
    for file, data in token_files(config, NUM_RANKS).items():
        (out / file).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
