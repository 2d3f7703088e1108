"""Random K3 checkpoints of a few sizes, with every mechanism of the released one.

For demos, tests and benchmarks: the words they speak mean nothing, but shapes, layer order,
packing and files are K3's.
"""

from pathlib import Path

import torch

from k3core.config import (
    Attention,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    TextConfig,
    VisionConfig,
)
from k3core.kernels.registry import reference_kernels
from k3core.model.initialise import initialise
from k3core.model.text import TextModel
from k3core.model.vision import VisionModel
from k3core.weights.loading import allocate
from k3core.weights.saving import save_checkpoint, training_config

# Three KDA layers to one MLA, and the last two MLA, as in K3.
PATTERNS = {"micro": "KKKMM", "small": "KKKMKKKMM", "medium": "KKKMKKKMKKMM"}
WIDTHS = {"micro": 128, "small": 256, "medium": 512}
SIZES = tuple(PATTERNS)

HEAD_DIM = 32
MAX_POSITIONS = 65_536
# Offsets of special tokens behind the base vocabulary.
# Source: K3 architecture sheet, section 1.4, ids minus 163584.
BOS_OFFSET, END_OF_MSG_OFFSET, MEDIA_PAD_OFFSET, PAD_OFFSET = 0, 2, 21, 255
NUM_SPECIALS = 256


def random_config(size: str, num_base_ranks: int, dtype: str = "float32") -> ModelConfig:
    """The config of a random checkpoint.

    Args:
        size: one of `SIZES`.
        num_base_ranks: ordinary tokens; the 256 specials follow them.
        dtype: name of the dtype it is stored in.
    """
    width = WIDTHS[size]
    return ModelConfig(
        text=_text_config(PATTERNS[size], width, num_base_ranks + NUM_SPECIALS),
        vision=_vision_config(width),
        dtype=dtype,
        bos_token_id=num_base_ranks + BOS_OFFSET,
        eos_token_ids=(num_base_ranks + END_OF_MSG_OFFSET,),
        pad_token_id=num_base_ranks + PAD_OFFSET,
        media_placeholder_token_id=num_base_ranks + MEDIA_PAD_OFFSET,
    )


def write_random_checkpoint(directory: Path, config: ModelConfig, seed: int) -> None:
    """Draw weights and write them with their config; the same seed gives the same bytes."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    text = random_text_model(config.text, seed, dtype)
    vision = None
    if config.vision is not None:
        with torch.device("meta"):
            vision = VisionModel(config.vision)
        allocate(vision, torch.device("cpu"), dtype)
        initialise(vision, seed)
    save_checkpoint(directory, config, text, vision)


def random_text_model(config: TextConfig, seed: int, dtype: torch.dtype) -> TextModel:
    """A language model with random, plain (unpacked) weights and reference kernels."""
    with torch.device("meta"):
        model = TextModel(training_config(config), reference_kernels())
    allocate(model, torch.device("cpu"), dtype)
    initialise(model, seed)
    return model


def _text_config(pattern: str, width: int, vocab_size: int) -> TextConfig:
    kinds: dict[str, Attention] = {"K": "kda", "M": "mla"}
    heads = width // HEAD_DIM
    return TextConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_layers=len(pattern),
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        attention=tuple(kinds[letter] for letter in pattern),
        is_moe=tuple(index > 0 for index in range(len(pattern))),
        kda=KdaConfig(
            num_heads=heads,
            head_dim=HEAD_DIM,
            conv_width=4,
            gate_lower_bound=-5.0,
            has_full_rank_gate=True,
        ),
        mla=MlaConfig(
            num_heads=heads,
            q_lora_rank=width // 2,
            kv_lora_rank=48 * width // 128,
            nope_dim=24,
            rope_dim=8,
            value_dim=HEAD_DIM,
            has_output_gate=True,
            latent_norm_eps=1e-6,
        ),
        moe=MoeConfig(
            num_experts=16,
            experts_per_token=4,
            num_shared_experts=2,
            intermediate_size=width // 2,
            latent_size=width // 2,
            has_latent_norm=True,
            router_score="sigmoid",
            num_groups=1,
            groups_per_token=1,
            renormalize=True,
            scaling_factor=1.0,
            mxfp4_group=32,
        ),
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        attn_res_block_size=4,
        is_head_tied=False,
        name_prefix="language_model.",
    )


def _vision_config(text_width: int) -> VisionConfig:
    return VisionConfig(
        num_layers=3,
        hidden_size=96,
        intermediate_size=256,
        num_heads=4,
        qkv_hidden_size=128,
        patch_size=14,
        pos_emb_height=8,
        pos_emb_width=8,
        pos_emb_time=4,
        merge_kernel=(2, 2),
        mm_hidden_size=96,
        text_hidden_size=text_width,
        projector_ln_eps=1e-5,
    )
