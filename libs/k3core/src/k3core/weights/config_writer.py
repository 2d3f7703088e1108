"""A `ModelConfig` as the object of a K3 `config.json`; `parse_config` read backwards."""

from k3core.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig, TextConfig, VisionConfig
from k3core.weights.config_file import MXFP4_FORMAT


def config_json(config: ModelConfig) -> dict[str, object]:
    """The JSON object of a checkpoint with the released K3 names."""
    data: dict[str, object] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": config.dtype,
        "tie_word_embeddings": config.text.is_head_tied,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        "media_placeholder_token_id": config.media_placeholder_token_id,
        "text_config": _text_json(config.text),
    }
    if config.vision is not None:
        data["vision_config"] = _vision_json(config.vision)
    return data


def _text_json(text: TextConfig) -> dict[str, object]:
    data: dict[str, object] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": text.num_layers,
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": text.rms_norm_eps,
        "hidden_act": text.activation,
        "activation_situ_beta": text.situ_beta,
        "activation_situ_linear_beta": text.situ_linear_beta,
        "attn_res_block_size": text.attn_res_block_size,
        "tie_word_embeddings": text.is_head_tied,
        "linear_attn_config": _linear_json(text),
    }
    if text.mla is not None:
        data |= _mla_json(text.mla)
    elif text.kda is not None:
        data["num_attention_heads"] = text.kda.num_heads
    if text.moe is not None:
        data |= _moe_json(text.moe, text.is_moe)
    return data


def _linear_json(text: TextConfig) -> dict[str, object]:
    # Released lists count layers from 1.
    data: dict[str, object] = {
        "full_attn_layers": [index + 1 for index in text.mla_layers],
        "kda_layers": [index + 1 for index in text.kda_layers],
    }
    kda: KdaConfig | None = text.kda
    if kda is not None:
        data |= {
            "num_heads": kda.num_heads,
            "head_dim": kda.head_dim,
            "short_conv_kernel_size": kda.conv_width,
            "use_full_rank_gate": kda.has_full_rank_gate,
            "gate_lower_bound": kda.gate_lower_bound,
        }
    return data


def _mla_json(mla: MlaConfig) -> dict[str, object]:
    return {
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": mla.has_output_gate,
        "latent_norm_eps": mla.latent_norm_eps,
    }


def _moe_json(moe: MoeConfig, is_moe: tuple[bool, ...]) -> dict[str, object]:
    first = is_moe.index(True)
    assert is_moe == tuple(i >= first for i in range(len(is_moe))), "mixtures follow dense layers"
    data: dict[str, object] = {
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.intermediate_size,
        "routed_expert_hidden_size": moe.latent_size,
        "latent_moe_use_norm": moe.has_latent_norm,
        "moe_router_activation_func": moe.router_score,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": moe.num_groups,
        "topk_group": moe.groups_per_token,
        "moe_renormalize": moe.renormalize,
        "routed_scaling_factor": moe.scaling_factor,
        "first_k_dense_replace": first,
        "moe_layer_freq": 1,
    }
    if moe.mxfp4_group is not None:
        data["quantization_config"] = _quantization_json(moe.mxfp4_group)
    return data


def _quantization_json(group: int) -> dict[str, object]:
    # Source: K3 architecture sheet, section 3.3.
    return {
        "quant_method": "compressed-tensors",
        "format": MXFP4_FORMAT,
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "group_size": group,
                    "symmetric": True,
                    "strategy": "group",
                    "dynamic": False,
                    "scale_dtype": "torch.uint8",
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }


def _vision_json(vision: VisionConfig) -> dict[str, object]:
    return {
        "vt_num_hidden_layers": vision.num_layers,
        "vt_hidden_size": vision.hidden_size,
        "vt_intermediate_size": vision.intermediate_size,
        "vt_num_attention_heads": vision.num_heads,
        "qkv_hidden_size": vision.qkv_hidden_size,
        "patch_size": vision.patch_size,
        "init_pos_emb_height": vision.pos_emb_height,
        "init_pos_emb_width": vision.pos_emb_width,
        "init_pos_emb_time": vision.pos_emb_time,
        "merge_kernel_size": list(vision.merge_kernel),
        "mm_hidden_size": vision.mm_hidden_size,
        "text_hidden_size": vision.text_hidden_size,
        "projector_ln_eps": vision.projector_ln_eps,
        "mm_projector_type": "patchmergerv2",
        "merge_type": "sd2_tpool",
        "norm_type": "rmsnorm",
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
    }


def _one_or_list(ids: tuple[int, ...]) -> int | list[int]:
    return ids[0] if len(ids) == 1 else list(ids)
