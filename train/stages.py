"""The stages of a run: each with its loss, rates and fresh AdamW, goes on from the weights there are."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from unsoftmax.convert import provenance
from unsoftmax.convert.load import CONVERTED_TYPES, load, read_config
from unsoftmax.recipes.schema import SOFTMAX, TAUGHT, Recipe, StagePlan, stage_plans
from unsoftmax.train.engine import Engine, Place, count, trained
from unsoftmax.train.progress import short
from unsoftmax.train.schedule import learning_rate

ROUNDING = {"bf16": 1e-3, "fp32": 1e-5}  # of a held-out loss in nats that is measured twice


def rate(recipe: Recipe, stage: StagePlan, step: int) -> float:
    """The learning rate of step `step` of the run, counted from 0, which `stage` takes."""
    return learning_rate(
        step - stage.begin,
        total_steps=stage.steps,
        warmup_steps=stage.warmup_steps,
        peak=stage.peak_lr,
        min_ratio=stage.min_lr_ratio,
        shape=stage.schedule,
        decay_share=recipe.train.decay_share,
    )


class Stages:
    """The stage that a run is in, and its engine.

    step: steps that are done. A run that stands where a stage ends is still in it: `advance` begins the next.
    """

    def __init__(self, recipe: Recipe, place: Place, start: Path, step: int) -> None:
        self.recipe, self.place, self.start = recipe, place, start
        self.plans = stage_plans(recipe)
        self.plan = next(p for p in self.plans if step <= p.end)
        self._teacher: PreTrainedModel | None = None
        self.engine = self._build(None)
        for plan in self.plans:
            trained(self.engine.model, plan)  # raises now rather than when that stage comes

    def advance(self) -> None:
        """Begin the next stage with the weights as they are."""
        weights = self.engine.weights()
        self.engine.close()
        self.plan = self.plans[self.plan.number]
        self.engine = self._build(weights)

    def _build(self, weights: dict[str, torch.Tensor] | None) -> Engine:
        if self.plan.loss not in TAUGHT:
            self._teacher = None
        elif self._teacher is None:
            dtype = torch.bfloat16 if self.recipe.train.dtype == "bf16" else torch.float32
            teacher = load_kept(teacher_of(self.recipe, self.start), dtype)
            self._teacher = teacher.to(self.place.device).requires_grad_(False)  # type: ignore[arg-type]
        return Engine(
            self.recipe,
            self.place,
            lambda: load_kept(self.start, torch.float32),
            stage=self.plan,
            teacher=self._teacher,
            weights=weights,
        )

    def check_continues(self, step: int, nll: float, before: float | None) -> None:
        """RuntimeError unless the stage continues from the held-out loss at which the one before ended."""
        allowed = ROUNDING[self.recipe.train.dtype]
        if before is not None and not abs(nll - before) <= allowed * max(1.0, abs(before)):
            raise RuntimeError(
                f"stage {self.plan.number} ({self.plan.loss}), step {step}: it continues from a "
                f"held-out loss of {nll:.6f}, but the stage before ended at {before:.6f} "
                f"(allowed: {allowed:.0e} apart)"
            )

    def table(self) -> str:
        """A line a stage: loss, tokens, steps, rates, and what is trained."""
        model = self.engine.model
        everything = count(model.parameters())
        rows = [("stage", "loss", "tokens", "steps", "peak lr", "new lr", "schedule", "trains")]
        for p in self.plans:
            decay = "" if p.schedule == "constant" else f" to {p.min_lr_ratio:g}"
            loss = p.loss
            if loss == "distil":
                loss += f" w {p.teacher_weight:g}" + f", tau {p.temperature:g}" * (p.temperature != 1)
            rows.append(
                (
                    f"{p.number}",
                    loss,
                    short(p.tokens),
                    f"{p.begin + 1}-{p.end}",
                    f"{p.peak_lr:.1e}",
                    f"x {p.new_lr_scale:g}",
                    f"{p.warmup_steps} up, {p.schedule}{decay}",
                    f"{p.train}, {short(count(trained(model, p)))} of {short(everything)}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


def load_kept(folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model as it is; a plain checkpoint with its softmax, in the class that keeps documents apart."""
    config = read_config(folder)
    softmax = [{"name": SOFTMAX}] * config.num_hidden_layers
    return load(folder, dtype=dtype, layer_mixers=None if config.model_type in CONVERTED_TYPES else softmax)


def teacher_of(recipe: Recipe, start: Path) -> str:
    """The checkpoint that taught stages learn from. ValueError if none is known or it does not fit."""
    number, stage = next((n, s) for n, s in enumerate(recipe.stages) if s.loss in TAUGHT)
    given = recipe.teacher or provenance.teacher(start)
    if given is None:
        raise ValueError(
            f"stages.{number}.loss is {stage.loss}, but {start / provenance.NAME} names no checkpoint that "
            f"it was converted from; name the teacher, such as --set teacher={recipe.source}"
        )
    try:
        theirs, ours = read_config(given), read_config(start)
    except ValueError as error:
        raise ValueError(f"the teacher: {error}; set teacher to the folder that it is in") from None
    fits = {"vocab_size"}
    if any(s.loss == "align" for s in recipe.stages):
        fits |= {"hidden_size", "num_hidden_layers"}
    for name in sorted(fits):
        a, b = getattr(theirs, name), getattr(ours, name)
        if a != b:
            raise ValueError(
                f"teacher {given} has {name} {a}, and {start} has {b}; set teacher to the checkpoint that it "
                "was converted from"
            )
    return given
