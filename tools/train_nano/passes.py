"""Rows put side by side, run through the model, and scored.

Letters: B rows, T tokens of the longest, M vision tokens, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from k3text.images.config import ProcessorConfig
from k3text.images.geometry import plan
from k3text.images.patchify import normalise
from k3text.images.processor import PatchedImage
from train_nano.model import Nano
from train_nano.rows import Row
from train_nano.scenes import CLASSES, column_of

NO_OBJECT = len(CLASSES)
OFFSET_WEIGHT = 1.0


@dataclass(frozen=True, slots=True)
class Scores:
    """What a pass over rows gives.

    Attributes:
        logits: of the positions before each learned token, row after row.
        targets: the learned tokens.
        lengths: how many of them each row has.
        objects: auxiliary loss of the vision tokens, 0 without pictures.
        ids: [B, T], padded with zeros.
        places: of the learned tokens in the flattened ids.
    """

    logits: torch.Tensor
    targets: torch.Tensor
    lengths: list[int]
    objects: torch.Tensor
    ids: torch.Tensor
    places: torch.Tensor


def run_rows(nano: Nano, rows: Sequence[Row], config: ProcessorConfig) -> Scores:
    """Runs rows as one batch, padded at the end, differentiably."""
    length = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    image_rows: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.from_numpy(row.ids)
        start = index * length
        for image, offset in zip(row.images, row.offsets, strict=True):
            image_rows.append(torch.arange(image.num_tokens) + start + offset)
        wanted.append(torch.from_numpy(row.is_learned).nonzero().squeeze(1) + start)
    images = [image for row in rows for image in row.images]
    embeds, objects = None, torch.zeros(())
    if images:
        listed = see(nano, images, config)
        embeds = torch.cat(listed)
        truth = [objects for row in rows for objects in row.objects]
        objects = objects_loss(nano, listed, images, truth, config)
    places = torch.cat(wanted)
    logits = nano.text.forward_dense(
        ids, torch.cat(image_rows) if images else None, embeds, logits_rows=places - 1
    )
    lengths = [len(w) for w in wanted]
    return Scores(logits, ids.flatten()[places], lengths, objects, ids, places)


def see(nano: Nano, images: Sequence[PatchedImage], config: ProcessorConfig) -> list[torch.Tensor]:
    """Vision tokens [M, D] of each image."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for index, image in enumerate(images):
        alike.setdefault(image.grid_thw, []).append(index)
    embeds: dict[int, torch.Tensor] = {}
    for grid, members in alike.items():
        patches = [torch.from_numpy(normalise(images[i].pixels, config)) for i in members]
        embeds.update(
            zip(members, nano.vision.forward_equal(torch.stack(patches), grid), strict=True)
        )
    return [embeds[index] for index in range(len(images))]


def objects_loss(
    nano: Nano,
    embeds: Sequence[torch.Tensor],
    images: Sequence[PatchedImage],
    truth: Sequence[Sequence[tuple[int, float, float]]],
    config: ProcessorConfig,
) -> torch.Tensor:
    """How badly each vision token says which object has its centre there, and where.

    Object cells and empty ones weigh the same: otherwise "nothing anywhere" is learned first
    and for long.
    """
    classes: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    offsets: list[torch.Tensor] = []
    unit = config.patch_size * config.merge_size
    for image, objects in zip(images, truth, strict=True):
        geometry = plan(image.width, image.height, config)
        columns = geometry.padded_width // unit
        cell_column = torch.zeros(image.num_tokens, dtype=torch.int64)
        cell_class = torch.full((image.num_tokens,), NO_OBJECT)
        cell_offset = torch.zeros(image.num_tokens, 2)
        for kind, x, y in objects:
            column, within_x = divmod(x * geometry.width / unit, 1)
            line, within_y = divmod(y * geometry.height / unit, 1)
            cell = int(line) * columns + int(column)
            cell_class[cell] = kind
            cell_column[cell] = column_of(x)
            cell_offset[cell] = torch.tensor([within_x - 0.5, within_y - 0.5])
        classes.append(cell_class)
        places.append(cell_column)
        offsets.append(cell_offset)
    said = torch.cat(list(embeds)) @ nano.objects.T
    target, column, offset = torch.cat(classes), torch.cat(places), torch.cat(offsets)
    first_column = NO_OBJECT + 1
    losses = F.cross_entropy(said[:, :first_column], target, reduction="none")
    is_object = target != NO_OBJECT
    of_objects = said[is_object]
    placed = F.cross_entropy(of_objects[:, first_column:-2], column[is_object])
    moved = F.l1_loss(of_objects[:, -2:], offset[is_object])
    return losses[is_object].mean() + losses[~is_object].mean() + placed + OFFSET_WEIGHT * moved
