"""What a draft is, read from its `config.json`: sizes, taps of the target, tokens a round.

Two shapes are known, told apart by `architectures`: the EAGLE-3.1 head with one MLA layer, and
the DSpark block draft. They name the layers they tap in different ways; here a tap is always a
0-based layer of the target and the stream that is read after it.

Source: K3 architecture sheet, sections 4.2 and 4.3; keys as in the released `config.json` of
`Inferact/Kimi-K3-DSpark` and of the EAGLE-3.1 heads for this family.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from k3core.config import ConfigError, TextConfig
from k3core.drafts.config_file import (
    DraftFile,
    DSparkFile,
    EagleAuxFile,
    EagleFile,
    RopeFile,
    ShapeFile,
)

TapStream: TypeAlias = Literal["stream", "mixture"]
"""`stream`: the running stream after a layer; `mixture`: what AttnRes gives the next layer."""

CONFIG_NAME = "config.json"
EAGLE = "Eagle3DeepseekV2ForCausalLM"
DSPARK = "K3DSparkModel"
NUM_EAGLE_TAPS = 3


@dataclass(frozen=True, slots=True)
class Yarn:
    """Rotary frequencies stretched for long contexts.

    Attributes:
        factor: by which slow frequencies are slowed.
        original_positions: context length before stretching.
        beta_fast: turns within it from which a frequency is left alone.
        beta_slow: turns up to which it is slowed in full.
        mscale_all_dim: weight of the logits' correction; 0 for none.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True)
class DraftAttention:
    """Latent attention with rotated keys and no output gate.

    Attributes:
        num_heads: N.
        q_lora_rank: width of the query's bottleneck.
        kv_lora_rank: C, width of the cached latent.
        nope_dim: K, key width of one head that comes from the latent.
        rope_dim: R, key width shared by all heads, rotated in adjacent pairs; even.
        value_dim: V, value width of one head.
        rope_theta: base of the rotary frequencies.
        yarn: None for plain ones.
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope_theta: float
    yarn: Yarn | None = None

    @property
    def query_dim(self) -> int:
        """Width of one head's query: K + R."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Elements of one cached row: C + R."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class Taps:
    """Hidden rows of the target that a draft reads.

    Attributes:
        layers: 0-based indices of the target's layers, in the order they are concatenated.
        stream: which of the two streams after those layers. The wrong one only costs
            acceptance, so it is always the config that says.
    """

    layers: tuple[int, ...]
    stream: TapStream = "stream"

    @property
    def names(self) -> tuple[str, ...]:
        """As `TextModel.forward` knows them."""
        return tuple(f"layer{layer}.{self.stream}" for layer in self.layers)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What both drafts have.

    Attributes:
        hidden_size: D, of the draft and of the target.
        intermediate_size: F of the dense SiLU MLPs.
        vocab_size: of draft and target.
        rms_norm_eps: of every norm.
        attention: of every layer.
        taps: of the target.
        num_tokens: N, drafted in a round unless fewer are asked for.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    attention: DraftAttention
    taps: Taps
    num_tokens: int

    @property
    def taps_width(self) -> int:
        """Width of one row of concatenated taps."""
        return len(self.taps.layers) * self.hidden_size


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """An EAGLE-3.1 head: three taps, one layer, a head of its own."""

    shape: DraftShape


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """A DSpark block draft.

    Attributes:
        shape: sizes.
        num_layers: dense layers.
        mask_token_id: whose embedding stands at the positions to be drafted.
        markov_rank: width of the token-to-token correction.
    """

    shape: DraftShape
    num_layers: int
    mask_token_id: int
    markov_rank: int


DraftConfig: TypeAlias = EagleConfig | DSparkConfig


def load_draft_config(directory: Path) -> DraftConfig:
    """Read `config.json` of a draft's directory.

    Raises:
        ConfigError: the file is absent, malformed, or of a draft that this code cannot run.
    """
    path = directory / CONFIG_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return parse_draft_config(data)


def parse_draft_config(data: bytes) -> DraftConfig:
    """Turn the JSON text of a draft's `config.json` into its config.

    Raises:
        ConfigError: a key is missing, malformed, or asks for what these drafts cannot do.
    """
    try:
        names = msgspec.json.decode(data, type=ShapeFile).architectures
        if EAGLE in names:
            return _eagle_of(msgspec.json.decode(data, type=EagleFile))
        if DSPARK in names:
            return _dspark_of(msgspec.json.decode(data, type=DSparkFile))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"draft's {CONFIG_NAME}: {error}") from error
    raise ConfigError(f"architectures {names} is neither {EAGLE} nor {DSPARK}")


def format_draft_config(config: DraftConfig) -> bytes:
    """The JSON text that `parse_draft_config` reads back into the same config."""
    match config:
        case EagleConfig():
            file = _eagle_file(config)
        case DSparkConfig():
            file = _dspark_file(config)
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def check_target(config: DraftConfig, target: TextConfig) -> None:
    """Hold a draft against the model it is to draft for.

    Raises:
        ConfigError: widths or vocabularies differ, or a tap lies beyond the target's layers.
    """
    shape = config.shape
    for name, mine, theirs in (
        ("hidden_size", shape.hidden_size, target.hidden_size),
        ("vocab_size", shape.vocab_size, target.vocab_size),
    ):
        if mine != theirs:
            raise ConfigError(f"draft's {name} {mine} is not the target's {theirs}")
    if max(shape.taps.layers) >= target.num_layers:
        raise ConfigError(f"draft taps {shape.taps.names} of {target.num_layers} layers")


