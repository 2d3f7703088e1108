"""Training both drafts on the target's own lessons, the target frozen.

A draft learns the target's whole distribution, not the lesson's tokens: what is accepted is
decided by the target. Rounds start at random anchors before tokens that an assistant says; the
EAGLE head is unrolled as many steps as it will draft, each reading the one before.

Letters: B rows, A anchors, N drafted tokens, T tokens of a row, V vocabulary.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from k3core.config import TextConfig
from k3core.drafts.config import (
    DraftAttention,
    DraftShape,
    DSparkConfig,
    EagleConfig,
    Taps,
    check_target,
)
from k3core.drafts.dspark import DSparkDraft, TargetTables
from k3core.drafts.eagle import EagleDraft
from k3core.drafts.files import save_draft
from k3core.model.initialise import initialise
from k3text.special_tokens import NUM_SPECIAL_TOKENS, special_id
from train_nano.draft_target import Target, Watched, watch
from train_nano.lessons import MODES, Lessons
from train_nano.optimiser import Optimiser
from train_nano.rows import Row

Kind: TypeAlias = Literal["eagle3", "dspark"]
KINDS: tuple[Kind, ...] = ("eagle3", "dspark")

# Source: the released drafts' numbers of tokens a round, K3 architecture sheet, section 4.
EAGLE_TOKENS, DSPARK_TOKENS = 3, 7
OFFICIAL_MASK_ID = 163_837
EAGLE_TAPS = (1, 3, 4)
"""Of five layers: an early one, the end of the first AttnRes block, and the last."""

ANCHORS_A_ROW = 32
STEPS_A_BATCH = 2
"""The target costs more than a draft's step, so its taps are used again from other anchors."""

BATCH_TOKENS = 1400
PICTURE_ROWS = 4
PICTURE_SHARE, NEEDLE_SHARE = 0.3, 0.35
LATER_FACTOR = 0.9
"""Weight of a drafted token against the one before it, which must be accepted first."""

CONFIDENCE_WEIGHT = 0.2
WARM_UP_STEPS = 20
FLAT_SHARE = 0.5
LAST_FACTOR = 0.02
LOG_STEPS = 50


@dataclass(frozen=True, slots=True)
class Course:
    """How a draft is trained.

    Attributes:
        kind: which draft.
        minutes: of training.
        seed: of weights and lessons.
    """

    kind: Kind
    minutes: float
    seed: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds to be learned from.

    Attributes:
        anchors: [B, A], positions of anchors.
        weight: [B, A, N], of each drafted token; 0 where there is none or it is not learned.
        target: [B, A, N, V], the target's probabilities.
    """

    anchors: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor


def eagle_config(text: TextConfig) -> EagleConfig:
    """The head's shape for a target of nano's depth."""
    return EagleConfig(_shape(text, EAGLE_TAPS, 3 * text.hidden_size, EAGLE_TOKENS))


def dspark_config(text: TextConfig) -> DSparkConfig:
    """The block draft's shape for a target of nano's depth."""
    layers = tuple(range(text.num_layers))
    return DSparkConfig(
        shape=_shape(text, layers, 2 * text.hidden_size, DSPARK_TOKENS),
        num_layers=2,
        mask_token_id=special_id(OFFICIAL_MASK_ID, text.vocab_size - NUM_SPECIAL_TOKENS),
        markov_rank=32,
    )


def fresh_eagle(config: EagleConfig, tables: TargetTables, seed: int) -> EagleDraft:
    """A head that starts from the target's tables and, fused, from its last tap alone."""
    draft = EagleDraft(config)
    initialise(draft, seed)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(tables.embed)
        draft.lm_head.weight.copy_(tables.lm_head)
        draft.fc.weight.zero_()
        width = config.shape.hidden_size
        draft.fc.weight[:, -width:] = torch.eye(width)
    # The same values as the target's, as released.
    draft.embed_tokens.weight.requires_grad_(False)
    return draft


def fresh_dspark(config: DSparkConfig, tables: TargetTables, seed: int) -> DSparkDraft:
    """A block draft whose chain and confidence start by saying nothing."""
    draft = DSparkDraft(config, tables)
    initialise(draft, seed)
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.zero_()
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.bias.zero_()
    return draft


def train_draft(
    target: Target, course: Course, directory: Path, tell: Callable[[str], None]
) -> int:
    """Trains a draft and writes it, bfloat16, to a directory that exists.

    Args:
        target: frozen.
        course: which draft, and for how long.
        directory: to write to.
        tell: given a line now and then.

    Returns:
        Steps taken.
    """
    text, tables = target.nano.config.text, target.tables()
    match course.kind:
        case "eagle3":
            config = eagle_config(text)
            draft = fresh_eagle(config, tables, course.seed)
            loss_of = partial(eagle_loss, draft)
        case "dspark":
            config = dspark_config(text)
            draft = fresh_dspark(config, tables, course.seed)
            loss_of = partial(dspark_loss, draft)
    check_target(config, text)
    optimiser = Optimiser(_optimised(draft))
    lessons = Lessons("train", target.processing)
    begin = time.monotonic()
    told: list[float] = []
    while (share := (time.monotonic() - begin) / (60 * course.minutes)) < 1:
        draw = random.Random(f"{course.kind}/{course.seed}/{optimiser.num_steps}")
        seen = watch(target, _lesson_rows(target, lessons, draw), config.shape.taps.names)
        for _ in range(STEPS_A_BATCH):
            rounds = rounds_of(seen, config.shape.num_tokens, draw.randrange(1 << 32))
            loss = loss_of(seen, rounds)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimiser.step(_rate_factor(share, optimiser.num_steps))
            told.append(loss.item())
        if len(told) >= LOG_STEPS:
            tell(f"{course.kind} step {optimiser.num_steps} loss {sum(told) / len(told):.4f}")
            told.clear()
    save_draft(directory, config, draft, torch.bfloat16)
    return optimiser.num_steps


