"""Muon for matrices, AdamW for tables, norms and vectors, as K3 itself was trained.

Muon: momentum, then the update's nearest orthogonal matrix by Newton-Schulz steps, scaled by
its shape. Source of the settings: a study of training tiny K3 models on CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

MUON_RATE = 0.02
VISION_SHARE = 0.4
"""Of the rate, for tower and projector: at the full one what they see comes and goes."""

MUON_MOMENTUM = 0.95
MUON_DECAY = 0.05
ADAM_RATE = 3e-3
ADAM_BETAS = (0.9, 0.97)
ADAM_EPS = 1e-8
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic step that pulls singular values towards 1 in few rounds."""

NEWTON_SCHULZ_STEPS = 5
NOT_MATRICES = ("embed", "lm_head", "conv", "pos_emb", "dt_bias", "objects", "o_norm")


@dataclass(slots=True)
class Optimiser:
    """Both rules over one set of named parameters, with the moments of each.

    Attributes:
        parameters: by name; changed in place.
        parts: rows of each projection that a fused matrix stacks, by name. Each is made
            orthogonal on its own: together, the one with the largest gradient would leave the
            others (queries and keys, early on) next to nothing.
        moments: by name: momentum for Muon; first and second moment for AdamW.
        num_steps: taken so far.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    moments: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    num_steps: int = 0

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Moves every parameter that has a gradient, and forgets the gradients.

        Args:
            factor: of both rules' learning rates.
        """
        self.num_steps += 1
        same_shape: dict[tuple[float, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if not is_matrix(name, parameter):
                self._adam(name, parameter, factor)
                continue
            share = VISION_SHARE if name.startswith("vision.") else 1.0
            parameter.mul_(1 - MUON_RATE * share * factor * MUON_DECAY)
            update = self._with_momentum(name, parameter.grad)
            for pair in self._split(name, parameter, update):
                same_shape.setdefault((share, *pair[0].shape[-2:]), []).append(pair)
        for (share, *_), pairs in same_shape.items():
            _muon(pairs, share * factor)
        for parameter in self.parameters.values():
            parameter.grad = None

    def _with_momentum(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if name not in self.moments:
            self.moments[name] = (torch.zeros_like(gradient),)
        momentum = self.moments[name][0]
        momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
        return gradient.lerp(momentum, MUON_MOMENTUM)

    def _split(
        self, name: str, parameter: torch.Tensor, update: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views [N, rows, columns] of each projection and of its update."""
        target, moved = _as_matrices(parameter.data), _as_matrices(update)
        rows = self.parts.get(name, (target.shape[-2],))
        return list(zip(target.split(rows, dim=-2), moved.split(rows, dim=-2), strict=True))

    def _adam(self, name: str, parameter: torch.nn.Parameter, factor: float) -> None:
        gradient = parameter.grad
        assert gradient is not None, "called for parameters with a gradient"
        if name not in self.moments:
            self.moments[name] = (torch.zeros_like(gradient), torch.zeros_like(gradient))
        first, second = self.moments[name]
        first.lerp_(gradient, 1 - ADAM_BETAS[0])
        second.lerp_(gradient.square(), 1 - ADAM_BETAS[1])
        mean = first / (1 - ADAM_BETAS[0] ** self.num_steps)
        spread = (second / (1 - ADAM_BETAS[1] ** self.num_steps)).sqrt_().add_(ADAM_EPS)
        parameter.sub_(ADAM_RATE * factor * mean / spread)


def _muon(pairs: list[tuple[torch.Tensor, torch.Tensor]], factor: float) -> None:
    """Moves matrices of one shape, each a view of a parameter with its update."""
    orthogonal = orthogonalise(torch.cat([update for _, update in pairs]))
    rows, columns = orthogonal.shape[-2:]
    rate = MUON_RATE * factor * max(1.0, rows / columns) ** 0.5
    counts = [len(target) for target, _ in pairs]
    for (target, _), update in zip(pairs, orthogonal.split(counts), strict=True):
        target.sub_(rate * update)


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon moves a parameter."""
    return parameter.ndim >= 2 and not any(part in name for part in NOT_MATRICES)


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Brings singular values of [N, rows, columns] near 1, keeping the singular vectors."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def _as_matrices(tensor: torch.Tensor) -> torch.Tensor:
    """[N, rows, columns]: experts stay apart, the patch kernel becomes one matrix."""
    if tensor.ndim == 3:
        return tensor
    return tensor.flatten(1).unsqueeze(0)
