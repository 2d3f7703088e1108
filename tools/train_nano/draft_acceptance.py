"""How much of what a draft proposes the target accepts, alone and greedily, on held-out text.

The target answers held-out questions by itself first. Then the draft plays its rounds along each
answer: it accepts the drafts that the answer has at their places, and one token more is the
target's own. Greedy verification in an engine would take exactly these rounds.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from k3core.drafts.dspark import DSparkDraft
from k3core.drafts.eagle import EagleDraft
from k3core.drafts.rounds import Committed
from k3core.engine.single_sequence import Segment, SingleSequence
from train_nano.draft_target import Target, image_places
from train_nano.lessons import Lessons
from train_nano.passes import see
from train_nano.probes import SKILLS
from train_nano.rows import Row

GROUPS: Mapping[str, tuple[str, ...]] = {
    "tools": ("tool call", "tool result"),
    "needle": ("needle, 1k tokens",),
    "pictures": ("colour", "shape", "count", "left or right"),
    "talk": ("variables",),
}
"""Skills of `train_nano.probes` by group."""

MAX_ANSWER_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt and the target's own greedy answer to it.

    Attributes:
        token_ids: [T], both.
        num_prompt: tokens of the prompt.
        taps: rows of every token but the last, by tap name.
    """

    token_ids: torch.Tensor
    num_prompt: int
    taps: Mapping[str, torch.Tensor]


@dataclass(slots=True)
class Tally:
    """Counts over rounds.

    Attributes:
        num_rounds: played.
        num_tokens: committed by them: accepted drafts, and the target's own at each end.
        offered: rounds in which the answer went on as far as each drafted place.
        accepted: of these, rounds in which all drafts up to the place were accepted.
        confidence: sums of what the draft said of each place whose drafts before were accepted.
    """

    num_tokens_drafted: int
    num_rounds: int = 0
    num_tokens: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.offered = [0] * self.num_tokens_drafted
        self.accepted = [0] * self.num_tokens_drafted
        self.confidence = [0.0] * self.num_tokens_drafted

    def figures(self) -> dict[str, object]:
        """As they are written to JSON."""
        share = [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]
        figures: dict[str, object] = {
            "rounds": self.num_rounds,
            "tokens_per_verify": round(self.tokens_per_verify, 3),
            "accepted_up_to": [round(value, 4) for value in share],
        }
        if any(self.confidence):
            asked = [self.offered[0], *self.accepted[:-1]]
            figures["confidence"] = [
                round(total / count, 4) if count else 0.0
                for total, count in zip(self.confidence, asked, strict=True)
            ]
        return figures

    @property
    def tokens_per_verify(self) -> float:
        """Tokens a pass of the target gives; 1 without a draft."""
        return self.num_tokens / max(1, self.num_rounds)

    def add(self, other: "Tally") -> None:
        """Counts another tally's rounds too."""
        self.num_rounds += other.num_rounds
        self.num_tokens += other.num_tokens
        for mine, theirs in ((self.offered, other.offered), (self.accepted, other.accepted)):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]
        pairs = zip(self.confidence, other.confidence, strict=True)
        self.confidence = [a + b for a, b in pairs]


@torch.no_grad()
def answered(
    target: Target, group: str, count: int, seed: int, taps: Sequence[str]
) -> list[Passage]:
    """Held-out questions of a group with the target's greedy answers."""
    lessons = Lessons("held_out", target.processing)
    draw = random.Random(f"drafts/{group}/{seed}")
    passages: list[Passage] = []
    while len(passages) < count:
        skill = SKILLS[GROUPS[group][len(passages) % len(GROUPS[group])]]
        talk = skill.make(lessons, draw)
        passages.append(_answer(target, target.writer.write(talk, skill.mode, draw), taps))
    return passages


@torch.no_grad()
def play(draft: EagleDraft | DSparkDraft, passages: Iterable[Passage]) -> Tally:
    """Drafts along answers, round after round."""
    shape = draft.config.shape
    tally = Tally(shape.num_tokens)
    for passage in passages:
        ids = passage.token_ids
        rows = torch.cat([passage.taps[name] for name in shape.taps.names], dim=-1)
        cache = draft.new_cache(len(ids) + shape.num_tokens)
        anchor, last = passage.num_prompt, len(ids) - 1
        while anchor < last:
            before = cache.length
            committed = Committed(rows[before:anchor], ids[before + 1 : anchor + 1])
            proposal = draft.draft(cache, committed)
            wanted = ids[anchor + 1 : anchor + 1 + shape.num_tokens]
            said = proposal.token_ids[: len(wanted)] == wanted
            num_accepted = int(said.long().cumprod(0).sum())
            tally.num_rounds += 1
            tally.num_tokens += min(num_accepted + 1, last - anchor)
            for place in range(len(wanted)):
                tally.offered[place] += 1
                tally.accepted[place] += place < num_accepted
            if proposal.confidence is not None:
                for place in range(min(num_accepted + 1, len(wanted))):
                    tally.confidence[place] += float(proposal.confidence[place])
            anchor += num_accepted + 1
    return tally


def _answer(target: Target, row: Row, taps: Sequence[str]) -> Passage:
    """Cuts the row's last answer off and lets the target write its own."""
    num_prompt = len(row.ids)
    while row.is_learned[num_prompt - 1]:
        num_prompt -= 1
    prompt = torch.from_numpy(row.ids[:num_prompt]).long()
    embeds = see(target.nano, row.images, target.processing) if row.images else []
    segment = Segment(
        prompt,
        torch.cat(image_places(row)) if embeds else None,
        torch.cat(embeds) if embeds else None,
    )
    sequence = SingleSequence(target.nano.text, num_prompt + MAX_ANSWER_TOKENS, torch.float32)
    said: list[torch.Tensor] = []
    tapped: dict[str, list[torch.Tensor]] = {name: [] for name in taps}
    stops = target.nano.config.eos_token_ids
    while len(said) < MAX_ANSWER_TOKENS:
        output = sequence.feed(segment, tuple(taps), all_logits=False)
        for name in taps:
            tapped[name].append(output.taps[name])
        said.append(output.logits[-1].argmax().reshape(1))
        if int(said[-1]) in stops:
            break
        segment = Segment(said[-1])
    return Passage(
        torch.cat((prompt, *said)),
        num_prompt,
        {name: torch.cat(rows) for name, rows in tapped.items()},
    )


def table(tallies: Mapping[str, Mapping[str, Tally]], tell: Callable[[str], None]) -> None:
    """Tells each draft's figures, a line a group."""
    tell(f"{'draft':8} {'text':9} {'rounds':>6}  tokens/verify  accepted up to place 1, 2, ...")
    for kind, groups in tallies.items():
        for group, tally in groups.items():
            shares = (a / max(1, o) for a, o in zip(tally.accepted, tally.offered, strict=True))
            places = " ".join(f"{share:4.0%}" for share in shares)
            line = f"{kind:8} {group:9} {tally.num_rounds:6}  {tally.tokens_per_verify:13.2f}"
            tell(f"{line}  {places}")
