"""A checkpoint's safetensors files: which file holds which tensor, read through memory maps.

Enters a directory in the released layout (`model.safetensors.index.json` with shards, or
`model.safetensors`, or shards without an index); leaves tensors one by one. No file is opened before a tensor
of it is wanted, and its pages are the page cache's, not the process's.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open

from k3core.weights.errors import CheckpointError, MissingTensorError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHARD_PATTERN = "model-*-of-*.safetensors"


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Where each tensor of a checkpoint lies.

    Attributes:
        directory: of the checkpoint.
        file_of: file name of each tensor, by tensor name.
    """

    directory: Path
    file_of: dict[str, str]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the named tensors, file by file, each file mapped once.

        A tensor is a view of the map: copy what must outlive the next step.

        Raises:
            MissingTensorError: a name that no file holds, or that its file turns out to lack.
            CheckpointError: a file that is absent or damaged.
        """
        by_file: dict[str, list[str]] = {}
        for name in names:
            if name not in self.file_of:
                raise MissingTensorError(f"{name}: in no file of {self.directory}")
            by_file.setdefault(self.file_of[name], []).append(name)
        for file, members in by_file.items():
            yield from self._read_file(file, members)

    def _read_file(self, file: str, members: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        path = self.directory / file
        try:
            with safe_open(path, framework="pt") as opened:
                held = set(opened.keys())
                for name in members:
                    if name not in held:
                        raise MissingTensorError(
                            f"{name}: the index puts it in {file}, which lacks it"
                        )
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error


def open_checkpoint(directory: Path) -> CheckpointFiles:
    """Find the tensors of a checkpoint directory by its index or its files' headers.

    Raises:
        CheckpointError: no weights are there, the index is malformed, or two files hold one
            tensor.
    """
    index = directory / INDEX_NAME
    if index.exists():
        return CheckpointFiles(directory, _read_index(index))
    file_of: dict[str, str] = {}
    single = directory / SINGLE_NAME
    # Other safetensors (golden data, drafts) may lie beside the weights and are not ours.
    paths = [single] if single.exists() else sorted(directory.glob(SHARD_PATTERN))
    for path in paths:
        for name in _header_names(path):
            if name in file_of:
                raise CheckpointError(f"{name}: in {file_of[name]} and in {path.name}")
            file_of[name] = path.name
    if not file_of:
        raise CheckpointError(f"{directory} holds no model*.safetensors")
    return CheckpointFiles(directory, file_of)


def _read_index(path: Path) -> dict[str, str]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: no weight_map")
    return cast("dict[str, str]", weight_map)


def _header_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error
