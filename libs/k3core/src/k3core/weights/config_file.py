"""Reading a checkpoint's `config.json` into a `ModelConfig`.

Enters the JSON of a released K3 or Kimi-Linear checkpoint; leaves frozen structs. A value
that this model cannot honour (rotated keys, an unknown activation, ...) is an error here,
never a silent difference later.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from k3core.config import (
    Attention,
    ConfigError,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    TextConfig,
    VisionConfig,
)

# Source: the vendor's reference code builds the two latent norms of MLA with its norm class'
# default epsilon, not with `rms_norm_eps`; K3 architecture sheet, section 2.1.
LATENT_NORM_EPS = 1e-6
MXFP4_FORMAT = "mxfp4-pack-quantized"
# Source: OCP Microscaling Formats v1.0, table 1: the block size of MXFP4.
MXFP4_GROUP = 32

_T = TypeVar("_T")


def load_config(directory: Path) -> ModelConfig:
    """Read `config.json` of a checkpoint directory.

    Raises:
        ConfigError: the file is absent, is no JSON object, or `parse_config` refuses it.
    """
    path = directory / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return parse_config(cast("dict[str, object]", data))


def parse_config(data: Mapping[str, object]) -> ModelConfig:
    """Turn the object of a `config.json` into a `ModelConfig`.

    A `kimi_k3` object holds its language model under `text_config`; a `kimi_linear` object
    is its language model. Keys spelled as in the released files and as in transformers are
    both known.

    Raises:
        ConfigError: a key is missing, malformed, or asks for what this model cannot do.
    """
    top = _Reader(data, "")
    model_type = top.text("model_type")
    if model_type not in ("kimi_k3", "kimi_linear"):
        raise ConfigError(f"model_type {model_type!r} is neither kimi_k3 nor kimi_linear")
    is_k3 = model_type == "kimi_k3"
    text = top.section("text_config") if is_k3 else top
    text_config = _parse_text(text, top, "language_model." if is_k3 else "")
    vision = top.section("vision_config") if top.has("vision_config") else None
    return ModelConfig(
        text=text_config,
        vision=None if vision is None else _parse_vision(vision, text_config.hidden_size),
        dtype=top.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch."),
        bos_token_id=top.optional_integer("bos_token_id"),
        eos_token_ids=top.integers("eos_token_id", default=()),
        pad_token_id=top.optional_integer("pad_token_id"),
        media_placeholder_token_id=top.optional_integer("media_placeholder_token_id"),
    )


def _parse_text(text: "_Reader", top: "_Reader", name_prefix: str) -> TextConfig:
    activation = text.text("hidden_act")
    if activation not in ("situ", "silu"):
        raise ConfigError(f"{text.name('hidden_act')} {activation!r} is neither situ nor silu")
    if text.flag("attention_bias", default=False):
        raise ConfigError(f"{text.name('attention_bias')}: biased attention is not supported")
    num_layers = text.integer("num_hidden_layers")
    attention = _parse_attention_kinds(text, num_layers)
    is_moe = _parse_moe_layers(text, num_layers)
    block_size = text.optional_integer("attn_res_block_size")
    return TextConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        num_layers=num_layers,
        max_position_embeddings=text.integer(
            "max_position_embeddings", "model_max_length", default=1_048_576
        ),
        rms_norm_eps=text.number("rms_norm_eps", default=1e-6),
        attention=attention,
        is_moe=is_moe,
        kda=_parse_kda(text) if "kda" in attention else None,
        mla=_parse_mla(text) if "mla" in attention else None,
        moe=_parse_moe(text, top) if any(is_moe) else None,
        activation=activation,
        situ_beta=text.number("activation_situ_beta", default=1.0),
        situ_linear_beta=text.optional_number("activation_situ_linear_beta"),
        attn_res_block_size=block_size or None,
        is_head_tied=text.flag("tie_word_embeddings", default=False),
        name_prefix=name_prefix,
    )


def _parse_attention_kinds(text: "_Reader", num_layers: int) -> tuple[Attention, ...]:
    """Spell out the released 1-based lists, or transformers' `layer_types`."""
    linear = text.section("linear_attn_config") if text.has("linear_attn_config") else None
    if linear is None or not linear.has("full_attn_layers"):
        kinds = text.texts("layer_types")
        known: dict[str, Attention] = {"full_attention": "mla", "linear_attention": "kda"}
        if len(kinds) != num_layers or not set(kinds) <= set(known):
            raise ConfigError(f"{text.name('layer_types')} does not name {num_layers} layers")
        return tuple(known[kind] for kind in kinds)
    full = linear.integers("full_attn_layers")
    kda = linear.integers("kda_layers")
    if sorted(full + kda) != list(range(1, num_layers + 1)):
        raise ConfigError(
            f"{linear.name('full_attn_layers')} and kda_layers do not name each of the layers "
            f"1..{num_layers} once"
        )
    return tuple("mla" if i + 1 in full else "kda" for i in range(num_layers))