def eagle_loss(draft: EagleDraft, seen: Watched, rounds: Rounds) -> torch.Tensor:
    """How far the unrolled head's distributions are from the target's."""
    return _soft_loss(draft.unroll(seen.taps, seen.token_ids, rounds.anchors), rounds)


def dspark_loss(draft: DSparkDraft, seen: Watched, rounds: Rounds) -> torch.Tensor:
    """Likewise for the block, and how badly it foretells what will be accepted."""
    output = draft.blocks(seen.taps, seen.token_ids, rounds.anchors)
    # What rejection sampling accepts of a draft: the overlap of the two distributions.
    overlap = torch.minimum(output.logits.detach().softmax(-1), rounds.target).sum(-1)
    doubt = F.binary_cross_entropy_with_logits(
        output.confidence_logits, overlap.clamp(0, 1), reduction="none"
    )
    confidence = (doubt * rounds.weight).sum() / rounds.weight.sum()
    return _soft_loss(output.logits, rounds) + CONFIDENCE_WEIGHT * confidence


def rounds_of(seen: Watched, num_tokens: int, seed: int) -> Rounds:
    """Rounds from random anchors, at most `ANCHORS_A_ROW` a row.

    A round counts up to the end of what the assistant says there: the target drafts nothing of
    what users write.
    """
    length = seen.token_ids.shape[1]
    generator = torch.Generator().manual_seed(seed)
    # A token is an anchor if an assistant says the next one.
    is_anchor = seen.is_learned.roll(-1, dims=1)
    is_anchor[:, 0] = is_anchor[:, -1] = False
    chance = torch.rand(is_anchor.shape, generator=generator) * is_anchor
    count = min(ANCHORS_A_ROW, int(is_anchor.sum(1).max()))
    chances, anchors = chance.topk(count, dim=1)
    # Rows with fewer anchors are filled up with places that weigh nothing.
    is_real = chances > 0
    anchors = torch.where(is_real, anchors, 1)
    places = anchors.unsqueeze(-1) + torch.arange(num_tokens)
    inside = places.clamp(max=length - 2)
    drafted = seen.is_learned.gather(1, inside.flatten(1) + 1).view_as(places)
    drafted = drafted & (places == inside) & is_real.unsqueeze(-1)
    weight = drafted.float().cumprod(-1) * LATER_FACTOR ** torch.arange(num_tokens)
    rows = torch.arange(len(anchors)).view(-1, 1, 1)
    return Rounds(anchors, weight, seen.logits[rows, inside].softmax(-1))


def _soft_loss(logits: torch.Tensor, rounds: Rounds) -> torch.Tensor:
    losses = -(rounds.target * logits.log_softmax(-1)).sum(-1)
    return (losses * rounds.weight).sum() / rounds.weight.sum()


def _lesson_rows(target: Target, lessons: Lessons, draw: random.Random) -> list[Row]:
    """Rows of one kind of lesson, about `BATCH_TOKENS` of them with padding."""
    chance = draw.random()
    if chance < PICTURE_SHARE:
        talks = [lessons.picture(draw) for _ in range(PICTURE_ROWS)]
        return [target.writer.write(talk, draw.choice(MODES), draw) for talk in talks]
    is_needle = chance < PICTURE_SHARE + NEEDLE_SHARE
    rows: list[Row] = []
    while True:
        if is_needle:
            talk = lessons.needle(draw, draw.choice((200, 700, 1800)), draw.randint(1, 6), 5)
        else:
            talk = lessons.text(draw)
        row = target.writer.write(talk, draw.choice(MODES), draw)
        longest = max([len(row.ids), *(len(other.ids) for other in rows)])
        if rows and longest * (len(rows) + 1) > BATCH_TOKENS:
            return rows
        rows.append(row)


def _optimised(draft: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by name; tables are named so that Muon leaves them alone."""
    tables = ("markov_head.", "confidence_head.")
    return {
        f"embed.{name}" if name.startswith(tables) else name: parameter
        for name, parameter in draft.named_parameters()
        if parameter.requires_grad
    }


def _rate_factor(share: float, num_steps: int) -> float:
    if share < FLAT_SHARE:
        return min(1.0, (num_steps + 1) / WARM_UP_STEPS)
    return LAST_FACTOR + (1 - LAST_FACTOR) * (1 - share) / (1 - FLAT_SHARE)


def _shape(
    text: TextConfig, layers: tuple[int, ...], intermediate_size: int, num_tokens: int
) -> DraftShape:
    return DraftShape(
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size,
        vocab_size=text.vocab_size,
        rms_norm_eps=text.rms_norm_eps,
        attention=DraftAttention(
            num_heads=4,
            q_lora_rank=64,
            kv_lora_rank=48,
            nope_dim=24,
            rope_dim=8,
            value_dim=32,
            # Source: the released drafts, K3 architecture sheet, sections 4.2 and 4.3.
            rope_theta=50_000.0,
        ),
        taps=Taps(layers),
        num_tokens=num_tokens,
    )
