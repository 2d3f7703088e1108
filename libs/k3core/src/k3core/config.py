"""What a checkpoint is, as frozen structs: the words in which every room speaks of sizes.

`k3core.weights.config_file` fills them from a `config.json`. Every layer's kind is spelled
out (0-based) and every optional part is there or is None, so that nothing is left to be
looked up by key.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Attention: TypeAlias = Literal["kda", "mla"]
Activation: TypeAlias = Literal["situ", "silu"]
RouterScore: TypeAlias = Literal["sigmoid", "softmax"]


class ConfigError(ValueError):
    """A `config.json` that does not describe a model this code can run; names the key."""


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """Kimi Delta Attention.

    Attributes:
        num_heads: H.
        head_dim: width K of a key and V of a value of one head.
        conv_width: W, taps of the short causal convolution.
        gate_lower_bound: L of the bounded log decay L * sigmoid(.), or None for the
            unbounded -exp(A) * softplus(.) of Kimi-Linear.
        has_full_rank_gate: output gate is one matrix (`g_proj`), else two (`g_a`, `g_b`).
    """

    num_heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None
    has_full_rank_gate: bool

    @property
    def width(self) -> int:
        """Channels of q, of k and of v: H * K."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention without positions.

    Attributes:
        num_heads: N.
        q_lora_rank: width of the query's bottleneck, or None for a direct projection.
        kv_lora_rank: C, width of the cached latent.
        nope_dim: key width of one head that comes from the latent.
        rope_dim: R, key width shared by all heads; never rotated, may be 0.
        value_dim: V, value width of one head.
        has_output_gate: o is multiplied by sigmoid(g_proj x).
        latent_norm_eps: epsilon of the norms of the two bottlenecks.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    has_output_gate: bool
    latent_norm_eps: float

    @property
    def query_dim(self) -> int:
        """Width of one head's query: the part for the latent, then the shared part."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Elements of one cached row: C + R."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed and shared experts.

    Attributes:
        num_experts: E.
        experts_per_token: experts a token is sent to.
        num_shared_experts: widths of `intermediate_size` in the shared MLP; 0 for none.
        intermediate_size: F of one routed expert.
        latent_size: width the experts work at, or None where they work at the model's.
        has_latent_norm: the sum of the experts is normed before the up projection.
        router_score: how router logits become scores.
        num_groups: groups that the experts are split into for selection; 1 for no grouping.
        groups_per_token: groups a token may choose from.
        renormalize: chosen scores are divided by their sum.
        scaling_factor: multiplies the chosen scores.
        mxfp4_group: input elements that share one scale in packed experts, or None where
            the experts' weights are plain.
    """

    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    latent_size: int | None
    has_latent_norm: bool
    router_score: RouterScore
    num_groups: int
    groups_per_token: int
    renormalize: bool
    scaling_factor: float
    mxfp4_group: int | None


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The language model.

    Attributes:
        hidden_size: D.
        attention: kind of each layer's attention, first layer first.
        is_moe: whether each layer's feed-forward part is the mixture.
        kda: None only if no layer is KDA.
        mla: None only if no layer is MLA.
        moe: None only if no layer is a mixture.
        activation: of every MLP; `situ_*` bound its gate and, unless None, its linear part.
        attn_res_block_size: layers a block of Attention Residuals, or None for plain ones.
        is_head_tied: the head is the embedding.
        name_prefix: what the checkpoint puts before `model.` and `lm_head.`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention: tuple[Attention, ...]
    is_moe: tuple[bool, ...]
    kda: KdaConfig | None
    mla: MlaConfig | None
    moe: MoeConfig | None
    activation: Activation
    situ_beta: float
    situ_linear_beta: float | None
    attn_res_block_size: int | None
    is_head_tied: bool
    name_prefix: str

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based indices of the KDA layers."""
        return tuple(i for i, kind in enumerate(self.attention) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based indices of the MLA layers."""
        return tuple(i for i, kind in enumerate(self.attention) if kind == "mla")


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """MoonViT and its projector. Widths in elements, `patch_size` in pixels.

    Attributes:
        qkv_hidden_size: width of the attention, which need not be `hidden_size`.
        pos_emb_height: rows of the learned position table; `pos_emb_width` its columns.
        pos_emb_time: time steps that position embeddings know.
        merge_kernel: neighbouring patches merged into one token, (rows, columns).
        mm_hidden_size: width of one patch as the projector sees it.
        text_hidden_size: D of the language model.
        projector_ln_eps: epsilon of the projector's last norm.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    qkv_hidden_size: int
    patch_size: int
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int
    merge_kernel: tuple[int, int]
    mm_hidden_size: int
    text_hidden_size: int
    projector_ln_eps: float

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.qkv_hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A whole checkpoint.

    Attributes:
        vision: None for a text-only checkpoint.
        dtype: name of the dtype that the checkpoint says it is stored in.
        eos_token_ids: every token that ends a generation.
        media_placeholder_token_id: whose rows image embeddings replace, or None.
    """

    text: TextConfig
    vision: VisionConfig | None
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    media_placeholder_token_id: int | None
