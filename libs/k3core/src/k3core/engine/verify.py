"""Comparing a checkpoint, run by this code, with recorded results of its reference code.

Enters a checkpoint directory and a golden file (`input_ids`, `logits`, optional
`layerN.attn_out` and `imageJ.{pixel_values,grid_thw,embeds}`); leaves one `Comparison` a
recorded tensor. Images run through the vision tower and their own results, not the recorded
ones, replace the placeholder rows.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from k3core.config import ModelConfig
from k3core.engine.single_sequence import Segment, SingleSequence
from k3core.kernels.registry import select_kernels
from k3core.model.plans import MlaForm
from k3core.model.text import TextModel
from k3core.weights.config_file import load_config
from k3core.weights.loading import LoadOptions, Progress, load_text_model
from k3core.weights.vision_loading import load_vision_model


class GoldenError(ValueError):
    """A golden file that does not fit the checkpoint; names the tensor."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """How the checkpoint is run.

    Attributes:
        device: where.
        dtype: of weights and activations.
        mla_form: form that MLA layers attend in.
        chunk: tokens a chunk, or None for all at once.
        decode_from: position from which tokens are fed one by one, or None.
        kernels: backend name, `auto` or `reference`.
        progress: told while weights load, or None.
    """

    device: torch.device
    dtype: torch.dtype
    mla_form: MlaForm = "auto"
    chunk: int | None = None
    decode_from: int | None = None
    kernels: str = "auto"
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor against its golden values.

    Attributes:
        name: as in the golden file.
        max_abs: largest absolute difference; inf where a value is not finite.
        mean_abs: mean absolute difference.
        relative_norm: norm of the difference over norm of the golden tensor.
        scale: largest absolute golden value.
    """

    name: str
    max_abs: float
    mean_abs: float
    relative_norm: float
    scale: float


@torch.no_grad()
def verify(directory: Path, golden: Path, options: VerifyOptions) -> tuple[Comparison, ...]:
    """Run a checkpoint on a golden file's inputs and compare all it records.

    Raises:
        ConfigError, CheckpointError: the checkpoint cannot be loaded.
        GoldenError: the golden file lacks inputs or does not fit the model.
    """
    recorded = _read_golden(golden)
    config = load_config(directory)
    images = _run_images(directory, config, recorded, options)
    kernels = select_kernels(options.device, options.kernels)
    load = LoadOptions(options.device, options.dtype, options.mla_form, options.progress)
    model = load_text_model(directory, config, kernels, load)
    taps = _recorded_taps(recorded, config)
    found = _run_text(model, config, recorded["input_ids"].flatten(), images, taps, options)
    found |= {f"image{index}.embeds": embeds for index, embeds in enumerate(images)}
    names = ("logits", *taps, *(f"image{index}.embeds" for index in range(len(images))))
    return tuple(_compare(name, found[name], recorded[name]) for name in names if name in recorded)


def _read_golden(path: Path) -> dict[str, torch.Tensor]:
    try:
        recorded = load_file(path)
    except (OSError, SafetensorError) as error:
        raise GoldenError(f"{path}: {error}") from error
    for name in ("input_ids", "logits"):
        if name not in recorded:
            raise GoldenError(f"{path}: {name} is missing")
    return recorded


def _run_images(
    directory: Path,
    config: ModelConfig,
    recorded: dict[str, torch.Tensor],
    options: VerifyOptions,
) -> list[torch.Tensor]:
    """Embeddings of each recorded image, in order."""
    pixels: list[torch.Tensor] = []
    grids: list[tuple[int, int, int]] = []
    while f"image{len(grids)}.pixel_values" in recorded:
        stem = f"image{len(grids)}"
        if f"{stem}.grid_thw" not in recorded:
            raise GoldenError(f"{stem}.grid_thw is missing")
        t, h, w = recorded[f"{stem}.grid_thw"].flatten().tolist()
        pixels.append(recorded[f"{stem}.pixel_values"].to(options.device, options.dtype))
        grids.append((t, h, w))
    if not grids:
        return []
    if config.vision is None:
        raise GoldenError("image0.pixel_values: the checkpoint has no vision part")
    load = LoadOptions(options.device, options.dtype, progress=options.progress)
    vision = load_vision_model(directory, config.vision, load)
    return list(vision(torch.cat(pixels), grids))


def _run_text(
    model: TextModel,
    config: ModelConfig,
    token_ids: torch.Tensor,
    images: list[torch.Tensor],
    taps: tuple[str, ...],
    options: VerifyOptions,
) -> dict[str, torch.Tensor]:
    """Feed the recorded tokens in the asked-for chunks and join what comes out."""
    token_ids = token_ids.to(options.device, torch.int64)
    embeds, row_of = _place_images(config, token_ids, images)
    sequence = SingleSequence(model, len(token_ids), options.dtype)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("logits", *taps)}
    for low, high in _segments(len(token_ids), options):
        is_image = row_of[low:high] >= 0
        rows = is_image.nonzero().flatten()
        replaced = None if embeds is None else embeds[row_of[low:high][rows]]
        output = sequence.feed(Segment(token_ids[low:high], rows, replaced), taps)
        parts["logits"].append(output.logits)
        for name in taps:
            parts[name].append(output.taps[name])
    return {name: torch.cat(chunks) for name, chunks in parts.items()}


def _place_images(
    config: ModelConfig, token_ids: torch.Tensor, images: list[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """All image rows, and for each token the row that replaces it, or -1."""
    row_of = torch.full_like(token_ids, -1)
    if not images:
        return None, row_of
    embeds = torch.cat(images)
    is_image = token_ids == config.media_placeholder_token_id
    num_places = int(is_image.sum())
    if num_places != len(embeds):
        raise GoldenError(f"input_ids: {num_places} placeholders for {len(embeds)} image rows")
    row_of[is_image] = torch.arange(num_places, device=token_ids.device)
    return embeds, row_of


def _segments(num_tokens: int, options: VerifyOptions) -> list[tuple[int, int]]:
    prompt = num_tokens if options.decode_from is None else min(options.decode_from, num_tokens)
    chunk = options.chunk or max(prompt, 1)
    chunks = [(low, min(low + chunk, prompt)) for low in range(0, prompt, chunk)]
    return chunks + [(position, position + 1) for position in range(prompt, num_tokens)]


def _recorded_taps(recorded: dict[str, torch.Tensor], config: ModelConfig) -> tuple[str, ...]:
    names = [f"layer{index}.attn_out" for index in range(config.text.num_layers)]
    return tuple(name for name in names if name in recorded)


def _compare(name: str, found: torch.Tensor, golden: torch.Tensor) -> Comparison:
    golden64 = golden.double().flatten(0, -2)
    found64 = found.to(golden64)
    if found64.shape != golden64.shape:
        raise GoldenError(f"{name}: {list(golden.shape)} recorded, {list(found.shape)} computed")
    difference = (found64 - golden64).abs()
    # A golden tensor of zeros has no norm to be relative to.
    norm = float(golden64.norm()) or 1.0
    is_finite = bool(difference.isfinite().all())
    return Comparison(
        name=name,
        max_abs=float(difference.max()) if is_finite else float("inf"),
        mean_abs=float(difference.mean()) if is_finite else float("inf"),
        relative_norm=float(difference.norm()) / norm if is_finite else float("inf"),
        scale=float(golden64.abs().max()),
    )
