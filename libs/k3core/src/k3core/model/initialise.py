"""Random weights that train and that exercise every mechanism; seeded, order-independent.

Each parameter draws from a generator of its own, seeded by the given seed and its name, so
that adding a layer or a part changes no other weight.

Source of the scales: a study of training tiny K3 models on CPU; matrices N(0, 1 / fan_in),
outputs into the residual stream half of it, decay biases spread over slow and fast channels.
"""

import hashlib
import math

import torch
from torch import nn

RESIDUAL_OUTPUTS = frozenset({"o_proj", "down", "w2", "latent_up"})
TABLES = frozenset({"embed"})
DT_BIAS_RANGE = (-8.0, -2.0)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every floating-point parameter of a text or vision model in place.

    Packed experts cannot be drawn directly: build the model with plain ones and pack on save.
    """
    for name, parameter in model.named_parameters():
        assert parameter.is_floating_point(), f"{name} is packed"
        draw = _draw(name, parameter, _generator(seed, name))
        parameter.copy_(draw.to(parameter.dtype))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _draw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """float32 values on the CPU for one parameter, by what its name says it is."""
    parts = name.split(".")
    leaf = parts[-2] if parts[-1] == "weight" else parts[-1]
    shape = parameter.shape
    noise = torch.randn(shape, generator=generator)
    if leaf == "dt_bias":
        low, high = DT_BIAS_RANGE
        return low + (high - low) * torch.rand(shape, generator=generator)
    if leaf == "conv":
        taps = torch.zeros(shape[-1])
        taps[-2:] = torch.tensor([0.3, 0.7])[-shape[-1] :]
        return taps + 0.1 * noise
    if leaf in ("a_log", "router_bias"):
        return 0.1 * noise
    if leaf == "proj" and parameter.ndim == 1:
        return noise / math.sqrt(shape[0])
    if leaf == "pos_emb":
        return 0.02 * noise
    if parameter.ndim == 1:
        return 1 + 0.1 * noise
    if leaf in TABLES:
        return noise
    fan_in = math.prod(shape[1:]) if parameter.ndim != 3 else shape[2]
    scale = 0.5 if leaf in RESIDUAL_OUTPUTS else 1.0
    return noise * scale / math.sqrt(fan_in)