def _parse_moe_layers(text: "_Reader", num_layers: int) -> tuple[bool, ...]:
    if text.has("mlp_layer_types"):
        kinds = text.texts("mlp_layer_types")
        if len(kinds) != num_layers:
            raise ConfigError(f"{text.name('mlp_layer_types')} does not name {num_layers} layers")
        return tuple(kind == "sparse" for kind in kinds)
    if not text.integer("num_experts", "num_local_experts", default=0):
        return (False,) * num_layers
    first = text.integer("first_k_dense_replace", default=0)
    every = text.integer("moe_layer_freq", default=1)
    return tuple(i >= first and i % every == 0 for i in range(num_layers))


def _parse_kda(text: "_Reader") -> KdaConfig:
    linear = text.section("linear_attn_config") if text.has("linear_attn_config") else text
    bound = linear.optional_number("gate_lower_bound")
    if bound is not None and bound >= 0:
        raise ConfigError(f"{linear.name('gate_lower_bound')} {bound} is not negative")
    return KdaConfig(
        num_heads=linear.integer("num_heads", "linear_num_heads"),
        head_dim=linear.integer("head_dim", "linear_head_dim"),
        conv_width=linear.integer("short_conv_kernel_size", "linear_conv_kernel_dim", default=4),
        gate_lower_bound=bound,
        has_full_rank_gate=linear.flag("use_full_rank_gate", default=False),
    )


def _parse_mla(text: "_Reader") -> MlaConfig:
    if not text.flag("mla_use_nope", default=True):
        raise ConfigError(f"{text.name('mla_use_nope')}: rotated keys are not supported")
    return MlaConfig(
        num_heads=text.integer("num_attention_heads"),
        q_lora_rank=text.optional_integer("q_lora_rank") or None,
        kv_lora_rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        rope_dim=text.integer("qk_rope_head_dim", default=0),
        value_dim=text.integer("v_head_dim"),
        has_output_gate=text.flag("mla_use_output_gate", default=False),
        latent_norm_eps=text.number("latent_norm_eps", default=LATENT_NORM_EPS),
    )


def _parse_moe(text: "_Reader", top: "_Reader") -> MoeConfig:
    score = text.text("moe_router_activation_func", default="sigmoid")
    if score not in ("sigmoid", "softmax"):
        raise ConfigError(f"{text.name('moe_router_activation_func')} {score!r} is unknown")
    latent = text.optional_integer("routed_expert_hidden_size") or None
    num_experts = text.integer("num_experts", "num_local_experts")
    num_groups = text.integer("num_expert_group", "n_group", default=1)
    groups_per_token = text.integer("topk_group", default=1)
    chosen = text.integer("num_experts_per_token", "num_experts_per_tok")
    groups_per_token = min(groups_per_token, num_groups)
    if num_experts % num_groups or chosen > num_experts // num_groups * groups_per_token:
        raise ConfigError(
            f"{text.name('num_experts')}: {chosen} of {num_experts} experts cannot be chosen "
            f"from {groups_per_token} of {num_groups} groups"
        )
    group = _parse_mxfp4_group(text, top)
    width, middle = latent or text.integer("hidden_size"), text.integer("moe_intermediate_size")
    if group is not None and (width % group or middle % group):
        raise ConfigError(
            f"{text.name('moe_intermediate_size')} {middle} or the experts' width {width} is no "
            f"multiple of the quantisation group {group}"
        )
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=chosen,
        num_shared_experts=text.integer("num_shared_experts", "n_shared_experts", default=0),
        intermediate_size=middle,
        latent_size=latent,
        has_latent_norm=latent is not None and text.flag("latent_moe_use_norm", default=False),
        router_score=score,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        # A single chosen expert keeps its score: the vendor's gate renormalises from two on.
        renormalize=chosen > 1 and text.flag("moe_renormalize", "norm_topk_prob", default=True),
        scaling_factor=text.number("routed_scaling_factor", default=1.0),
        mxfp4_group=group,
    )


