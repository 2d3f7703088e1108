"""The trained model as its drafts see it: frozen, watched while it reads whole lessons.

Letters: B rows, T tokens of the longest, X width of concatenated taps, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional as F

from k3core.drafts.dspark import TargetTables
from k3core.kernels.mla.dense import fused_dense
from k3core.kernels.registry import select_kernels
from k3core.weights.config_file import load_config
from k3core.weights.loading import LoadOptions, load_text_model
from k3core.weights.vision_loading import load_vision_model
from k3text.images.config import ProcessorConfig
from train_nano.export import export
from train_nano.model import Nano, read_processing
from train_nano.passes import see
from train_nano.rows import Row, RowWriter

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint in memory, float32.

    Attributes:
        nano: its modules; nothing of them is trained.
        writer: of rows in its vocabulary.
        processing: its image rules.
    """

    nano: Nano
    writer: RowWriter
    processing: ProcessorConfig

    def tables(self) -> TargetTables:
        """What a block draft shares with it."""
        text = self.nano.text
        return TargetTables(text.embed, text.embed if text.lm_head is None else text.lm_head)


@dataclass(frozen=True, slots=True)
class Watched:
    """What the target made of a batch of rows.

    Attributes:
        token_ids: [B, T], int64, padded with 0 at the end.
        is_learned: [B, T], tokens that an assistant says.
        taps: [B, T, X].
        logits: [B, T, V], float32.
    """

    token_ids: torch.Tensor
    is_learned: torch.Tensor
    taps: torch.Tensor
    logits: torch.Tensor


def checkpoint_of(source: Path, scratch: Path) -> Path:
    """A directory in the released layout: the source, or what its training state makes.

    Args:
        source: a checkpoint, or the folder of a training run.
        scratch: where a run's state is written as a checkpoint.
    """
    if (source / CONFIG_FILE).exists():
        return source
    export(source, scratch)
    return scratch


def load_target(checkpoint: Path) -> Target:
    """Reads a checkpoint with its vocabulary and image rules."""
    config = load_config(checkpoint)
    assert config.vision is not None, "nano sees"
    device = torch.device("cpu")
    # Rows by the thousand are torch's own best case of a matrix product.
    kernels = replace(select_kernels(device), mla_dense=fused_dense, linear=F.linear)
    options = LoadOptions(device, torch.float32)
    text = load_text_model(checkpoint, config, kernels, options)
    vision = load_vision_model(checkpoint, config.vision, options)
    for parameter in (*text.parameters(), *vision.parameters()):
        parameter.requires_grad_(False)
    tokenizer, processing = read_processing(checkpoint)
    nano = Nano(config, text, vision, torch.nn.Parameter(torch.empty(0), requires_grad=False))
    return Target(nano, RowWriter(tokenizer, processing), processing)


@torch.no_grad()
def watch(target: Target, rows: Sequence[Row], taps: Sequence[str]) -> Watched:
    """Runs rows through the target, side by side.

    Args:
        target: to be run.
        rows: lessons.
        taps: names of hidden rows, in the order in which they are concatenated.
    """
    length = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    is_learned = torch.zeros(len(rows), length, dtype=torch.bool)
    places: list[torch.Tensor] = []
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.from_numpy(row.ids)
        is_learned[index, : len(row.ids)] = torch.from_numpy(row.is_learned)
        places.extend(place + index * length for place in image_places(row))
    images = [image for row in rows for image in row.images]
    embeds = torch.cat(see(target.nano, images, target.processing)) if images else None
    output = target.nano.text.forward_dense_taps(
        ids, taps, torch.cat(places) if places else None, embeds
    )
    side_by_side = torch.cat([output.taps[name] for name in taps], dim=-1)
    shape = ids.shape
    return Watched(
        ids, is_learned, side_by_side.unflatten(0, shape), output.logits.unflatten(0, shape)
    )


def image_places(row: Row) -> list[torch.Tensor]:
    """Where each picture's tokens stand in a row."""
    return [
        torch.arange(image.num_tokens) + offset
        for image, offset in zip(row.images, row.offsets, strict=True)
    ]
