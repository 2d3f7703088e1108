"""The released names: which checkpoint tensor fills which part of which parameter.

Enters a `TextConfig`; leaves one `Slot` for each tensor of a released checkpoint's language
model. Slots of a parameter partition it, so loading and saving are the same table read in two
directions. The vision tower's parameters carry their released names and need no table.

Source: K3 architecture sheet, section 3.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from k3core.config import KdaConfig, MlaConfig, MoeConfig, TextConfig

Kind: TypeAlias = Literal["model", "float32", "uint8"]

VISION_PREFIXES = ("vision_tower.", "mm_projector.")
DENSE_MLP_LEAVES = frozenset({"gate_proj.weight", "up_proj.weight", "down_proj.weight"})
E2M1_PER_BYTE = 2


@dataclass(frozen=True, slots=True)
class Slot:
    """One checkpoint tensor's place.

    Attributes:
        parameter: name in `TextModel`.
        shape: of the tensor in the checkpoint.
        kind: dtype in the checkpoint and in memory: the model's own, float32, or packed bytes.
        rows: rows [low, high) of the parameter (of the expert, if there is one), or None: all.
        expert: index on the parameter's first axis, or None.
        is_padded: the tensor may be longer than the parameter, whose entries come first
            (`A_log`); `shape` is what we write.
    """

    parameter: str
    shape: tuple[int, ...]
    kind: Kind = "model"
    rows: tuple[int, int] | None = None
    expert: int | None = None
    is_padded: bool = False


def text_slots(config: TextConfig) -> dict[str, Slot]:
    """The slot of every tensor of the language model, by its checkpoint name, in layer order."""
    hidden, prefix = config.hidden_size, f"{config.name_prefix}model."
    slots = {f"{prefix}embed_tokens.weight": Slot("embed", (config.vocab_size, hidden))}
    for index in range(config.num_layers):
        for name, slot in _layer_slots(config, index):
            parameter = f"layers.{index}.{slot.parameter}"
            slots[f"{prefix}layers.{index}.{name}"] = replace(slot, parameter=parameter)
    slots[f"{prefix}norm.weight"] = Slot("norm", (hidden,))
    if config.attn_res_block_size is not None:
        slots[f"{prefix}output_attn_res_norm.weight"] = Slot("output_mix.norm", (hidden,))
        slots[f"{prefix}output_attn_res_proj.weight"] = Slot("output_mix.proj", (1, hidden))
    if not config.is_head_tied:
        name = f"{config.name_prefix}lm_head.weight"
        slots[name] = Slot("lm_head", (config.vocab_size, hidden))
    return slots


def released_spelling(name: str) -> str:
    """A tensor's released name; transformers saves the dense MLPs of Kimi-Linear otherwise."""
    room, _, leaf = name.partition(".block_sparse_moe.")
    return f"{room}.mlp.{leaf}" if leaf in DENSE_MLP_LEAVES else name


def layer_of(name: str, config: TextConfig) -> int | None:
    """Index of the decoder layer that a checkpoint name belongs to, or None."""
    prefix = f"{config.name_prefix}model.layers."
    if not name.startswith(prefix):
        return None
    return int(name[len(prefix) :].split(".", 1)[0])


def _layer_slots(config: TextConfig, index: int) -> Iterator[tuple[str, Slot]]:
    hidden = config.hidden_size
    yield "input_layernorm.weight", Slot("input_norm", (hidden,))
    yield "post_attention_layernorm.weight", Slot("post_attention_norm", (hidden,))
    if config.attn_res_block_size is not None:
        for name, parameter in (("self_attention", "attention_mix"), ("mlp", "mlp_mix")):
            yield f"{name}_res_norm.weight", Slot(f"{parameter}.norm", (hidden,))
            yield f"{name}_res_proj.weight", Slot(f"{parameter}.proj", (1, hidden))
    if config.attention[index] == "kda":
        assert config.kda is not None, "a KDA layer has KDA's sizes"
        attention = _kda_slots(config.kda, hidden)
    else:
        assert config.mla is not None, "an MLA layer has MLA's sizes"
        attention = _mla_slots(config.mla, hidden)
    for name, slot in attention:
        yield f"self_attn.{name}", replace(slot, parameter=f"attention.{slot.parameter}")
    if config.is_moe[index]:
        assert config.moe is not None, "a mixture layer has a mixture's sizes"
        mlp, room = _moe_slots(config.moe, hidden), "block_sparse_moe"
    else:
        mlp, room = _mlp_slots(config.intermediate_size, hidden), "mlp"
    for name, slot in mlp:
        yield f"{room}.{name}", replace(slot, parameter=f"mlp.{slot.parameter}")


