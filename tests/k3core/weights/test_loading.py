"""A checkpoint loads whole or not at all, and an error names the tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.golden_model import MICRO_A, micro_model

from k3core.kernels.registry import reference_kernels
from k3core.model.text import TextModel
from k3core.weights.config_file import load_config
from k3core.weights.errors import (
    CheckpointError,
    MisshapenTensorError,
    MissingTensorError,
    UnexpectedTensorError,
)
from k3core.weights.loading import LoadOptions, load_text_model

GATE = "language_model.model.layers.4.block_sparse_moe.gate.weight"
PACKED = "language_model.model.layers.2.block_sparse_moe.experts.7.w2.weight_packed"
A_LOG = "language_model.model.layers.1.self_attn.A_log"
Tensors = dict[str, torch.Tensor]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> TextModel:
    options = LoadOptions(torch.device("cpu"), dtype)
    return load_text_model(directory, load_config(directory), reference_kernels(), options)


def write(directory: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of micro-a with its tensors changed."""
    tensors = load_file(MICRO_A / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    shutil.copy(MICRO_A / "config.json", directory)
    return directory


def write_sharded(directory: Path) -> dict[str, str]:
    """Micro-a in three shards with an index; the last holds the vision part alone."""
    tensors = load_file(MICRO_A / "model.safetensors")
    weight_map: dict[str, str] = {}
    shards: dict[str, Tensors] = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        shard = number % 2 + 1 if name.startswith("language_model.") else 3
        file = f"model-{shard:05d}-of-000003.safetensors"
        weight_map[name] = file
        shards.setdefault(file, {})[name] = tensor
    for file, members in shards.items():
        save_file(members, directory / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(MICRO_A / "config.json", directory)
    return weight_map


def same_weights(left: TextModel, right: TextModel) -> bool:
    rights = dict(right.named_parameters())
    return all(torch.equal(tensor, rights[name]) for name, tensor in left.named_parameters())


@pytest.mark.parametrize("name", [GATE, PACKED, A_LOG])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(MissingTensorError, match=name.replace(".", r"\.")):
        load(tmp_path)


@pytest.mark.parametrize("name", ["language_model.model.layers.9.mlp.x", "model.stray"])
def test_an_extra_tensor_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, lambda tensors: tensors.update({name: torch.zeros(2)}))
    with pytest.raises(UnexpectedTensorError, match=name):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (GATE, torch.zeros(16, 63)),
        (GATE, torch.zeros(64, 16)),
        (PACKED, torch.zeros(32, 8, dtype=torch.uint8)),
        (PACKED, torch.zeros(32, 16)),
        (GATE, torch.zeros(16, 64, dtype=torch.uint8)),
        (A_LOG, torch.zeros(3)),
        (A_LOG, torch.zeros(4, 4)),
    ],
)
def test_a_misshapen_tensor_is_named(tmp_path: Path, name: str, wrong: torch.Tensor) -> None:
    write(tmp_path, lambda tensors: tensors.update({name: wrong}))
    with pytest.raises(MisshapenTensorError, match=name):
        load(tmp_path)


def test_padding_of_the_decay_is_cut_off_and_a_plain_one_is_kept(tmp_path: Path) -> None:
    padded = load_file(MICRO_A / "model.safetensors")[A_LOG]
    heads = load_config(MICRO_A).text.kda.num_heads
    assert len(padded) > heads
    write(tmp_path, lambda tensors: tensors.update({A_LOG: padded[:heads].clone()}))
    assert torch.equal(load(tmp_path).layers[1].attention.a_log, padded[:heads])
    assert same_weights(load(tmp_path), micro_model("reference"))


def test_experts_stay_packed_and_delicate_weights_stay_float32() -> None:
    dtypes: dict[torch.dtype, set[str]] = {}
    for name, parameter in load(MICRO_A, torch.bfloat16).named_parameters():
        dtypes.setdefault(parameter.dtype, set()).add(name.rsplit(".", 1)[-1])
    assert dtypes.pop(torch.uint8) == {"w13", "w13_scale", "w2", "w2_scale"}
    assert dtypes.pop(torch.float32) == {"conv", "a_log", "dt_bias", "o_norm", "router_bias"}
    assert set(dtypes) == {torch.bfloat16}


def test_shards_with_an_index_give_the_same_model(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    assert same_weights(load(tmp_path), micro_model("reference"))


def test_only_shards_with_wanted_tensors_are_opened(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-00003-of-000003.safetensors").unlink()
    assert same_weights(load(tmp_path), micro_model("reference"))


def test_an_index_that_promises_too_much_is_an_error(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path)
    file = tmp_path / weight_map[GATE]
    tensors = load_file(file)
    del tensors[GATE]
    save_file(tensors, file)
    with pytest.raises(MissingTensorError, match=GATE):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "model-00001-of-000003.safetensors"]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    write_sharded(tmp_path)
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    shutil.copy(MICRO_A / "config.json", tmp_path)
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_progress_counts_every_tensor_and_byte() -> None:
    calls: list[tuple[int, int, int]] = []
    config = load_config(MICRO_A)
    options = LoadOptions(
        torch.device("cpu"), torch.float32, progress=lambda *call: calls.append(call)
    )
    load_text_model(MICRO_A, config, reference_kernels(), options)
    text = [
        tensor
        for name, tensor in load_file(MICRO_A / "model.safetensors").items()
        if name.startswith("language_model.")
    ]
    assert [done for done, _, _ in calls] == list(range(1, len(text) + 1))
    assert {total for _, total, _ in calls} == {len(text)}
    assert calls[-1][2] == sum(tensor.nbytes for tensor in text)
