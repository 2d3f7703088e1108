"""`config.json` is read whole, and what the model cannot do is refused by key."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.golden_model import MICRO_A
from support.shared_data import shared_path

from k3core.config import ConfigError
from k3core.weights.config_file import load_config, parse_config
from k3core.weights.config_writer import config_json

Json = dict[str, object]


def micro() -> Json:
    return json.loads((MICRO_A / "config.json").read_text())


def changed(section: str | None, **values: object) -> Json:
    """Micro-a's object with values of a section replaced, or removed where None."""
    data = micro()
    target = data
    for key in section.split(".") if section else ():
        target = target[key]
    for key, value in values.items():
        target[key] = value
    return data


def test_the_released_config_says_what_the_release_is() -> None:
    config = parse_config(json.loads(shared_path("golden/official-config.json").read_text()))
    assert config.text.mla_layers == (*range(3, 92, 4), 92)
    assert len(config.text.kda_layers) == 69
    assert config.text.is_moe == (False, *(True,) * 92)
    assert config.text.kda.width == 12_288
    assert config.text.mla.row_dim == 576
    assert config.text.moe.mxfp4_group == 32
    assert config.text.attn_res_block_size == 12
    assert config.vision.head_dim == 128
    assert config.eos_token_ids == (163_586,)
    assert config.media_placeholder_token_id == 163_605


def test_quantisation_is_found_inside_and_outside_the_text_config() -> None:
    data = micro()
    data["quantization_config"] = data["text_config"].pop("quantization_config")
    assert parse_config(data) == parse_config(micro())
    del data["quantization_config"]
    assert parse_config(data).text.moe.mxfp4_group is None


@pytest.mark.parametrize("make", ["micro", "released"])
def test_a_written_config_reads_back_the_same(make: str) -> None:
    path = (
        MICRO_A / "config.json" if make == "micro" else shared_path("golden/official-config.json")
    )
    config = parse_config(json.loads(path.read_text()))
    assert parse_config(config_json(config)) == config


def test_a_text_only_config_has_no_vision() -> None:
    data = micro()
    del data["vision_config"]
    assert parse_config(data) == replace(parse_config(micro()), vision=None)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (None, "model_type", "llama"),
        ("text_config", "hidden_size", None),
        ("text_config", "hidden_size", "64"),
        ("text_config", "hidden_size", True),
        ("text_config", "vocab_size", -1),
        ("text_config", "hidden_act", "gelu"),
        ("text_config", "mla_use_nope", False),
        ("text_config", "attention_bias", True),
        ("text_config", "moe_router_activation_func", "tanh"),
        ("text_config", "num_experts", 2),
        ("text_config", "moe_intermediate_size", 33),
        ("text_config", "linear_attn_config", []),
        ("text_config.linear_attn_config", "kda_layers", [1, 2, 3]),
        ("text_config.linear_attn_config", "gate_lower_bound", 5.0),
        ("text_config.quantization_config", "format", "int4"),
        ("vision_config", "text_hidden_size", 65),
        ("vision_config", "qkv_hidden_size", 49),
        ("vision_config", "merge_kernel_size", [2]),
        ("vision_config", "attn_bias", True),
    ],
)
def test_a_bad_value_is_refused_by_its_key(section: str | None, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_config(changed(section, **{key: value}))


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_an_unreadable_file_is_refused_by_its_path(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)
