"""The training loop: processes of one thread each, gradients added between them, resumable.

One thread a process because small products scale badly over threads. Each step every process
runs one batch of text and, in some, one with pictures; which text depends on how far training is.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

from k3core.kernels.attn_res import reference as attn_res
from k3core.kernels.interface import Kernels, RouterRule
from k3core.kernels.mxfp4.reference import dequantise, quantise
from k3core.kernels.norm import reference as norm
from k3core.kernels.situ import reference as situ
from k3text.images.processor import cut
from train_nano.export import STATE_FILE
from train_nano.lessons import MODES, Lessons
from train_nano.looking import Looks
from train_nano.model import (
    NUM_RANKS,
    build_nano,
    fused_rows,
    read_processing,
    start_words_alike,
    write_processing,
)
from train_nano.optimiser import Optimiser
from train_nano.passes import Scores, objects_loss, run_rows, see
from train_nano.rows import Row, RowWriter
from train_nano.sample import sample_text
from train_nano.scenes import picture, random_scene
from train_nano.talk import Mode, Talk

LOG_FILE = "log.jsonl"
WARM_UP_STEPS = 40
FLAT_SHARE = 0.6
"""Of the whole time at the full rate; it then falls linearly to `LAST_FACTOR`."""

LAST_FACTOR = 0.02
PACKED_SHARE = 0.5
"""Of the whole time before experts are rounded to their packed values in every step."""

BIAS_STEP = 0.002
OBJECTS_WEIGHT = 0.5
LOOKS_WEIGHT = 0.2
EYE_IMAGES = 32
PICTURE_ROWS = 3
PICTURES_UNTIL, PICTURE_SHARE = 0.3, 0.5
"""Of the whole time until when every step has pictures, and of the steps that have them later:
pictures are learned first."""

TEXT_TOKENS = 1800
COPYING_UNTIL, MIDDLE_FROM, LONG_FROM = 0.3, 0.35, 0.45
"""Shares of the whole time: until when some text is plain copying, from when rows are longer."""

RECALL_SHARE, COPYING_SHARE = 0.25, 0.2
"""Of short text, the latter only early."""

COPYING_MODES: tuple[Mode, ...] = ("off", "off", "low", "max")


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for.

    Attributes:
        folder: state, log, vocabulary and image rules.
        minutes: of training in all, over every resumption; the rates are laid out over them.
        eye_minutes: of these, at the start, for tower and projector alone.
        seed: of weights and lessons.
        rate: of the full learning rate; weights that have learned much are torn by a full one.
        num_processes: that share the work.
        save_minutes: between two states written.
    """

    folder: Path
    minutes: float
    eye_minutes: float
    seed: int
    rate: float = 1.0
    num_processes: int = 2
    save_minutes: float = 4.0


