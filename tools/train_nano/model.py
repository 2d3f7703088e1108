"""What k3-nano is made of: sizes, image rules, vocabulary, and the modules that are trained."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from k3core.config import ModelConfig, MoeConfig
from k3core.kernels.interface import Kernels
from k3core.kernels.training import training_kernels
from k3core.model.initialise import initialise
from k3core.model.text import TextModel
from k3core.model.vision import VisionModel
from k3core.weights.loading import allocate
from k3core.weights.random_checkpoint import random_config
from k3core.weights.saving import training_config
from k3text.images.config import FILE_NAME as PROCESSOR_FILE
from k3text.images.config import ProcessorConfig, read_processor_config
from k3text.tokenizer import VOCABULARY_FILE, Tokenizer, format_ranks
from k3text.vocabulary import learn_ranks
from train_nano.scenes import CLASSES, NUM_COLUMNS

NUM_RANKS = 2048
"""Enough for every known word of the lessons to be one token."""

SEED = 20260
SHORTEST_WORD = 2
LIKENESS = 0.9
"""Of a word's forms at the start, as a cosine."""

MAX_PATCHES = 64
"""Patches of a picture before padding: 112 x 112 pixels of a square one, 16 tokens."""

OBJECT_OUTPUTS = len(CLASSES) + 1 + NUM_COLUMNS + 2
"""What the auxiliary head says of each vision token: a class or none, its column in the picture,
and where in the cell."""


@dataclass(frozen=True, slots=True)
class Nano:
    """Everything that training changes.

    Attributes:
        config: of the checkpoint to be written.
        text: the language model, experts plain.
        vision: tower and projector.
        objects: [outputs, D], the auxiliary head of the vision tokens; not shipped.
    """

    config: ModelConfig
    text: TextModel
    vision: VisionModel
    objects: torch.nn.Parameter

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Every parameter by a name of its own."""
        named = {f"text.{name}": p for name, p in self.text.named_parameters()}
        named |= {f"vision.{name}": p for name, p in self.vision.named_parameters()}
        return named | {"objects": self.objects}


def fused_rows(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Rows of each projection in the matrices that the modules fuse, by parameter name."""
    text = config.text
    assert text.kda is not None, "nano has KDA layers"
    assert text.mla is not None, "nano has MLA layers"
    assert text.moe is not None, "nano has experts"
    width, heads, mla = text.kda.width, text.kda.num_heads, text.mla
    query = mla.q_lora_rank or mla.num_heads * mla.query_dim
    kda = (width, width, width, text.kda.head_dim, heads, width)
    latent = (query, mla.kv_lora_rank, mla.rope_dim, mla.num_heads * mla.value_dim)
    rows: dict[str, tuple[int, ...]] = {}
    for index, kind in enumerate(text.attention):
        layer = f"text.layers.{index}"
        rows[f"{layer}.attention.in_proj"] = kda if kind == "kda" else latent
        rows[f"{layer}.attention.kv_b_proj"] = (mla.nope_dim, mla.value_dim) * mla.num_heads
        rows[f"{layer}.mlp.gate_up"] = (text.intermediate_size,) * 2
        rows[f"{layer}.mlp.shared.gate_up"] = (
            text.moe.num_shared_experts * text.moe.intermediate_size,
        ) * 2
        rows[f"{layer}.mlp.w13"] = (text.moe.intermediate_size,) * 2
    return rows


def nano_config() -> ModelConfig:
    """The random micro checkpoint's shape, with a leaner mixture."""
    base = random_config("micro", NUM_RANKS, "bfloat16")
    assert base.text.moe is not None, "micro has a mixture"
    moe: MoeConfig = replace(base.text.moe, experts_per_token=2, num_shared_experts=1)
    return replace(base, text=replace(base.text, moe=moe))


def build_nano(seed: int = SEED, improve: Callable[[Kernels], Kernels] | None = None) -> Nano:
    """Fresh float32 modules; the same seed gives the same weights.

    Args:
        seed: of the weights.
        improve: gives operators that do the same, faster.
    """
    config = nano_config()
    kernels = training_kernels() if improve is None else improve(training_kernels())
    with torch.device("meta"):
        text = TextModel(training_config(config.text), kernels)
        assert config.vision is not None, "nano sees"
        vision = VisionModel(config.vision)
    for module in (text, vision):
        allocate(module, torch.device("cpu"), torch.float32)
        initialise(module, seed)
    for name, parameter in text.named_parameters():
        if name.endswith("mix.proj"):
            # Random mixtures of earlier layers would be noise to be unlearned.
            parameter.data.zero_()
    objects = torch.nn.Parameter(torch.zeros(OBJECT_OUTPUTS, config.text.hidden_size))
    return Nano(config, text, vision, objects)


@torch.no_grad()
def start_words_alike(nano: Nano, tokenizer: Tokenizer) -> None:
    """Lets the forms of a word start as nearly the same: ` wolf`, `wolf`, `_wolf`, `Wolf`.

    Most answers say a word in another form than the one that was read; unrelated rows would
    make every such pair a fact of its own to be learned.
    """
    embed, head = nano.text.embed, nano.text.lm_head
    assert embed is not None, "nano is whole"
    assert head is not None, "nano's head is its own"
    plain: dict[bytes, int] = {}
    for token in range(NUM_RANKS):
        plain.setdefault(tokenizer.token_bytes(token), token)
    for token in range(NUM_RANKS):
        form = tokenizer.token_bytes(token)
        word = form.lstrip(b" _")
        # A name has no form in small letters.
        base = plain.get(word.lower(), plain.get(word, token))
        if base == token or len(word) < SHORTEST_WORD or not word.isalpha():
            continue
        for table in (embed, head):
            table[token] = LIKENESS * table[base] + (1 - LIKENESS**2) ** 0.5 * table[token]


def write_processing(directory: Path, sample: str) -> None:
    """Writes the vocabulary learned from a text, and the image rules.

    Digits stay single tokens: a merge of two would have to be learned by heart.
    """
    ranks = learn_ranks(NUM_RANKS, "".join(c for c in sample if not c.isdigit()))
    (directory / VOCABULARY_FILE).write_bytes(format_ranks(ranks))
    rules = {
        "media_proc_cfg": {
            "patch_size": 14,
            "merge_kernel_size": 2,
            "in_patch_limit": MAX_PATCHES,
            "patch_limit_on_one_side": 16,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
    }
    (directory / PROCESSOR_FILE).write_text(json.dumps(rules, indent=1) + "\n", encoding="utf-8")


def read_processing(directory: Path) -> tuple[Tokenizer, ProcessorConfig]:
    """What `write_processing` wrote."""
    return Tokenizer.from_directory(directory), read_processor_config(directory)
