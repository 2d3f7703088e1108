"""Both drafts trained beside each other, measured on held-out text, and written with figures."""

import json
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn

from k3core.drafts.files import load_dspark, load_eagle
from train_nano.draft_acceptance import GROUPS, Tally, answered, play, table
from train_nano.draft_target import checkpoint_of, load_target
from train_nano.draft_training import KINDS, Course, train_draft

FOLDER = "drafts"
FIGURES_FILE = "drafts.json"
STEPS_FILE = "steps"


@dataclass(frozen=True, slots=True)
class DraftsPlan:
    """What was asked for.

    Attributes:
        source: a checkpoint, or the folder of a training run.
        minutes: of training; both drafts train at the same time, a process of one thread each.
        seed: of weights, lessons and questions.
        num_questions: held-out ones asked of each group.
    """

    source: Path
    minutes: float
    seed: int
    num_questions: int = 40


def make_drafts(plan: DraftsPlan) -> Path:
    """Trains, writes and measures both drafts in `drafts/` of the source; returns that folder."""
    out = plan.source / FOLDER
    for kind in KINDS:
        (out / kind).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = checkpoint_of(plan.source, Path(scratch))
        steps = Path(scratch)
        spawn(_work, (plan, str(checkpoint), str(out), str(steps)), nprocs=len(KINDS))
        measured = _measure(checkpoint, out, plan)
        num_steps = {kind: int((steps / f"{kind}.{STEPS_FILE}").read_text()) for kind in KINDS}
    table(measured, _print)
    figures = {
        kind: {
            "minutes": plan.minutes,
            "steps": num_steps[kind],
            "bytes": sum(file.stat().st_size for file in (out / kind).iterdir()),
            "groups": {group: tally.figures() for group, tally in groups.items()},
        }
        for kind, groups in measured.items()
    }
    (out / FIGURES_FILE).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return out


def _work(rank: int, plan: DraftsPlan, checkpoint: str, out: str, steps: str) -> None:
    torch.set_num_threads(1)
    kind = KINDS[rank]
    target = load_target(Path(checkpoint))
    course = Course(kind, plan.minutes, plan.seed)
    num_steps = train_draft(target, course, Path(out) / kind, _print)
    (Path(steps) / f"{kind}.{STEPS_FILE}").write_text(str(num_steps), encoding="utf-8")


def _measure(checkpoint: Path, out: Path, plan: DraftsPlan) -> dict[str, dict[str, Tally]]:
    """Tallies by draft and group, all groups together last."""
    torch.set_num_threads(1)
    target = load_target(checkpoint)
    drafts = {
        "eagle3": load_eagle(out / "eagle3", torch.device("cpu"), torch.float32),
        "dspark": load_dspark(out / "dspark", target.tables()),
    }
    taps = sorted({name for draft in drafts.values() for name in draft.config.shape.taps.names})
    measured: dict[str, dict[str, Tally]] = {kind: {} for kind in drafts}
    for group in GROUPS:
        passages = answered(target, group, plan.num_questions, plan.seed, taps)
        for kind, draft in drafts.items():
            measured[kind][group] = play(draft, passages)
    for kind, draft in drafts.items():
        whole = Tally(draft.config.shape.num_tokens)
        for tally in measured[kind].values():
            whole.add(tally)
        measured[kind]["all"] = whole
    return measured


_print = partial(print, flush=True)
