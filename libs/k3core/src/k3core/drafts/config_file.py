"""The keys of a draft's `config.json`, as they are spelled in files.

Only what these drafts read or must refuse; other keys of a file are ignored.

Source: `config.json` of `Inferact/Kimi-K3-DSpark`; EAGLE-3.1 heads of the DeepSeek-V2 family as
vLLM and lmdeploy read them (`fc_norm`, `norm_output`, `eagle_config`).
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

Size: TypeAlias = Annotated[int, msgspec.Meta(gt=0)]
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class RopeFile(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`rope_parameters`, or `rope_scaling` in older files, where `type` names the kind."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: Size | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


class EagleAuxFile(msgspec.Struct, kw_only=True):
    """`eagle_config`: the target's layers, counted from 1 as completed ones."""

    eagle_aux_hidden_state_layer_ids: list[Index]


class ShapeFile(msgspec.Struct, kw_only=True):
    """What tells a draft's kind."""

    architectures: list[str]


class DraftFile(ShapeFile, kw_only=True):
    """What both drafts' files have."""

    model_type: str
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    q_lora_rank: Size
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    vocab_size: Size
    draft_vocab_size: Size | None = None
    rms_norm_eps: float
    rope_theta: float
    rope_parameters: RopeFile | None = None
    rope_scaling: RopeFile | None = None
    target_hidden_size: Size | None = None
    mla_use_nope: bool = False
    mla_use_output_gate: bool = False
    # Ours: which stream is tapped. Released drafts of these shapes read the plain one.
    target_stream: Literal["stream", "mixture"] = "stream"
    num_speculative_tokens: Size


class EagleFile(DraftFile, kw_only=True):
    """An EAGLE-3.1 head's file."""

    model_type: str = "deepseek_v3"
    fc_norm: bool = False
    norm_output: bool = False
    eagle_config: EagleAuxFile
    # Source: the recipe published with the head, K3 architecture sheet, section 4.2.
    num_speculative_tokens: Size = 3


class DSparkFile(DraftFile, kw_only=True):
    """A DSpark draft's file; its `target_layer_ids` count from 0."""

    model_type: str = "k3_dspark"
    target_layer_ids: list[Index]
    num_target_layers: int | None = None
    mask_token_id: int
    markov_rank: Size
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    # Source: K3 architecture sheet, section 4.3, step 5: N = 7.
    num_speculative_tokens: Size = 7
