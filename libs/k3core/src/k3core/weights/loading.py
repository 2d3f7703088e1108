"""Loading a checkpoint into a model: memory-mapped, streamed, checked tensor by tensor.

Enters a checkpoint directory and a config; leaves a `TextModel` on a device. Packed experts are copied as bytes and never unpacked here. Whatever is missing, left
over or misshapen is an error that names the tensor; nothing is filled in silently.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from k3core.config import ModelConfig
from k3core.kernels.interface import Kernels
from k3core.model.plans import MlaForm
from k3core.model.text import TextModel
from k3core.weights.errors import (
    MisshapenTensorError,
    MissingTensorError,
    UnexpectedTensorError,
)
from k3core.weights.files import open_checkpoint
from k3core.weights.names import VISION_PREFIXES, Slot, released_spelling, text_slots

# (tensors done, tensors in all, bytes done); called after each tensor.
Progress: TypeAlias = Callable[[int, int, int], None]

# Source: K3 architecture sheet, section 8, trap 5: these lose the model if downcast.
FLOAT32_PARAMETERS = frozenset({"conv", "a_log", "dt_bias", "o_norm", "router_bias"})
PLAIN_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
# Names listed in an error before it says how many more there are.
NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is brought into memory.

    Attributes:
        device: where it will run.
        dtype: of the weights that are neither packed nor kept in float32.
        mla_form: see `TextModel`.
        progress: told about each tensor, or None.
    """

    device: torch.device
    dtype: torch.dtype
    mla_form: MlaForm = "auto"
    progress: Progress | None = None


def load_text_model(
    directory: Path, config: ModelConfig, kernels: Kernels, options: LoadOptions
) -> TextModel:
    """Build the language model and fill it from the shards that hold its tensors.

    Files that hold nothing of it (the vision tower's) are not opened.

    Raises:
        MissingTensorError: tensors that the config asks for are in no file.
        UnexpectedTensorError: tensors of the language model that the config has no place for.
        MisshapenTensorError: a tensor's shape or dtype is not the config's.
        CheckpointError: files absent or damaged.
    """
    files = open_checkpoint(directory)
    slots = text_slots(config.text)
    name_in_file = {released_spelling(name): name for name in files.file_of}
    check_names(name_in_file, slots, has_vision=config.vision is not None)
    with torch.device("meta"):
        model = TextModel(config.text, kernels, options.mla_form)
    allocate(model, options.device, options.dtype)
    parameters = dict(model.named_parameters())
    report = Reporter(options.progress, len(slots))
    for name, tensor in files.read(name_in_file[name] for name in slots):
        slot = slots[released_spelling(name)]
        target = slot_view(parameters[slot.parameter], slot)
        target.copy_(fitted(name, tensor, slot, target))
        report(tensor)
    model.prepare_weights()
    return model.eval()


def check_names(names: Iterable[str], slots: dict[str, Slot], *, has_vision: bool) -> None:
    """Compare the names of a checkpoint with the slots of its language model.

    Raises:
        MissingTensorError: slots without a tensor.
        UnexpectedTensorError: tensors without a slot; vision tensors only count if the config
            has no vision part.
    """
    held = set(names)
    raise_missing(slots.keys() - held)
    extra = held - slots.keys()
    if has_vision:
        extra = {name for name in extra if not name.startswith(VISION_PREFIXES)}
    raise_unexpected(extra)


def allocate(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give a meta model real, uninitialised parameters, in place.

    Parameters that were built in another dtype than the default (float32 decay weights,
    packed bytes) keep it; the others take `dtype`. float32 ones are told apart by name.
    """
    for name, parameter in list(model.named_parameters()):
        keeps = parameter.dtype == torch.uint8 or name.rsplit(".", 1)[-1] in FLOAT32_PARAMETERS
        owner = model.get_submodule(name.rpartition(".")[0])
        # Not empty_like: of a meta tensor it goes through torch's decompositions, whose import
        # (sympy) takes half a second of every start.
        empty = torch.empty(
            parameter.shape, device=device, dtype=parameter.dtype if keeps else dtype
        )
        fresh = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        setattr(owner, name.rpartition(".")[2], fresh)


def slot_view(parameter: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The part of a parameter that a slot fills; writing to it writes the parameter."""
    view = parameter.data
    if slot.expert is not None:
        view = view[slot.expert]
    if slot.rows is not None:
        view = view[slot.rows[0] : slot.rows[1]]
    return view


class Reporter:
    """Counts tensors and bytes for a progress callback."""

    def __init__(self, progress: Progress | None, num_tensors: int) -> None:
        self._progress = progress
        self._num_tensors = num_tensors
        self._num_done = 0
        self._bytes_done = 0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Count a tensor and tell."""
        self._num_done += 1
        self._bytes_done += tensor.nbytes
        if self._progress is not None:
            self._progress(self._num_done, self._num_tensors, self._bytes_done)


def fitted(name: str, tensor: torch.Tensor, slot: Slot, target: torch.Tensor) -> torch.Tensor:
    """The tensor in the shape of its place.

    Raises:
        MisshapenTensorError: its shape or dtype is not the slot's; names it.
    """
    is_held = tensor.dtype == torch.uint8 if slot.kind == "uint8" else tensor.dtype in PLAIN_DTYPES
    if not is_held:
        raise MisshapenTensorError(f"{name}: {tensor.dtype} cannot be held as {slot.kind}")
    shape = tuple(tensor.shape)
    if slot.is_padded:
        # Kimi-Linear writes [1, 1, H, 1]; K3 pads a vector beyond its H entries.
        if max(shape, default=0) == tensor.numel() and tensor.numel() >= target.numel():
            return tensor.flatten()[: target.numel()]
    elif shape == slot.shape:
        return tensor.reshape(target.shape)
    raise MisshapenTensorError(f"{name}: shape {list(shape)}, expected {list(slot.shape)}")


def raise_missing(names: Iterable[str]) -> None:
    """Raise `MissingTensorError` naming them, if there are any."""
    listed = _listed(names)
    if listed:
        raise MissingTensorError(f"missing tensors: {listed}")


def raise_unexpected(names: Iterable[str]) -> None:
    """Raise `UnexpectedTensorError` naming them, if there are any."""
    listed = _listed(names)
    if listed:
        raise UnexpectedTensorError(f"tensors without a place in the model: {listed}")


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - NAMES_SHOWN
    return ", ".join(ordered[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
