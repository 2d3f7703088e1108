"""The operators a model needs, as one struct of callables with agreed arguments.

The model is handed a `Kernels` and calls nothing else that a backend could do better. Each
operator's truth is plain torch, in `<operator>/reference.py`; a backend replaces single
fields and must meet the reference at the tolerance it states. Every reference but the ones
that write into cache views is differentiable.

Letters: B sequences, T packed tokens, D model width, L expert width (latent or D), F width of
an MLP's middle, N MLA heads, H KDA heads, K key width, V value width, C latent width, R shared
key width, W convolution taps, E experts, S block snapshots, P pages, U tokens a unit,
Q channels of the convolution: 2 * H * K + H * V.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from k3core.config import RouterScore


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """Small weights of one KDA layer, all float32.

    Attributes:
        conv: [Q, W], depthwise taps, q | k | v channels; the last tap meets the current token.
        a_log: [H], log of the decay rate of each head.
        dt_bias: [H, K], added to the raw gate.
        lower_bound: L < 0 of the bounded gate g = L * sigmoid(exp(a_log) * (raw + dt_bias)),
            or None: g = -exp(a_log) * softplus(raw + dt_bias), which knows no bound.
    """

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None


@dataclass(frozen=True, slots=True)
class KdaInputs:
    """What one KDA layer projected for the packed tokens; dtype of the model, may be strided.

    Attributes:
        qkv: [T, Q], q | k | v before the convolution, rows may be slices of a wider tensor.
        gate: [T, H, K], raw decay gate, before dt_bias.
        beta: [T, H], logits of the write strength.
    """

    qkv: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True, slots=True)
class KdaStates:
    """State pools of one KDA layer, strided views over the page arena, written in place.

    Attributes:
        recurrent: [P, H, V, K], float32, V first.
        conv: [P, W - 1, Q], model dtype, oldest row first.
    """

    recurrent: torch.Tensor
    conv: torch.Tensor


@dataclass(frozen=True, slots=True)
class KdaPlan:
    """Where the chunks lie and where their states live, for all layers of one KDA group.

    Attributes:
        starts: B + 1 rows; chunk b is packed rows starts[b]..starts[b + 1], never empty.
        has_state: B flags: False starts from zeros and never reads the page.
        pages: B live pages, read (if has_state) before and overwritten after the chunk.
        page_ids: [B], `pages` as int64 tensor on the device of the states.
        state_mask: [B], `has_state` as bool tensor on the device of the states.
        exports: (sequence, tokens consumed in this chunk, page): a copy of recurrent and
            convolution state after that many tokens; ascending offsets within a sequence;
            an offset may equal the chunk's length; its page is no live page of the batch.
    """

    starts: tuple[int, ...]
    has_state: tuple[bool, ...]
    pages: tuple[int, ...]
    page_ids: torch.Tensor
    state_mask: torch.Tensor
    exports: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """`kv_b_proj` of one MLA layer in both of its forms; model dtype.

    Attributes:
        kv_b: [N * (K + V), C], per head K key rows then V value rows.
        key_dim: K, the key width that comes from the latent.
        value_dim: V.
        scale: of the logits: (K + R) ** -0.5.
    """

    kv_b: torch.Tensor
    key_dim: int
    value_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class MlaPlan:
    """Which cached rows each chunk attends to. The chunk's own rows are already written.

    Attributes:
        starts: B + 1 rows; chunk b is query rows starts[b]..starts[b + 1], never empty.
        contexts: B host integers, tokens before the chunk; query row i of chunk b sees the
            first contexts[b] + i + 1 tokens of its sequence.
        unit_tables: [B, max_units], int64, the device of the rows: unit ids in token order;
            unit u is view[u // page_units, u % page_units].
    """

    starts: tuple[int, ...]
    contexts: tuple[int, ...]
    unit_tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class Activation:
    """The gated activation of an MLP, in float32, cast back.

    silu: silu(gate) * up. situ (beta set): beta * tanh(gate / beta) * sigmoid(gate)
    * (linear_beta * tanh(up / linear_beta), or up where linear_beta is None).

    Source: K3 architecture sheet, section 2.5.
    """

    beta: float | None
    linear_beta: float | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Routed experts of one layer, plain or MXFP4; exactly one pair of forms is set.

    MXFP4: two elements a byte, low nibble first, one E8M0 scale for `group` input elements.

    Attributes:
        w13: [E, 2F, L] plain (gate rows, then up rows), or uint8 [E, 2F, L / 2] packed.
        w13_scale: uint8 [E, 2F, L / group], or None for plain weights.
        w2: [E, L, F] plain, or uint8 [E, L, F / 2] packed.
        w2_scale: uint8 [E, L, F / group], or None.
        group: input elements that share a scale.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    group: int


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How experts are chosen from their logits.

    s = score(logits); the best `experts_per_token` of s + bias (within the best groups) are
    taken; their weights are s without the bias, divided by their sum + 1e-20 if
    `renormalize`, times `scaling_factor`.

    Source: K3 architecture sheet, section 2.6.
    """

    experts_per_token: int
    score: RouterScore
    num_groups: int
    groups_per_token: int
    renormalize: bool
    scaling_factor: float


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operators of one backend, chosen once at start by `registry.select_kernels`.

    Outputs are new tensors in the dtype of the first tensor argument unless said otherwise.

    Attributes:
        name: of the backend, for logs and fingerprints.
        reason: why it was chosen, for logs.
        checkpoint_alignment: exports' offsets must be multiples of it; 1 for no rule.
        linear: (x [..., I], weight [O, I]) -> [..., O].
        prepare_weight: (weight [O, I]) -> None: told of a weight that `linear` will be given and
            nobody will change any more; a backend may keep it in a better order too.
        rms_norm: (x_TD, weight_D, eps) -> TD: weight * cast(x32 * rsqrt(mean x32^2 + eps)).
        gated_rms_norm: (o_THV float32, weight_V float32, gate_THV, eps) -> THV in the dtype of
            gate: rms_norm in float32, times the weight, times sigmoid(gate).
        activate: (gate_up_TF2 [T, 2F]: gate | up, Activation) -> [T, F].
        attn_res_mix: (x_TD, snapshots S x [T, D], query_D float32 = norm weight * projection,
            eps) -> TD: softmax-weighted sum over snapshots, then x, in float32.
        attn_res_norm: (x_TD, snapshots, query_D, mix_eps, weight_D, norm_eps) -> TD:
            rms_norm(attn_res_mix(...)), which a backend may fuse.
        kda_prefill: (KdaInputs, KdaWeights, KdaPlan, KdaStates) -> o_THV float32: convolution,
            SiLU, L2 norms, gate, recurrence; reads and writes the states; any chunk lengths.
        kda_decode: the same arguments; every chunk is one token and there are no exports.
        kda_dense: (KdaInputs with leading [B, T] axes, KdaWeights) -> [B, T, H, V] float32:
            from zero states, no cache, differentiable; for training.
        mla_dense: (q_BTNX, rows_BTX [B, T, C + R], MlaWeights) -> [B, T, N, V]: causal within
            each row of the batch, no cache, differentiable; for training.
        mla_write: (latent_PGUX [P, page_units, U, C + R], rows_TX, units_T int64,
            places_T int64) -> None: writes packed row t to place places_T[t] of its unit.
        mla_prefill: (q_TNX [T, N, K + R], latent_PGUX, MlaWeights, MlaPlan) -> [T, N, V]:
            expanded form; for long chunks.
        mla_decode: the same arguments and result: absorbed form; for few query rows.
        route: (logits_TE float32, bias_E float32 or None, RouterRule) -> (ids_Tk int64,
            weights_Tk float32), k in any order.
        experts: (x_TL, ids_Tk, weights_Tk, ExpertWeights, Activation) -> TL: the weighted sum
            over the chosen experts, accumulated in float32.
    """

    name: str
    reason: str
    checkpoint_alignment: int
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    prepare_weight: Callable[[torch.Tensor], None]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    gated_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    activate: Callable[[torch.Tensor, Activation], torch.Tensor]
    attn_res_mix: Callable[
        [torch.Tensor, Sequence[torch.Tensor], torch.Tensor, float], torch.Tensor
    ]
    attn_res_norm: Callable[
        [torch.Tensor, Sequence[torch.Tensor], torch.Tensor, float, torch.Tensor, float],
        torch.Tensor,
    ]
    kda_prefill: Callable[[KdaInputs, KdaWeights, KdaPlan, KdaStates], torch.Tensor]
    kda_decode: Callable[[KdaInputs, KdaWeights, KdaPlan, KdaStates], torch.Tensor]
    kda_dense: Callable[[KdaInputs, KdaWeights], torch.Tensor]
    mla_dense: Callable[[torch.Tensor, torch.Tensor, MlaWeights], torch.Tensor]
    mla_write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    mla_prefill: Callable[[torch.Tensor, torch.Tensor, MlaWeights, MlaPlan], torch.Tensor]
    mla_decode: Callable[[torch.Tensor, torch.Tensor, MlaWeights, MlaPlan], torch.Tensor]
    route: Callable[
        [torch.Tensor, torch.Tensor | None, RouterRule], tuple[torch.Tensor, torch.Tensor]
    ]
    experts: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights, Activation], torch.Tensor
    ]