def _eagle_of(file: EagleFile) -> EagleConfig:
    if not file.fc_norm or not file.norm_output:
        raise ConfigError("an EAGLE head without fc_norm and norm_output is not EAGLE-3.1")
    if file.draft_vocab_size not in (None, file.vocab_size):
        raise ConfigError(f"draft_vocab_size {file.draft_vocab_size}: reduced vocabulary")
    if file.num_hidden_layers != 1:
        raise ConfigError(f"num_hidden_layers {file.num_hidden_layers} of an EAGLE head is not 1")
    completed = file.eagle_config.eagle_aux_hidden_state_layer_ids
    if len(completed) != NUM_EAGLE_TAPS or min(completed) < 1:
        raise ConfigError(f"eagle_aux_hidden_state_layer_ids {completed}: not three from 1 on")
    # Released EAGLE heads count completed layers, so 1 is the stream after layer 0.
    return EagleConfig(_shape_of(file, [number - 1 for number in completed]))


def _dspark_of(file: DSparkFile) -> DSparkConfig:
    if file.draft_vocab_size not in (None, file.vocab_size):
        raise ConfigError(f"draft_vocab_size {file.draft_vocab_size}: reduced vocabulary")
    if file.markov_head_type != "vanilla":
        raise ConfigError(f"markov_head_type {file.markov_head_type!r} is not vanilla")
    if not file.enable_confidence_head or not file.confidence_head_with_markov:
        raise ConfigError("a DSpark draft without a confidence head over the Markov row")
    if not file.target_layer_ids:
        raise ConfigError("target_layer_ids is empty")
    if not 0 <= file.mask_token_id < file.vocab_size:
        raise ConfigError(f"mask_token_id {file.mask_token_id} lies beyond the vocabulary")
    return DSparkConfig(
        shape=_shape_of(file, file.target_layer_ids),
        num_layers=file.num_hidden_layers,
        mask_token_id=file.mask_token_id,
        markov_rank=file.markov_rank,
    )


def _shape_of(file: DraftFile, layers: Sequence[int]) -> DraftShape:
    if file.target_hidden_size not in (None, file.hidden_size):
        raise ConfigError(f"target_hidden_size {file.target_hidden_size} is not the draft's")
    if file.mla_use_output_gate or file.mla_use_nope:
        raise ConfigError("mla_use_output_gate, mla_use_nope: drafts are rotated and ungated")
    if file.qk_rope_head_dim % 2:
        raise ConfigError(f"qk_rope_head_dim {file.qk_rope_head_dim} is odd")
    attention = DraftAttention(
        num_heads=file.num_attention_heads,
        q_lora_rank=file.q_lora_rank,
        kv_lora_rank=file.kv_lora_rank,
        nope_dim=file.qk_nope_head_dim,
        rope_dim=file.qk_rope_head_dim,
        value_dim=file.v_head_dim,
        rope_theta=file.rope_theta,
        yarn=_yarn_of(file.rope_parameters or file.rope_scaling),
    )
    return DraftShape(
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        vocab_size=file.vocab_size,
        rms_norm_eps=file.rms_norm_eps,
        attention=attention,
        taps=Taps(tuple(layers), file.target_stream),
        num_tokens=file.num_speculative_tokens,
    )


def _yarn_of(file: RopeFile | None) -> Yarn | None:
    if file is None:
        return None
    kind = file.rope_type or file.type
    if kind in (None, "default"):
        return None
    if kind != "yarn":
        raise ConfigError(f"rope_type {kind!r} is neither default nor yarn")
    if file.factor is None or file.original_max_position_embeddings is None:
        raise ConfigError("rope_parameters: yarn has a factor and original_max_position_embeddings")
    if file.mscale != file.mscale_all_dim:
        raise ConfigError("rope_parameters: mscale differs from mscale_all_dim")
    return Yarn(
        factor=file.factor,
        original_positions=file.original_max_position_embeddings,
        beta_fast=file.beta_fast,
        beta_slow=file.beta_slow,
        mscale_all_dim=file.mscale_all_dim,
    )


def _eagle_file(config: EagleConfig) -> EagleFile:
    shape = config.shape
    completed = [layer + 1 for layer in shape.taps.layers]
    return EagleFile(
        architectures=[EAGLE],
        num_hidden_layers=1,
        rope_scaling=_rope_file(shape.attention),
        fc_norm=True,
        norm_output=True,
        eagle_config=EagleAuxFile(eagle_aux_hidden_state_layer_ids=completed),
        **_shape_keys(shape),
    )


def _dspark_file(config: DSparkConfig) -> DSparkFile:
    shape = config.shape
    return DSparkFile(
        architectures=[DSPARK],
        num_hidden_layers=config.num_layers,
        rope_parameters=_rope_file(shape.attention),
        target_layer_ids=list(shape.taps.layers),
        num_target_layers=len(shape.taps.layers),
        mask_token_id=config.mask_token_id,
        markov_rank=config.markov_rank,
        **_shape_keys(shape),
    )


def _shape_keys(shape: DraftShape) -> dict[str, Any]:
    """The keys that `_shape_of` reads; `Any` because they are arguments of several types."""
    attention = shape.attention
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": attention.num_heads,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": attention.rope_theta,
        "target_stream": shape.taps.stream,
        "num_speculative_tokens": shape.num_tokens,
    }


def _rope_file(attention: DraftAttention) -> RopeFile | None:
    yarn = attention.yarn
    if yarn is None:
        return None
    return RopeFile(
        rope_type="yarn",
        rope_theta=attention.rope_theta,
        factor=yarn.factor,
        original_max_position_embeddings=yarn.original_positions,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        mscale=yarn.mscale_all_dim,
        mscale_all_dim=yarn.mscale_all_dim,
    )
