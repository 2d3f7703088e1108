"""Writing a checkpoint in the released layout: one shard a layer, an index, `config.json`.

The name table of `k3core.weights.names` read from memory to file. Experts that a model holds
plain (as training does) are packed to MXFP4 where the target config asks for it.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from k3core.config import ModelConfig, TextConfig
from k3core.kernels.mxfp4.reference import quantise
from k3core.model.text import TextModel
from k3core.weights.config_writer import config_json
from k3core.weights.files import INDEX_NAME
from k3core.weights.loading import slot_view
from k3core.weights.names import VISION_PREFIXES, Slot, layer_of, text_slots


def training_config(config: TextConfig) -> TextConfig:
    """The same model with plain experts, which can be initialised and trained."""
    if config.moe is None:
        return config
    return replace(config, moe=replace(config.moe, mxfp4_group=None))


def save_checkpoint(
    directory: Path, config: ModelConfig, text: TextModel, vision: nn.Module | None
) -> None:
    """Write `config.json`, shards and index into an existing directory.

    Args:
        directory: to write to; files of the same names are overwritten.
        config: of the checkpoint; its experts may be packed though the model's are plain.
        text: the language model.
        vision: tower and projector under their released names, or None.
    """
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in text_tensors(text, config.text):
        layer = layer_of(name, config.text)
        key = "head" if layer is None else f"layer{layer:05d}"
        shards.setdefault(key, {})[name] = tensor
    for name, parameter in vision.named_parameters() if vision is not None else ():
        key = "vision" if name.startswith(VISION_PREFIXES[0]) else "projector"
        shards.setdefault(key, {})[name] = parameter.detach()
    # Layers first, then embeddings, projector and tower, as released.
    layers = sorted(key for key in shards if key.startswith("layer"))
    order = layers + [key for key in ("head", "projector", "vision") if key in shards]
    _write_shards(directory, [shards[key] for key in order])
    _write_json(directory / "config.json", config_json(config))


def text_tensors(model: TextModel, config: TextConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a checkpoint of `config`, by released name, from a model's weights.

    `A_log` is padded with zeros as released.
    """
    parameters = dict(model.named_parameters())
    slots = text_slots(config)
    for name, slot in slots.items():
        parameter = parameters.get(slot.parameter)
        if slot.kind == "uint8" and (parameter is None or parameter.is_floating_point()):
            yield name, _packed(parameters, slot, config)
        elif slot.is_padded:
            assert parameter is not None, "a padded tensor is held plain"
            yield name, _padded(parameter, slot.shape)
        else:
            assert parameter is not None, f"{slot.parameter} is in the model"
            yield name, slot_view(parameter, slot).reshape(slot.shape)


def _packed(parameters: dict[str, nn.Parameter], slot: Slot, config: TextConfig) -> torch.Tensor:
    """Bytes or scales of one expert's matrix that the model holds plain."""
    assert config.moe is not None, "experts belong to a mixture"
    assert config.moe.mxfp4_group is not None, "packed slots have a group"
    is_scale = slot.parameter.endswith("_scale")
    plain = parameters[slot.parameter.removesuffix("_scale")]
    return quantise(slot_view(plain, slot), config.moe.mxfp4_group)[int(is_scale)]


def _padded(a_log_H: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    padded = a_log_H.new_zeros(shape)
    padded[: len(a_log_H)] = a_log_H.detach()
    return padded


def _write_shards(directory: Path, shards: Iterable[dict[str, torch.Tensor]]) -> None:
    listed = list(shards)
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, tensors in enumerate(listed, start=1):
        file = f"model-{number:05d}-of-{len(listed):06d}.safetensors"
        # Slices of fused parameters share memory, which the format refuses.
        own = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(own, directory / file, metadata={"format": "pt"})
        # The library makes files that only their owner can read; a checkpoint is no secret.
        (directory / file).chmod(0o644)
        weight_map |= dict.fromkeys(own, file)
        total_size += sum(tensor.nbytes for tensor in own.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(directory / INDEX_NAME, index)


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
