"""A draft's directory: released names, a round trip, and errors that name what is wrong."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.random_drafts import random_dspark, random_eagle, sequences
from torch import nn

from k3core.config import ConfigError
from k3core.drafts.config import CONFIG_NAME
from k3core.drafts.dspark import DSparkDraft, TargetTables
from k3core.drafts.files import load_dspark, load_eagle, save_draft
from k3core.weights.errors import (
    MisshapenTensorError,
    MissingTensorError,
    UnexpectedTensorError,
)

WEIGHTS = "model.safetensors"
ATTENTION = {
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
}
LAYER = {f"self_attn.{name}.weight" for name in ATTENTION} | {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
}


def tables() -> TargetTables:
    drawn = random_dspark()._tables
    return TargetTables(drawn.embed.float(), drawn.lm_head.float())


def test_an_eagle_heads_tensors_are_the_released_twenty(tmp_path: Path) -> None:
    draft = random_eagle()
    save_draft(tmp_path, draft.config, draft, torch.bfloat16)
    held = load_file(tmp_path / WEIGHTS)
    layer = {f"layers.0.{name}" for name in LAYER | {"hidden_norm.weight"}}
    norms = {f"fc_norm.{i}.weight" for i in range(3)}
    rest = {"embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight"}
    assert held.keys() == layer | norms | rest
    assert len(held) == 20
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}


def test_a_block_drafts_tensors_are_the_released_ones_without_the_embedding(
    tmp_path: Path,
) -> None:
    draft = random_dspark()
    save_draft(tmp_path, draft.config, draft, torch.bfloat16)
    layers = {f"layers.{i}.{name}" for i in range(2) for name in LAYER}
    rest = {
        "context_proj.weight",
        "context_norm.weight",
        "final_norm.weight",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }
    assert load_file(tmp_path / WEIGHTS).keys() == layers | rest


def test_both_come_back_from_files_and_say_the_same(tmp_path: Path) -> None:
    eagle, dspark = random_eagle().float(), random_dspark()
    block = DSparkDraft(dspark.config, tables()).float()
    block.load_state_dict({k: v.float() for k, v in dspark.state_dict().items()})
    for name, draft in (("eagle", eagle), ("dspark", block)):
        (tmp_path / name).mkdir()
        save_draft(tmp_path / name, draft.config, draft, torch.float32)
    anchors = torch.tensor([[3, 9], [2, 5]])
    loaded = load_eagle(tmp_path / "eagle", torch.device("cpu"), torch.float32)
    assert loaded.config == eagle.config
    drawn = sequences(3)
    arguments = (drawn.taps.float(), drawn.token_ids, anchors)
    assert torch.equal(loaded.unroll(*arguments), eagle.unroll(*arguments))
    again = load_dspark(tmp_path / "dspark", tables())
    assert again.config == block.config
    drawn = sequences(2)
    arguments = (drawn.taps.float(), drawn.token_ids, anchors)
    assert torch.equal(again.blocks(*arguments).logits, block.blocks(*arguments).logits)


def test_a_released_file_may_carry_the_targets_embedding(tmp_path: Path) -> None:
    draft = random_dspark()
    save_draft(tmp_path, draft.config, draft, torch.float32)
    held = load_file(tmp_path / WEIGHTS)
    save_file(held | {"embed_tokens.weight": torch.zeros(53, 24)}, tmp_path / WEIGHTS)
    loaded = load_dspark(tmp_path, tables())
    assert "embed_tokens.weight" not in dict(loaded.named_parameters())


def saved(tmp_path: Path) -> nn.Module:
    draft = random_eagle()
    save_draft(tmp_path, draft.config, draft, torch.float32)
    return draft


def load(tmp_path: Path) -> None:
    load_eagle(tmp_path, torch.device("cpu"), torch.float32)


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    held = load_file(tmp_path / WEIGHTS)
    save_file({k: v for k, v in held.items() if k != "fc.weight"}, tmp_path / WEIGHTS)
    with pytest.raises(MissingTensorError, match=r"fc\.weight"):
        load(tmp_path)
    save_file(held | {"d2t": torch.zeros(3)}, tmp_path / WEIGHTS)
    with pytest.raises(UnexpectedTensorError, match="d2t"):
        load(tmp_path)
    save_file(held | {"fc.weight": held["fc.weight"][:-1].clone()}, tmp_path / WEIGHTS)
    with pytest.raises(MisshapenTensorError, match=r"fc\.weight"):
        load(tmp_path)


def test_a_draft_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match="EAGLE"):
        load_dspark(tmp_path, tables())
    (tmp_path / CONFIG_NAME).unlink()
    with pytest.raises(ConfigError, match=CONFIG_NAME):
        load(tmp_path)
