"""A draft's `config.json`: released ones are read, ours come back, the rest is refused."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.golden_model import golden
from support.random_drafts import dspark_config, eagle_config, with_yarn

from k3core.config import ConfigError
from k3core.drafts.config import (
    DraftConfig,
    DSparkConfig,
    EagleConfig,
    Taps,
    Yarn,
    check_target,
    format_draft_config,
    parse_draft_config,
)
from k3core.drafts.rotary import logits_scale

ATTENTION = {
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "hidden_size": 7168,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
}
RELEASED_DSPARK = ATTENTION | {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
RELEASED_EAGLE = ATTENTION | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "fc_norm": True,
    "norm_output": True,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 46, 90]},
}


def parse(data: Mapping[str, object]) -> DraftConfig:
    return parse_draft_config(json.dumps(data).encode())


def test_a_released_block_draft_counts_layers_from_zero() -> None:
    config = parse(RELEASED_DSPARK)
    assert config == DSparkConfig(
        shape=config.shape, num_layers=5, mask_token_id=163837, markov_rank=256
    )
    shape = config.shape
    assert shape.taps == Taps((2, 23, 47, 71, 89), "stream")
    assert shape.taps.names[0] == "layer2.stream"
    assert (shape.taps_width, shape.num_tokens) == (35840, 7)
    assert shape.attention.yarn == Yarn(32.0, 32768, 32.0, 1.0, 1.0)
    # Source: K3 architecture sheet, section 4.3: the scale grows by about 1.813.
    assert logits_scale(shape.attention) * 192**0.5 == pytest.approx(1.813, abs=1e-3)


def test_a_released_eagle_head_counts_completed_layers() -> None:
    config = parse(RELEASED_EAGLE)
    assert config == EagleConfig(config.shape)
    assert config.shape.taps == Taps((1, 45, 89), "stream")
    assert config.shape.attention.yarn is None
    assert config.shape.num_tokens == 3


def test_older_files_name_the_stretching_in_rope_scaling() -> None:
    scaling = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0}
    config = parse(RELEASED_EAGLE | {"rope_scaling": scaling})
    assert config.shape.attention.yarn == Yarn(64.0, 4096, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("config", [eagle_config(), dspark_config(), with_yarn(dspark_config())])
def test_what_is_written_is_read_back(config: DraftConfig) -> None:
    mixed = replace(config, shape=replace(config.shape, taps=Taps((3, 1, 2), "mixture")))
    for each in (config, mixed):
        assert parse_draft_config(format_draft_config(each)) == each


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (RELEASED_EAGLE, {"fc_norm": False}, "fc_norm"),
        (RELEASED_EAGLE, {"draft_vocab_size": 32000}, "draft_vocab_size"),
        (RELEASED_EAGLE, {"num_hidden_layers": 2}, "num_hidden_layers"),
        (RELEASED_EAGLE, {"architectures": ["LlamaForCausalLM"]}, "architectures"),
        (RELEASED_EAGLE, {"hidden_size": "wide"}, "hidden_size"),
        (RELEASED_EAGLE, {"hidden_size": 0}, "hidden_size"),
        (RELEASED_EAGLE, {"qk_rope_head_dim": 3}, "qk_rope_head_dim"),
        (
            RELEASED_EAGLE,
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}},
            "eagle_aux_hidden_state_layer_ids",
        ),
        (RELEASED_DSPARK, {"markov_head_type": "gated"}, "markov_head_type"),
        (RELEASED_DSPARK, {"enable_confidence_head": False}, "confidence"),
        (RELEASED_DSPARK, {"mla_use_output_gate": True}, "mla_use_output_gate"),
        (RELEASED_DSPARK, {"target_layer_ids": []}, "target_layer_ids"),
        (RELEASED_DSPARK, {"mask_token_id": 163840}, "mask_token_id"),
        (RELEASED_DSPARK, {"target_stream": "other"}, "target_stream"),
        (RELEASED_DSPARK, {"rope_parameters": {"rope_type": "llama3"}}, "rope_type"),
        (RELEASED_DSPARK, {"rope_parameters": {"rope_type": "yarn"}}, "factor"),
    ],
)
def test_what_these_drafts_cannot_do_is_refused_by_name(
    base: Mapping[str, object], change: Mapping[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        parse({**base, **change})


def test_a_draft_is_held_against_its_target() -> None:
    target = golden().config.text
    shape = replace(
        eagle_config().shape, hidden_size=target.hidden_size, vocab_size=target.vocab_size
    )
    layers = target.num_layers
    check_target(EagleConfig(replace(shape, taps=Taps((0, 1, layers - 1)))), target)
    for wrong, named in (
        (replace(shape, taps=Taps((0, 1, layers))), "layers"),
        (replace(shape, hidden_size=7), "hidden_size"),
        (replace(shape, vocab_size=7), "vocab_size"),
    ):
        with pytest.raises(ConfigError, match=named):
            check_target(EagleConfig(wrong), target)