def train(plan: Plan) -> None:
    """Trains until the planned minutes are spent; a state in the folder is taken up."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    if not (plan.folder / "tiktoken.model").exists():
        write_processing(plan.folder, sample_text(plan.seed))
    meeting = plan.folder.resolve() / "meeting"
    meeting.unlink(missing_ok=True)
    # Processes of one thread do not fight over cores with anything else that runs.
    spawn(_work, (plan, str(meeting)), nprocs=plan.num_processes)


def _work(rank: int, plan: Plan, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=plan.num_processes
    )
    trainer = Trainer(plan, rank)
    try:
        trainer.run()
    finally:
        dist.destroy_process_group()


class Trainer:
    """One process's part of a run."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        tokenizer, self._config = read_processing(plan.folder)
        self._writer = RowWriter(tokenizer, self._config)
        self._lessons = Lessons("train", self._config)
        self._load = RouterLoad()
        self._looks = Looks()
        self._nano = build_nano(
            plan.seed,
            lambda base: self._looks.recording(self._load.counting(fast_kernels(base))),
        )
        named = self._nano.named_parameters()
        self._biases = [p for k, p in named.items() if k.endswith("router_bias")]
        self._parameters = {k: p for k, p in named.items() if not k.endswith("router_bias")}
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        self._optimiser = Optimiser(self._parameters, fused_rows(self._nano.config))
        self._experts = {k: p for k, p in named.items() if k.endswith((".w13", ".w2"))}
        self._masters: dict[str, torch.Tensor] = {}
        self._minutes = 0.0
        start_words_alike(self._nano, tokenizer)
        self._take_up()

    def run(self) -> None:
        """Steps until the time is spent, saving now and then."""
        plan = self._plan
        saved_at = self._minutes
        told: list[dict[str, float]] = []
        while self._minutes < plan.minutes:
            begin = time.monotonic()
            draw = random.Random(f"{plan.seed}/{self._rank}/{self._optimiser.num_steps}")
            is_eye = self._minutes < plan.eye_minutes
            losses = self._eye_step(draw) if is_eye else self._joint_step(draw)
            self._add_gradients()
            self._optimiser.step(plan.rate * self._rate_factor())
            if not is_eye:
                self._load.balance(self._biases)
                self._round_experts()
            told.append(losses)
            self._minutes = self._agreed(self._minutes + (time.monotonic() - begin) / 60)
            if self._rank == 0 and self._optimiser.num_steps % 20 == 0:
                self._log(told)
                told.clear()
            if self._minutes - saved_at > plan.save_minutes:
                saved_at = self._minutes
                self._save()
        self._save()

    def _eye_step(self, draw: random.Random) -> dict[str, float]:
        scenes = [random_scene(draw, self._config) for _ in range(EYE_IMAGES)]
        pictures = [picture(scene, draw) for scene in scenes]
        images = [cut(p.data, self._config) for p in pictures]
        embeds = see(self._nano, images, self._config)
        loss = objects_loss(self._nano, embeds, images, [p.objects for p in pictures], self._config)
        loss.backward()
        return {"eye": loss.item()}

    def _joint_step(self, draw: random.Random) -> dict[str, float]:
        told: dict[str, float] = {}
        lessons = [self._text_rows(draw)]
        if self._has_pictures():
            pictures = [
                self._writer.write(self._lessons.picture(draw), draw.choice(MODES), draw)
                for _ in range(PICTURE_ROWS)
            ]
            lessons.append(("picture", pictures))
        for name, rows in lessons:
            scores = run_rows(self._nano, rows, self._config)
            loss = F.cross_entropy(scores.logits, scores.targets)
            told[name] = loss.item()
            if scores.objects.requires_grad:
                told["eye"] = scores.objects.item()
                loss = loss + OBJECTS_WEIGHT * scores.objects
            else:
                looks = self._looks_loss(scores)
                told["looks"] = looks.item()
                loss = loss + LOOKS_WEIGHT * looks
            self._looks.forget()
            loss.backward()
        return told

    def _has_pictures(self) -> bool:
        """Whether this step has, in all processes or in none."""
        if self._minutes < PICTURES_UNTIL * self._plan.minutes:
            return True
        draw = random.Random(f"{self._plan.seed}/pictures/{self._optimiser.num_steps}")
        return draw.random() < PICTURE_SHARE

    def _looks_loss(self, scores: Scores) -> torch.Tensor:
        """Of the ordinary tokens of a text; a list of what a picture shows stands nowhere else."""
        length = scores.ids.shape[1]
        ordinary = scores.places[scores.targets < NUM_RANKS].tolist()
        return self._looks.loss(scores.ids, [divmod(place, length) for place in ordinary])

    def _text_rows(self, draw: random.Random) -> tuple[str, list[Row]]:
        share = self._minutes / self._plan.minutes
        long_share = 0.0 if share < LONG_FROM else 0.12
        middle_share = 0.0 if share < MIDDLE_FROM else 0.14
        is_early = share < COPYING_UNTIL
        chance = draw.random()
        if chance < long_share:
            characters = draw.choice((4000, 8000, 8000, 12000))
            talk = self._lessons.needle(draw, characters, draw.randint(1, 24), 10)
            return "long", [self._writer.write(talk, draw.choice(MODES), draw)]
        if chance < long_share + middle_share:
            talks = [self._lessons.needle(draw, 1800, draw.randint(1, 12), 6) for _ in range(2)]
            return "middle", [self._writer.write(t, draw.choice(MODES), draw) for t in talks]
        kind = draw.random()
        if kind < RECALL_SHARE:
            return "recall", self._filled(draw, self._lessons.recall, MODES)
        if is_early and kind < RECALL_SHARE + COPYING_SHARE:
            return "copying", self._filled(draw, self._lessons.copying, COPYING_MODES)
        return "text", self._filled(draw, self._lessons.text, MODES)

    def _filled(
        self, draw: random.Random, lesson: Callable[[random.Random], Talk], modes: tuple[Mode, ...]
    ) -> list[Row]:
        """Rows of about the same length, TEXT_TOKENS with their padding."""
        rows: list[Row] = []
        while True:
            row = self._writer.write(lesson(draw), draw.choice(modes), draw)
            longest = max([len(row.ids), *(len(other.ids) for other in rows)])
            if rows and longest * (len(rows) + 1) > TEXT_TOKENS:
                return rows
            rows.append(row)

    def _add_gradients(self) -> None:
        """Averages gradients over processes; one that only some have counts as zero elsewhere."""
        has = torch.tensor([float(p.grad is not None) for p in self._parameters.values()])
        dist.all_reduce(has)
        chosen = [p for p, count in zip(self._parameters.values(), has, strict=True) if count > 0]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= self._plan.num_processes
        norm_all = flat.norm()
        flat *= torch.clamp(1.0 / (norm_all + 1e-6), max=1.0)
        for parameter, grad in zip(chosen, flat.split([g.numel() for g in grads]), strict=True):
            parameter.grad = grad.view_as(parameter)
        self._restore_masters()

    def _round_experts(self) -> None:
        """Keeps full-precision experts aside and computes with what packing will leave."""
        if self._minutes < PACKED_SHARE * self._plan.minutes:
            return
        moe = self._nano.config.text.moe
        assert moe is not None, "nano has experts"
        assert moe.mxfp4_group is not None, "nano's experts are packed"
        for name, parameter in self._experts.items():
            self._masters[name] = parameter.detach().clone()
            packed, scale = quantise(parameter.detach(), moe.mxfp4_group)
            rounded = dequantise(packed, scale, moe.mxfp4_group, torch.float32)
            parameter.data.copy_(rounded)

    def _restore_masters(self) -> None:
        for name, master in self._masters.items():
            self._experts[name].data.copy_(master)
        self._masters.clear()

    def _rate_factor(self) -> float:
        plan = self._plan
        if self._minutes < plan.eye_minutes:
            return min(1.0, self._optimiser.num_steps / WARM_UP_STEPS)
        share = (self._minutes - plan.eye_minutes) / (plan.minutes - plan.eye_minutes)
        if share < FLAT_SHARE:
            return min(1.0, 0.05 + share * plan.minutes)
        left = (1 - share) / (1 - FLAT_SHARE)
        return LAST_FACTOR + (1 - LAST_FACTOR) * max(0.0, left)

    def _agreed(self, minutes: float) -> float:
        clock = torch.tensor([minutes], dtype=torch.float64)
        dist.broadcast(clock, src=0)
        return float(clock)

    def _log(self, told: list[dict[str, float]]) -> None:
        sums: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for losses in told:
            sums.update(losses)
            counts.update(losses.keys())
        line = {name: round(sums[name] / counts[name], 4) for name in sorted(sums)}
        line |= {"step": self._optimiser.num_steps, "minutes": round(self._minutes, 2)}
        with (self._plan.folder / LOG_FILE).open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def _save(self) -> None:
        """Writes everything needed to go on, whole or not at all."""
        if self._rank != 0:
            return
        weights = {k: p.detach().clone() for k, p in self._nano.named_parameters().items()}
        weights |= self._masters
        state = {
            "weights": weights,
            "moments": self._optimiser.moments,
            "num_steps": self._optimiser.num_steps,
            "minutes": self._minutes,
        }
        part = self._plan.folder / f"{STATE_FILE}.part"
        torch.save(state, part)
        os.replace(part, self._plan.folder / STATE_FILE)

    def _take_up(self) -> None:
        path = self._plan.folder / STATE_FILE
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        for name, parameter in self._nano.named_parameters().items():
            parameter.data.copy_(state["weights"][name])
        self._optimiser.moments = {k: tuple(v) for k, v in state["moments"].items()}
        self._optimiser.num_steps = state["num_steps"]
        self._minutes = state["minutes"]
        self._round_experts()


