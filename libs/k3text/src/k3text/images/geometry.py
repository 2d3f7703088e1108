"""How large an image becomes and how many tokens it costs: pure arithmetic on its size.

An image is scaled down, never up, until it has at most `max_patches` patches and none of its sides
has more than `max_patches_a_side`; then it is padded right and below to whole merged patches.
Because sides are cut and padded one by one, an image may cost a little more than
`max_patches / merge_size ** 2` tokens: up to 16,817 for K3, not 16,384.

Source: K3 architecture sheet, section 2.7.
"""

import math
from dataclasses import dataclass

from k3text.images.config import ProcessorConfig


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of an image on its way to patches.

    Attributes:
        width: pixels after the resize.
        height: likewise.
        padded_width: pixels after the padding, whole merged patches.
        padded_height: likewise.
        grid_thw: patches in time, height and width.
        num_tokens: merged patches, pad tokens in the prompt.
    """

    width: int
    height: int
    padded_width: int
    padded_height: int
    grid_thw: tuple[int, int, int]
    num_tokens: int


def plan(width: int, height: int, config: ProcessorConfig) -> Geometry:
    """Works out the geometry of an image.

    Args:
        width: pixels as seen, at least 1.
        height: likewise.
        config: the checkpoint's rules.
    """
    patch = config.patch_size
    max_side = config.max_patches_a_side * patch
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(config.max_patches / patches), max_side / width, max_side / height)
    new_width = min(max(1, int(width * scale)), max_side)
    new_height = min(max(1, int(height * scale)), max_side)
    unit = patch * config.merge_size
    padded_width, padded_height = _round_up(new_width, unit), _round_up(new_height, unit)
    return Geometry(
        width=new_width,
        height=new_height,
        padded_width=padded_width,
        padded_height=padded_height,
        grid_thw=(1, padded_height // patch, padded_width // patch),
        num_tokens=(padded_height // unit) * (padded_width // unit),
    )


def num_tokens(width: int, height: int, config: ProcessorConfig) -> int:
    """Counts the pad tokens that an image of this size takes in the prompt."""
    return plan(width, height, config).num_tokens


def grid(width: int, height: int, config: ProcessorConfig) -> tuple[int, int, int]:
    """Gives the patches in time, height and width of an image of this size."""
    return plan(width, height, config).grid_thw


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
