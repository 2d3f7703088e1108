"""MoonViT and its projector: patches of images to rows of the language model.

Parameters carry their released names below `vision_tower.` and `mm_projector.`. Images of one
call attend only within themselves, so an image's rows do not depend on its neighbours.

Letters: N patches of all images, n patches of one, C tower width, A attention width, H heads,
d head width, D model width, M merged tokens.

Source: K3 architecture sheet, section 2.7.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from k3core.config import VisionConfig

# Frames, rows and columns of patches.
Grid: TypeAlias = tuple[int, int, int]

NUM_CHANNELS = 3
ROPE_THETA = 10_000.0
TIME_THETA = 10_000.0


class VisionModel(nn.Module):
    """The whole encoder: patches in, language-model rows out."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._config = config
        self.vision_tower = _Tower(config)
        self.mm_projector = _Projector(config)

    def forward(self, pixel_values: torch.Tensor, grid_thw: Sequence[Grid]) -> list[torch.Tensor]:
        """Encode the images of one call.

        Args:
            pixel_values: [N, 3, patch, patch], the model's dtype: the images' patches one
                image after the other, frame by frame, row-major.
            grid_thw: (frames, rows, columns) of each image; rows and columns are multiples of
                the merge kernel, and N is the sum of their products.

        Returns:
            One tensor [rows / 2 * columns / 2, D] (for a 2 x 2 kernel) an image.
        """
        sizes = [t * h * w for t, h, w in grid_thw]
        assert sum(sizes) == len(pixel_values), "grids and patches disagree"
        patches = pixel_values.split(sizes)
        return [
            self.mm_projector(self.vision_tower(image, grid))
            for image, grid in zip(patches, grid_thw, strict=True)
        ]

    def forward_equal(self, pixel_values: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Encode images of one size as a batch, several times as fast for small ones; to train.

        Rows then move by the rounding of larger matrix products, which serving does not want:
        there an image's rows must not depend on its neighbours.

        Args:
            pixel_values: [B, n, 3, patch, patch].
            grid: of each image.

        Returns:
            [B, rows / 2 * columns / 2, D].
        """
        return self.mm_projector(self.vision_tower(pixel_values, grid))


class _Weight(nn.Module):
    """One weight under a module's name, as the released files have it."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class _Tower(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._config = config
        self.patch_embed = _PatchEmbed(config)
        self.encoder = _Encoder(config)

    def forward(self, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
        """[..., n, 3, patch, patch] to merged patches [..., M, merge * C]."""
        hidden = self.encoder(self.patch_embed(patches, grid), grid)
        return _merge(hidden, grid, self._config.merge_kernel)


class _PatchEmbed(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        patch, width = config.patch_size, config.hidden_size
        self.proj = _Weight(width, NUM_CHANNELS, patch, patch)
        self.pos_emb = _Weight(config.pos_emb_height, config.pos_emb_width, width)

    def forward(self, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
        frames, rows, columns = grid
        embedded = F.conv2d(patches.flatten(0, -4), self.proj.weight).flatten(1)
        embedded = embedded.unflatten(0, patches.shape[:-3])
        table = self._positions(rows, columns)
        if frames == 1:
            return embedded + table
        times = _time_embedding(frames, table.shape[-1], table)
        return embedded + (table.unsqueeze(0) + times.unsqueeze(1)).flatten(0, 1)

    def _positions(self, rows: int, columns: int) -> torch.Tensor:
        """The learned table resized to the grid, [rows * columns, C]."""
        table = self.pos_emb.weight
        if table.shape[:2] != (rows, columns):
            image = table.permute(2, 0, 1).unsqueeze(0)
            resized = F.interpolate(
                image, size=(rows, columns), mode="bilinear", align_corners=False
            )
            table = resized.squeeze(0).permute(1, 2, 0)
        return table.flatten(0, 1)


class _Encoder(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.final_layernorm = _Weight(config.hidden_size)

    def forward(self, hidden: torch.Tensor, grid: Grid) -> torch.Tensor:
        turns = _rotations(grid, self._head_dim, hidden.device)
        for block in self.blocks:
            hidden = block(hidden, turns)
        return _rms_norm(hidden, self.final_layernorm.weight)


class _Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, attention = config.hidden_size, config.qkv_hidden_size
        self._num_heads = config.num_heads
        self.norm0 = _Weight(width)
        self.norm1 = _Weight(width)
        self.wqkv = _Weight(3 * attention, width)
        self.wo = _Weight(width, attention)
        self.mlp = _Mlp(width, config.intermediate_size)

    def forward(self, hidden: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._attend(_rms_norm(hidden, self.norm0.weight), turns)
        return hidden + self.mlp(_rms_norm(hidden, self.norm1.weight))

    def _attend(self, x_nC: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        qkv = F.linear(x_nC, self.wqkv.weight).unflatten(-1, (3, self._num_heads, -1))
        q, k, v = qkv.movedim((-3, -2), (0, -3)).unbind(0)
        q, k = _rotate(q, turns), _rotate(k, turns)
        # Torch's fused attention wants a batch axis.
        is_single = x_nC.ndim == 2
        if is_single:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        out = F.scaled_dot_product_attention(q, k, v)
        out = out.squeeze(0) if is_single else out
        return F.linear(out.transpose(-2, -3).flatten(-2), self.wo.weight)


class _Mlp(nn.Module):
    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.fc0 = _Weight(middle, width)
        self.fc1 = _Weight(width, middle)

    def forward(self, x_nC: torch.Tensor) -> torch.Tensor:
        middle = F.gelu(F.linear(x_nC, self.fc0.weight), approximate="tanh")
        return F.linear(middle, self.fc1.weight)


class _Projector(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        merged = config.mm_hidden_size * math.prod(config.merge_kernel)
        self._eps = config.projector_ln_eps
        # The activation between them has no weights but takes index 1.
        first, second = _Weight(merged, merged), _Weight(config.text_hidden_size, merged)
        self.proj = nn.ModuleDict({"0": first, "2": second})
        self.post_norm = _Weight(config.text_hidden_size)

    def forward(self, merged: torch.Tensor) -> torch.Tensor:
        first, second = self.proj.parameters()
        hidden = F.linear(F.gelu(F.linear(merged, first)), second)
        return F.rms_norm(hidden, hidden.shape[-1:], self.post_norm.weight, self._eps)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The tower's norms have no epsilon of their own: the dtype's is used."""
    return F.rms_norm(x, x.shape[-1:], weight, None)


def _rotations(grid: Grid, head_dim: int, device: torch.device) -> torch.Tensor:
    """Unit complex numbers [n, d / 2]: even pairs turn by the column, odd ones by the row."""
    frames, rows, columns = grid
    step = torch.arange(0, head_dim, 4, device=device, dtype=torch.float32)[: head_dim // 4]
    frequencies = ROPE_THETA ** (-step / head_dim)
    x = torch.arange(columns, device=device).repeat(rows)
    y = torch.arange(rows, device=device).repeat_interleave(columns)
    angles = torch.stack((torch.outer(x, frequencies), torch.outer(y, frequencies)), dim=-1)
    return torch.polar(torch.ones_like(angles), angles).flatten(1).repeat(frames, 1)


def _rotate(x_Hnd: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring pairs of each head in float32."""
    pairs = torch.view_as_complex(x_Hnd.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x_Hnd.dtype)


def _time_embedding(frames: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Fixed sine and cosine halves of the frame index, [frames, C]."""
    half = width // 2
    index = torch.arange(half, device=like.device, dtype=torch.float32)
    angles = torch.outer(
        torch.arange(frames, device=like.device).float(), TIME_THETA ** (-index / half)
    )
    return torch.cat((angles.sin(), angles.cos()), dim=-1).to(like.dtype)


def _merge(hidden: torch.Tensor, grid: Grid, kernel: tuple[int, int]) -> torch.Tensor:
    """Mean over frames, then neighbours side by side, row-major within a neighbourhood."""
    frames, rows, columns = grid
    high, wide = kernel
    mean = hidden.unflatten(-2, (frames, rows, columns)).mean(-4)
    blocks = mean.unflatten(-2, (columns // wide, wide)).unflatten(-4, (rows // high, high))
    return blocks.transpose(-3, -4).flatten(-3).flatten(-3, -2)
