"""What a checkpoint is made of, counted from its config alone: no weight is read."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from k3core.config import ModelConfig
from k3core.model.vision import VisionModel
from k3core.weights.names import Slot, text_slots

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
E2M1_PER_BYTE = 2


@dataclass(frozen=True, slots=True)
class TensorCount:
    """Tensors of one kind and dtype.

    Attributes:
        kind: what they are for: `routed experts`, `attention`, ...
        dtype: in the checkpoint.
        num_tensors: how many.
        num_parameters: logical weights; a packed byte is two, a scale is none.
        num_bytes: their size in the checkpoint.
    """

    kind: str
    dtype: str
    num_tensors: int
    num_parameters: int
    num_bytes: int


def count_tensors(config: ModelConfig) -> tuple[TensorCount, ...]:
    """Count a checkpoint's tensors by kind and dtype, largest first."""
    items = [
        (_kind(name), _dtype(slot, config.dtype), slot.shape, _weights(slot))
        for name, slot in text_slots(config.text).items()
    ]
    if config.vision is not None:
        with torch.device("meta"):
            vision = VisionModel(config.vision)
        for name, parameter in vision.named_parameters():
            kind = "vision tower" if name.startswith("vision_tower.") else "projector"
            items.append((kind, config.dtype, tuple(parameter.shape), parameter.numel()))
    return _summed(items)


def _summed(items: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[TensorCount, ...]:
    sums: dict[tuple[str, str], list[int]] = {}
    for kind, dtype, shape, weights in items:
        total = sums.setdefault((kind, dtype), [0, 0, 0])
        total[0] += 1
        total[1] += weights
        total[2] += math.prod(shape) * DTYPE_BYTES[dtype]
    counts = [TensorCount(kind, dtype, *total) for (kind, dtype), total in sums.items()]
    return tuple(sorted(counts, key=lambda count: -count.num_bytes))


def _kind(name: str) -> str:
    """What a language-model tensor is for, by its released name."""
    for part, kind in (
        (".experts.", "routed experts"),
        (".shared_experts.", "shared experts"),
        (".block_sparse_moe.", "router and latent"),
        (".mlp.", "dense MLP"),
        (".self_attn.", "attention"),
        ("embed_tokens", "embedding and head"),
        ("lm_head", "embedding and head"),
    ):
        if part in name:
            return kind
    return "norms and mixtures"


def _dtype(slot: Slot, model_dtype: str) -> str:
    return model_dtype if slot.kind == "model" else slot.kind


def _weights(slot: Slot) -> int:
    if slot.parameter.endswith("_scale"):
        return 0
    size = math.prod(slot.shape)
    return size * E2M1_PER_BYTE if slot.kind == "uint8" else size