def _kda_slots(kda: KdaConfig, hidden: int) -> Iterator[tuple[str, Slot]]:
    width, dim, heads = kda.width, kda.head_dim, kda.num_heads
    gate_name, gate_rows = ("g_proj", width) if kda.has_full_rank_gate else ("g_a_proj", dim)
    yield from _stacked(
        "in_proj",
        hidden,
        {
            "q_proj.weight": width,
            "k_proj.weight": width,
            "v_proj.weight": width,
            "f_a_proj.weight": dim,
            "b_proj.weight": heads,
            f"{gate_name}.weight": gate_rows,
        },
    )
    yield "f_b_proj.weight", Slot("f_b_proj", (width, dim))
    if not kda.has_full_rank_gate:
        yield "g_b_proj.weight", Slot("g_b_proj", (width, dim))
    yield "o_proj.weight", Slot("o_proj", (hidden, width))
    for place, stream in enumerate("qkv"):
        rows = (place * width, (place + 1) * width)
        shape = (width, 1, kda.conv_width)
        yield f"{stream}_conv1d.weight", Slot("conv", shape, "float32", rows)
    # Source: K3 architecture sheet, section 2.3, step 4: K3 pads to the head's width.
    num_stored = heads if kda.gate_lower_bound is None else max(heads, dim)
    yield "A_log", Slot("a_log", (num_stored,), "float32", is_padded=True)
    yield "dt_bias", Slot("dt_bias", (width,), "float32")
    yield "o_norm.weight", Slot("o_norm", (dim,), "float32")


def _mla_slots(mla: MlaConfig, hidden: int) -> Iterator[tuple[str, Slot]]:
    rank, out_width = mla.q_lora_rank, mla.num_heads * mla.value_dim
    query_rows = mla.num_heads * mla.query_dim
    stacked = {"q_proj.weight": query_rows} if rank is None else {"q_a_proj.weight": rank}
    stacked["kv_a_proj_with_mqa.weight"] = mla.row_dim
    if mla.has_output_gate:
        stacked["g_proj.weight"] = out_width
    yield from _stacked("in_proj", hidden, stacked)
    if rank is not None:
        yield "q_a_layernorm.weight", Slot("q_a_norm", (rank,))
        yield "q_b_proj.weight", Slot("q_b_proj", (query_rows, rank))
    yield "kv_a_layernorm.weight", Slot("kv_a_norm", (mla.kv_lora_rank,))
    kv_rows = mla.num_heads * (mla.nope_dim + mla.value_dim)
    yield "kv_b_proj.weight", Slot("kv_b_proj", (kv_rows, mla.kv_lora_rank))
    yield "o_proj.weight", Slot("o_proj", (hidden, out_width))


def _mlp_slots(width: int, hidden: int) -> Iterator[tuple[str, Slot]]:
    yield from _stacked("gate_up", hidden, {"gate_proj.weight": width, "up_proj.weight": width})
    yield "down_proj.weight", Slot("down", (hidden, width))


def _moe_slots(moe: MoeConfig, hidden: int) -> Iterator[tuple[str, Slot]]:
    latent = moe.latent_size
    yield "gate.weight", Slot("router", (moe.num_experts, hidden))
    yield "gate.e_score_correction_bias", Slot("router_bias", (moe.num_experts,), "float32")
    if latent is not None:
        yield "routed_expert_down_proj.weight", Slot("latent_down", (latent, hidden))
        yield "routed_expert_up_proj.weight", Slot("latent_up", (hidden, latent))
    if latent is not None and moe.has_latent_norm:
        yield "routed_expert_norm.weight", Slot("latent_norm", (latent,))
    if moe.num_shared_experts:
        for name, slot in _mlp_slots(moe.num_shared_experts * moe.intermediate_size, hidden):
            yield f"shared_experts.{name}", replace(slot, parameter=f"shared.{slot.parameter}")
    for expert in range(moe.num_experts):
        yield from _expert_slots(moe, latent or hidden, expert)


def _expert_slots(moe: MoeConfig, width: int, expert: int) -> Iterator[tuple[str, Slot]]:
    """w1 (gate) and w3 (up) are the halves of `w13`; w2 (down) stands alone."""
    middle, group = moe.intermediate_size, moe.mxfp4_group
    for name, parameter, out_rows, columns, rows in (
        ("w1", "w13", middle, width, (0, middle)),
        ("w2", "w2", width, middle, None),
        ("w3", "w13", middle, width, (middle, 2 * middle)),
    ):
        stem = f"experts.{expert}.{name}"
        if group is None:
            shape = (out_rows, columns)
            yield f"{stem}.weight", Slot(parameter, shape, rows=rows, expert=expert)
            continue
        packed = (out_rows, columns // E2M1_PER_BYTE)
        scale = (out_rows, columns // group)
        yield f"{stem}.weight_packed", Slot(parameter, packed, "uint8", rows, expert)
        yield f"{stem}.weight_scale", Slot(f"{parameter}_scale", scale, "uint8", rows, expert)


def _stacked(
    parameter: str, columns: int, rows_by_name: dict[str, int]
) -> Iterator[tuple[str, Slot]]:
    """Slots of matrices that share an input and lie one under the other."""
    low = 0
    for name, rows in rows_by_name.items():
        yield name, Slot(parameter, (rows, columns), rows=(low, low + rows))
        low += rows
