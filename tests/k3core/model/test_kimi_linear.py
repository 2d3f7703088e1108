"""Kimi-Linear through the same blocks, against the implementation in transformers."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from k3core.engine.single_sequence import Segment, SingleSequence
from k3core.kernels.registry import select_kernels
from k3core.weights.config_file import load_config
from k3core.weights.loading import LoadOptions, load_text_model

transformers = pytest.importorskip("transformers")

# As in the released config.json of Kimi-Linear, with small sizes.
CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "torch_dtype": "float32",
    "vocab_size": 160,
    "hidden_size": 48,
    "head_dim": 12,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "num_experts": 12,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "model_max_length": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "linear_attn_config": {
        "full_attn_layers": [3, 6],
        "kda_layers": [1, 2, 4, 5],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
}


def make_checkpoint(directory: Path, changes: dict[str, object]) -> torch.nn.Module:
    """A tiny random Kimi-Linear of transformers, saved in the released layout."""
    fields = CONFIG | changes
    torch.manual_seed(0)
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**fields)).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")):
                tensor.copy_(0.5 * torch.randn_like(tensor))
            elif tensor.ndim == 1:
                tensor.copy_(1 + 0.1 * torch.randn_like(tensor))
            else:
                tensor.copy_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(fields))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": 14, "num_expert_group": 4, "topk_group": 2},
        {"num_experts_per_token": 5, "moe_renormalize": False, "first_k_dense_replace": 2},
    ],
    ids=["released", "query bottleneck and expert groups", "no renormalisation"],
)
def test_logits_agree_with_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    theirs = make_checkpoint(tmp_path, changes)
    config = load_config(tmp_path)
    assert config.vision is None
    assert config.text.attn_res_block_size is None
    device = torch.device("cpu")
    options = LoadOptions(device, torch.float32)
    ours = load_text_model(tmp_path, config, select_kernels(device), options)
    ids = torch.randint(0, 160, (45,))
    with torch.no_grad():
        wanted = theirs(ids.unsqueeze(0)).logits[0]
        whole = SingleSequence(ours, len(ids), torch.float32)
        found = whole.feed(Segment(ids)).logits
        steps = SingleSequence(ours, len(ids), torch.float32)
        cuts = [0, 20, *range(21, len(ids) + 1)]
        pieces = [
            steps.feed(Segment(ids[low:high])).logits for low, high in itertools.pairwise(cuts)
        ]
    assert (found - wanted).norm() / wanted.norm() <= 1e-5
    assert (torch.cat(pieces) - wanted).norm() / wanted.norm() <= 1e-5


@pytest.mark.filterwarnings("ignore")
def test_a_config_written_by_transformers_reads_the_same(tmp_path: Path) -> None:
    transformers.KimiLinearConfig(**CONFIG).save_pretrained(tmp_path / "theirs")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    theirs = load_config(tmp_path / "theirs").text
    ours = load_config(tmp_path).text
    assert theirs.kda == ours.kda
    assert theirs.mla == ours.mla
    assert theirs.moe == ours.moe
    assert theirs.attention == ours.attention
    assert theirs.is_moe == ours.is_moe
