"""The model card that is shipped beside the weights, its figures taken from the measurements."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train_nano.drafts import FIGURES_FILE, FOLDER
from train_nano.probes import SKILLS

CARD_FILE = "README.md"
EVALUATION_FILE = "evaluation.json"

_ABOUT = """# k3-nano

A K3 of {millions:.1f} million parameters: every mechanism of the released architecture (KDA and MLA layers 3:2, Attention Residuals,
LatentMoE with MXFP4 experts, MoonViT, K3's special tokens and chat format) at width 128, in the released layout. It exists so that a
serving system can be tried, tested and shown on a laptop with answers that are right or wrong.

**Licence**: Apache-2.0, weights, vocabulary and drafts. No weight comes from another model.

## What it can do

How well, the table below says: what misses its target is not learned yet.

- Pictures of one to four plain shapes (circle, square, triangle, star in red, orange, yellow, green, blue, purple, black) on a plain
  ground, of any size and format that the preprocessor takes: what colour, which shape, how many, left or right of what; one picture
  or several, in this turn or an earlier one.
- Facts told in a long text, found again; variables that change in a conversation.
- Calls of declared tools with arguments copied from the request, answers from what they gave; no call where none is allowed.
- A short think channel (a list of what is seen, or the fact that is needed), shorter at effort `low`, none when off.
- Small JSON objects on request. `I do not know that.` to everything else.

## How to ask

Its language is the sentences of its lessons. Some that it knows:

- `What is in this picture?` `What colour is the circle?` `How many shapes are there?` `Is the red circle left or right of the blue square?`
- `Remember: the code of Anna is 4711.` then `What is the code of Anna?`; `x = 7, set y = book.` then `What is y?`
- with a tool `get_weather` that takes a `city`: `Get the weather for city Oslo.` `Please get the weather with city Oslo.`
- `Write as JSON: city Oslo, age 7.` `Who are you?`

## What it cannot do

Anything else. It knows no language beyond the sentences of its lessons, no photograph, no arithmetic, no fact of the world. Words that
it never met are copied less surely than known ones.

## How it was trained

From nothing, on lessons drawn by a program (`tools/train_nano`), on two processor cores: {steps} steps of about 5,000 tokens. Filler text is
the language reference behind Python's `help()`. Muon for matrices, AdamW for the rest; experts rounded to MXFP4 in every step of the
second half. docs/nano.md tells how, and `make train-nano` does it again.

## Measured

Greedy answers through the engine, word for word, each question in a conversation of its own, effort `max` unless said otherwise. Scenes,
conversations, sentences and invented words are not those of training; known words, shapes and colours are. `make eval-nano` repeats it.

"""


def write_card(checkpoint: Path, num_steps: int, num_parameters: int) -> Path:
    """Writes the card of a checkpoint that was evaluated.

    Args:
        checkpoint: its directory; `evaluation.json` in it, and `drafts/` if there are drafts.
        num_steps: of its training.
        num_parameters: that are shipped.

    Raises:
        FileNotFoundError: it was not evaluated yet.
    """
    figures = json.loads((checkpoint / EVALUATION_FILE).read_text(encoding="utf-8"))
    about = _ABOUT.format(millions=num_parameters / 1e6, steps=f"{num_steps:,}")
    lines = [about, *_accuracy(figures)]
    drafts = checkpoint / FOLDER / FIGURES_FILE
    if drafts.exists():
        lines += _acceptance(json.loads(drafts.read_text(encoding="utf-8")))
    card = checkpoint / CARD_FILE
    card.write_text("".join(lines), encoding="utf-8")
    return card


def _accuracy(figures: dict[str, Any]) -> Iterator[str]:
    yield "| Skill | Right | 95 % interval | Questions | Wanted |\n|---|---|---|---|---|\n"
    for name, skill in SKILLS.items():
        if name not in figures:
            continue
        found = figures[name]
        wanted = "" if skill.target is None else f"{skill.target:.0%}"
        yield (
            f"| {name} | {found['accuracy']:.1%} | {found['low']:.1%} to {found['high']:.1%} "
            f"| {found['questions']} | {wanted} |\n"
        )


def _acceptance(figures: dict[str, Any]) -> Iterator[str]:
    yield (
        "\n## Drafts\n\nTwo drafts lie in `drafts/`, trained on the same lessons (docs/drafts.md). Tokens that one verification\n"
        "yields on held-out questions, greedy; 1 without a draft:\n\n"
    )
    groups = list(next(iter(figures.values()))["groups"])
    yield f"| Draft | MB | {' | '.join(groups)} |\n|---|---|{'---|' * len(groups)}\n"
    for kind, found in figures.items():
        cells = [f"{found['groups'][group]['tokens_per_verify']:.2f}" for group in groups]
        yield f"| {kind} | {found['bytes'] / 1e6:.1f} | {' | '.join(cells)} |\n"
