"""Loading the vision tower and its projector, whose parameters carry their released names."""

from pathlib import Path

import torch

from k3core.config import VisionConfig
from k3core.model.vision import VisionModel
from k3core.weights.files import open_checkpoint
from k3core.weights.loading import (
    LoadOptions,
    Reporter,
    allocate,
    fitted,
    raise_missing,
    raise_unexpected,
)
from k3core.weights.names import VISION_PREFIXES, Slot


def load_vision_model(directory: Path, config: VisionConfig, options: LoadOptions) -> VisionModel:
    """Build the vision tower with its projector and fill it; see `load_text_model`."""
    files = open_checkpoint(directory)
    with torch.device("meta"):
        model = VisionModel(config)
    allocate(model, options.device, options.dtype)
    targets = dict(model.named_parameters())
    held = [name for name in files.file_of if name.startswith(VISION_PREFIXES)]
    raise_missing(targets.keys() - set(held))
    raise_unexpected(set(held) - targets.keys())
    report = Reporter(options.progress, len(targets))
    for name, tensor in files.read(targets):
        target = targets[name].data
        slot = Slot(name, tuple(target.shape))
        target.copy_(fitted(name, tensor, slot, target))
        report(tensor)
    return model.eval()