class RouterLoad:
    """Counts how often experts are chosen and nudges the selection bias towards evenness."""

    def __init__(self) -> None:
        # A router is known by its bias, the one thing of it that `route` is given.
        self._counts: dict[int, torch.Tensor] = {}

    def counting(self, base: Kernels) -> Kernels:
        """The same operators; what they route is counted."""

        def route(
            logits: torch.Tensor, bias: torch.Tensor | None, rule: RouterRule
        ) -> tuple[torch.Tensor, torch.Tensor]:
            ids, weights = base.route(logits, bias, rule)
            assert bias is not None, "nano's router has a bias"
            count = torch.bincount(ids.flatten(), minlength=logits.shape[-1]).float()
            key = bias.data_ptr()
            self._counts[key] = self._counts.get(key, torch.zeros_like(count)) + count
            return ids, weights

        return replace(base, route=route)

    @torch.no_grad()
    def balance(self, biases: Iterable[torch.Tensor]) -> None:
        """Moves each bias by a small step against its expert's surplus; all processes agree."""
        for bias in biases:
            count = self._counts.pop(bias.data_ptr(), torch.zeros_like(bias))
            dist.all_reduce(count)
            bias.add_(BIAS_STEP * torch.sign(count.mean() - count))


def fast_kernels(base: Kernels) -> Kernels:
    """The same operators with what lies between matrix products fused by torch's compiler."""
    # Every width, layer start and epsilon is a variant of its own.
    torch._dynamo.config.recompile_limit = 64  # pyright: ignore[reportPrivateUsage]  # no other name
    return replace(
        base,
        activate=torch.compile(situ.activate, dynamic=True),
        rms_norm=torch.compile(norm.rms_norm, dynamic=True),
        gated_rms_norm=torch.compile(norm.gated_rms_norm, dynamic=True),
        attn_res_norm=torch.compile(attn_res.mix_norm, dynamic=True),
    )
