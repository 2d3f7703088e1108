"""The argument structs of the native entry points, field for field as in the C sources.

Pointers are addresses of tensors' data; strides count elements.
"""

import ctypes
from collections.abc import Iterable

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64
_INT = ctypes.c_int32
_FLOAT = ctypes.c_float

_Fields = list[tuple[str, type]]


def _fields(*groups: tuple[type, str]) -> _Fields:
    """(type, "name name ...") groups as ctypes wants them."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class KdaArgs(ctypes.Structure):
    """`kda_args` of kda.c."""

    _fields_ = _fields(
        (_POINTER, "qkv gate beta"),
        (_LONG, "qkv_row gate_row gate_head beta_row beta_head"),
        (_POINTER, "conv a_log dt_bias starts pages exports has_state state window"),
        (_LONG, "state_page window_page window_row"),
        (_POINTER, "out"),
        (_LONG, "num_sequences num_exports H K V W"),
        (_INT, "input_type window_type bounded"),
        (_FLOAT, "lower_bound"),
    )


class KdaTrainArgs(ctypes.Structure):
    """`kda_train_args` of kda_train.c."""

    _fields_ = _fields(
        (_POINTER, "q k decay v beta o kept d_o d_q d_k d_decay d_v d_beta"), (_LONG, "B T H K V")
    )


class LinearArgs(ctypes.Structure):
    """`linear_args` of linear.h."""

    _fields_ = _fields(
        (_POINTER, "x w out"), (_LONG, "x_row w_row out_row M N K"), (_INT, "w_type out_type")
    )


class ActivationArgs(ctypes.Structure):
    """`activation` of activation.h."""

    _fields_ = _fields((_FLOAT, "beta linear_beta"))


class ExpertArgs(ctypes.Structure):
    """`expert_args` of experts.c."""

    _fields_ = [
        *_fields(
            (_POINTER, "x ids weights w13 w2 w13_scale w2_scale out"),
            (_LONG, "x_row T k E L F group"),
            (_INT, "x_type w_type out_type"),
        ),
        ("act", ActivationArgs),
    ]


class NormArgs(ctypes.Structure):
    """`norm_args` of rows.c."""

    _fields_ = _fields(
        (_POINTER, "x weight out"),
        (_LONG, "x_row T D"),
        (_INT, "type weight_type"),
        (_FLOAT, "eps"),
    )


class GatedNormArgs(ctypes.Structure):
    """`gated_norm_args` of rows.c."""

    _fields_ = _fields(
        (_POINTER, "o weight gate out"),
        (_LONG, "gate_row gate_head T H V"),
        (_INT, "type"),
        (_FLOAT, "eps"),
    )


class ActivateArgs(ctypes.Structure):
    """`activate_args` of rows.c."""

    _fields_ = [
        *_fields((_POINTER, "gate_up out"), (_LONG, "row T F"), (_INT, "type")),
        ("act", ActivationArgs),
    ]


class MixArgs(ctypes.Structure):
    """`mix_args` of rows.c."""

    _fields_ = _fields(
        (_POINTER, "sources query norm_weight out"),
        (_LONG, "num_sources T D"),
        (_INT, "type weight_type"),
        (_FLOAT, "mix_eps norm_eps"),
    )


class RouteArgs(ctypes.Structure):
    """`route_args` of route.c."""

    _fields_ = _fields(
        (_POINTER, "logits bias ids weights"),
        (_LONG, "T E k num_groups groups_per_token"),
        (_INT, "is_softmax renormalize"),
        (_FLOAT, "scaling"),
    )


class MlaArgs(ctypes.Structure):
    """`mla_args` of mla.c."""

    _fields_ = _fields(
        (_POINTER, "q latent kv_b starts contexts units out"),
        (_LONG, "q_row q_head page_stride unit_stride row_stride table_row"),
        (_LONG, "B N K R V C page_units unit_tokens"),
        (_INT, "q_type latent_type weight_type"),
        (_FLOAT, "scale"),
    )


class MlaWriteArgs(ctypes.Structure):
    """`mla_write_args` of mla.c."""

    _fields_ = _fields(
        (_POINTER, "latent rows units places"),
        (_LONG, "page_stride unit_stride row_stride page_units rows_row T X"),
        (_INT, "latent_type rows_type"),
    )


# Entry points that take one struct by address.
STRUCT_ENTRIES: Iterable[str] = (
    "k3_kda",
    "k3_kda_train_forward",
    "k3_kda_train_backward",
    "k3_linear",
    "k3_linear_panels",
    "k3_experts",
    "k3_rms_norm",
    "k3_gated_rms_norm",
    "k3_activate",
    "k3_attn_res",
    "k3_route",
    "k3_mla_absorbed",
    "k3_mla_expanded",
    "k3_mla_write",
)
