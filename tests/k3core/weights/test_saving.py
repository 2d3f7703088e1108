"""A written checkpoint is a released one: it loads back, in shards, the same for the same seed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.golden_model import MICRO_A, micro_model

from k3core.kernels.mxfp4.reference import dequantise
from k3core.kernels.registry import reference_kernels
from k3core.weights.config_file import load_config
from k3core.weights.loading import LoadOptions, load_text_model
from k3core.weights.random_checkpoint import (
    SIZES,
    random_config,
    random_text_model,
    write_random_checkpoint,
)
from k3core.weights.saving import save_checkpoint, text_tensors
from k3core.weights.vision_loading import load_vision_model

OPTIONS = LoadOptions(torch.device("cpu"), torch.float32)


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = {file: load_file(directory / file) for file in set(index["weight_map"].values())}
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert sum(len(members) for members in files.values()) == len(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors


def test_the_golden_checkpoint_survives_a_round_trip() -> None:
    released = load_file(MICRO_A / "model.safetensors")
    written = dict(text_tensors(micro_model("reference"), load_config(MICRO_A).text))
    assert set(written) == {name for name in released if name.startswith("language_model.")}
    for name, tensor in written.items():
        if name.endswith("A_log"):
            heads = load_config(MICRO_A).text.kda.num_heads
            assert tensor.shape == released[name].shape
            assert torch.equal(tensor[:heads], released[name][:heads])
        else:
            assert torch.equal(tensor, released[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_random_checkpoint_loads_and_is_the_seeds(tmp_path: Path, dtype: str) -> None:
    config = random_config("micro", 768, dtype)
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    for directory, seed in ((first, 1), (second, 1), (other, 2)):
        directory.mkdir()
        write_random_checkpoint(directory, config, seed)
    assert load_config(first) == config
    ours, again, differing = read_all(first), read_all(second), read_all(other)
    assert all(torch.equal(tensor, again[name]) for name, tensor in ours.items())
    assert any(not torch.equal(tensor, differing[name]) for name, tensor in ours.items())
    text = load_text_model(first, config, reference_kernels(), OPTIONS)
    vision = load_vision_model(first, config.vision, OPTIONS)
    assert all(p.isfinite().all() for m in (text, vision) for p in m.parameters())
    with torch.no_grad():
        logits = text.forward_dense(torch.arange(40).unsqueeze(0) * 19)
        images = vision(torch.randn(24, 3, 14, 14), [(1, 4, 6)])
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 30
    assert images[0].shape == (6, config.text.hidden_size)
    assert images[0].isfinite().all()


def test_plain_experts_are_packed_to_the_nearest_codes(tmp_path: Path) -> None:
    config = replace(random_config("micro", 768), vision=None)
    plain = random_text_model(config.text, 5, torch.float32)
    save_checkpoint(tmp_path, config, plain, None)
    packed = load_text_model(tmp_path, config, reference_kernels(), OPTIONS)
    mlp, wanted = packed.layers[2].mlp, plain.layers[2].mlp
    restored = dequantise(mlp.w13, mlp.w13_scale, 32, torch.float32)
    assert restored.shape == wanted.w13.shape
    assert (restored - wanted.w13).norm() / wanted.w13.norm() < 0.15


@pytest.mark.parametrize("size", SIZES)
def test_every_size_ends_like_k3_and_has_its_specials_last(size: str) -> None:
    config = random_config(size, 768)
    assert config.text.attention[-2:] == ("mla", "mla")
    assert config.text.attention[:3] == ("kda",) * 3
    assert config.text.vocab_size == 768 + 256
    # Distances behind the base ranks are the release's: 163584, 163586, 163605, 163839.
    assert config.bos_token_id == 768
    assert config.eos_token_ids == (770,)
    assert config.media_placeholder_token_id == 789
    assert config.pad_token_id == config.text.vocab_size - 1