def _parse_mxfp4_group(text: "_Reader", top: "_Reader") -> int | None:
    """Find the quantisation of the experts, which released files put inside `text_config`."""
    holder = next((r for r in (top, text) if r.has("quantization_config")), None)
    if holder is None:
        return None
    quantization = holder.section("quantization_config")
    groups = quantization.section("config_groups") if quantization.has("config_groups") else None
    first = next(iter(groups.keys()), None) if groups is not None else None
    group = None if groups is None or first is None else groups.section(first)
    form = quantization.text("format", default="")
    if not form and group is not None:
        form = group.text("format", default="")
    if form != MXFP4_FORMAT:
        raise ConfigError(f"{quantization.name('format')} {form!r} is not {MXFP4_FORMAT}")
    if group is None or not group.has("weights"):
        return MXFP4_GROUP
    return group.section("weights").integer("group_size", default=MXFP4_GROUP)


def _parse_vision(vision: "_Reader", text_hidden_size: int) -> VisionConfig:
    hidden = vision.integer("vt_hidden_size", default=1024)
    merge = vision.integers("merge_kernel_size", default=(2, 2))
    if len(merge) != 2:
        raise ConfigError(f"{vision.name('merge_kernel_size')} is not a pair")
    for key in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        if vision.flag(key, default=False):
            raise ConfigError(f"{vision.name(key)}: biased projections are not supported")
    config = VisionConfig(
        num_layers=vision.integer("vt_num_hidden_layers", default=27),
        hidden_size=hidden,
        intermediate_size=vision.integer("vt_intermediate_size", default=4 * hidden),
        num_heads=vision.integer("vt_num_attention_heads", default=12),
        qkv_hidden_size=vision.integer("qkv_hidden_size", default=hidden),
        patch_size=vision.integer("patch_size", default=14),
        pos_emb_height=vision.integer("init_pos_emb_height", default=64),
        pos_emb_width=vision.integer("init_pos_emb_width", default=64),
        pos_emb_time=vision.integer("init_pos_emb_time", default=4),
        merge_kernel=(merge[0], merge[1]),
        mm_hidden_size=vision.integer("mm_hidden_size", default=hidden),
        text_hidden_size=vision.integer("text_hidden_size", default=text_hidden_size),
        projector_ln_eps=vision.number("projector_ln_eps", default=1e-5),
    )
    if config.text_hidden_size != text_hidden_size:
        raise ConfigError(f"{vision.name('text_hidden_size')} is not {text_hidden_size}")
    if config.qkv_hidden_size % config.num_heads:
        raise ConfigError(f"{vision.name('qkv_hidden_size')} is not a multiple of its heads")
    return config


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed look-ups in one JSON object whose errors carry the whole key."""

    data: Mapping[str, object]
    path: str

    def name(self, key: str) -> str:
        return f"{self.path}{key}"

    def keys(self) -> list[str]:
        return list(self.data)

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def section(self, key: str) -> "_Reader":
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.name(key)} is not an object")
        return _Reader(cast("dict[str, object]", value), f"{self.name(key)}.")

    def optional_integer(self, *keys: str) -> int | None:
        value = self._find(keys)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{self.name(keys[0])} {value!r} is not a whole number")
        return value

    def integer(self, *keys: str, default: int | None = None) -> int:
        return self._required(keys, self.optional_integer(*keys), default)

    def optional_number(self, *keys: str) -> float | None:
        value = self._find(keys)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"{self.name(keys[0])} {value!r} is not a number")
        return float(value)

    def number(self, *keys: str, default: float | None = None) -> float:
        return self._required(keys, self.optional_number(*keys), default)

    def flag(self, *keys: str, default: bool) -> bool:
        value = self._find(keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.name(keys[0])} {value!r} is neither true nor false")
        return value

    def text(self, *keys: str, default: str | None = None) -> str:
        value = self._find(keys)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.name(keys[0])} {value!r} is not a text")
        return self._required(keys, value, default)

    def texts(self, key: str) -> tuple[str, ...]:
        items = self._items(key, None)
        if not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{self.name(key)} is not a list of texts")
        return tuple(cast("Sequence[str]", items))

    def integers(self, key: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A list of whole numbers, or one alone."""
        items = self._items(key, default)
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise ConfigError(f"{self.name(key)} is not a list of whole numbers")
        return tuple(cast("Sequence[int]", items))

    def _items(self, key: str, default: tuple[object, ...] | None) -> Sequence[object]:
        value = self._required((key,), self.data.get(key), default)
        return cast("list[object]", value) if isinstance(value, list | tuple) else [value]

    def _find(self, keys: Sequence[str]) -> object | None:
        return next((self.data[key] for key in keys if self.data.get(key) is not None), None)

    def _required(self, keys: Sequence[str], value: _T | None, default: _T | None) -> _T:
        if value is not None:
            return value
        if default is not None:
            return default
        raise ConfigError(f"{self.name(keys[0])} is missing")
