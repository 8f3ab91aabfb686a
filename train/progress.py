"""What a run says while it trains: one line a step, a JSONL log, TensorBoard; and when it must stop.

    step 120/38147   63M tok   loss 2.413   lr 3.0e-05   grad 0.82   8.7k tok/s   wait 1%   71.3 GiB   eta 79h

log.jsonl holds the same numbers in full. A resumed run drops the lines after its checkpoint, so that each
step stands there once.
"""

from __future__ import annotations

import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import torch

from unsoftmax.recipes.schema import StagePlan
from unsoftmax.train.engine import StepResult

STAGE = "stage"  # the kind of line with which a stage begins


def short(count: float) -> str:
    """A count in at most four digits: 950, 8.7k, 62.9M, 2.1B."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.1f}{unit}"
    return f"{count:.0f}"


def span(seconds: float) -> str:
    """A time to read: 42s, 6m05s, 79h36m."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: the device's, or this process's on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Progress:
    """Lines, log and TensorBoard of one run; silent on every rank but the first.

    Args:
        run: the run folder.
        total_steps: for the line and the time left.
        every: steps between lines; the log gets every step.
        done: (steps, tokens) of the checkpoint that the run goes on from.
        speaks: False on other ranks.
    """

    def __init__(
        self,
        run: Path,
        *,
        total_steps: int,
        every: int,
        done: tuple[int, int],
        device: torch.device,
        speaks: bool,
    ) -> None:
        self.run, self.total_steps, self.every, self.device, self.speaks = (
            run,
            total_steps,
            every,
            device,
            speaks,
        )
        self.tokens = done[1]
        self.stage: dict[str, Any] = {}  # what each line of the log says of it; nothing in a run of one
        self._rates: list[tuple[int, float, float]] = []  # tokens, seconds and waited seconds of late steps
        self._steps = 0  # of this process, in this stage
        self._mark = time.perf_counter()
        if speaks:
            from torch.utils.tensorboard import SummaryWriter

            _keep_until(run / "log.jsonl", done[0])
            self._log = open(run / "log.jsonl", "a")  # noqa: SIM115
            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=done[0] + 1)

    def say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)

    def step(self, number: int, result: StepResult, *, tokens: int, lr: float, waited: float) -> None:
        """Report optimizer step `number` (counted from 1), which took everything since the last call."""
        now = time.perf_counter()
        self._steps += 1
        if self._steps == 2:
            self._rates = []  # the first one also compiled kernels and filled buffers
        self._rates = [*self._rates[-49:], (tokens, now - self._mark, waited)]
        self._mark = now
        self.tokens += tokens
        seconds, left = sum(r[1] for r in self._rates), self.total_steps - number
        row = {
            "step": number,
            **self.stage,
            "tokens": self.tokens,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "applied": result.applied,
            "tokens_per_second": sum(r[0] for r in self._rates) / seconds,
            "wait": sum(r[2] for r in self._rates) / seconds,
            "peak_bytes": peak_bytes(self.device),
            "seconds_left": seconds / len(self._rates) * left if self._steps > 1 or not left else None,
        }
        self._write("train", row)
        if number % self.every == 0 or number == self.total_steps or not result.applied:
            self.say(step_line(row, self.total_steps))

    def scored(self, number: int, measurement: dict[str, Any], line: str) -> None:
        """Report a held-out score at step `number`; its time is not the next step's."""
        self._write("held_out", {"step": number, **self.stage, "tokens": self.tokens, **measurement})
        self.say(f"step {number:>5}/{self.total_steps}   held out: {line}")
        self.rest()

    def enter(self, stage: StagePlan, stages: int) -> None:
        """What follows belongs to this stage, one of several, which have a speed of their own."""
        self._steps = 0
        self.stage = {"stage": stage.number, "stages": stages, "objective": stage.loss}

    def begins(self, number: int, nll: float, before: float | None, line: str) -> None:
        """Report the held-out loss from which a stage continues, and that which the one before ended at."""
        self._write(
            STAGE, {"step": number, **self.stage, "tokens": self.tokens, "nll": nll, "before": before}
        )
        ended = "" if before is None else f", stage {self.stage['stage'] - 1} ended at {before:.4f}"
        self.say(
            f"stage {self.stage['stage']}/{self.stage['stages']} {self.stage['objective']} begins after step "
            f"{number}: held out {line}, nll {nll:.4f}{ended}"
        )
        self.rest()

    def rest(self) -> None:
        """Leave the time since the last step out of the speed (scoring, saving)."""
        self._mark = time.perf_counter()

    def _write(self, kind: str, row: dict[str, Any]) -> None:
        if not self.speaks:
            return
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        self._log.write(json.dumps({"kind": kind, **finite}) + "\n")
        self._log.flush()
        for key, value in row.items():
            if isinstance(value, int | float) and key != "step":
                self._board.add_scalar(f"{kind}/{key}", value, row["step"])

    def close(self) -> None:
        if self.speaks:
            self._log.close()
            self._board.close()


def step_line(row: dict[str, Any], total_steps: int) -> str:
    """The progress line of a log row."""
    parts = [
        f"step {row['step']:>5}/{total_steps}",
        *([f"stage {row['stage']}/{row['stages']} {row['objective']}"] if "stage" in row else []),
        f"{short(row['tokens'])} tok",
        f"loss {row['loss']:.3f}",
        f"lr {row['lr']:.1e}",
        f"grad {row['grad_norm']:.2f}",
        f"{short(row['tokens_per_second'])} tok/s",
        f"wait {row['wait']:.0%}",
        f"{row['peak_bytes'] / 2**30:.1f} GiB",
        "eta ?" if row["seconds_left"] is None else f"eta {span(row['seconds_left'])}",
    ]
    return "   ".join(parts if row["applied"] else [*parts, "SKIPPED"])


def _keep_until(log: Path, step: int) -> None:
    if log.exists():
        lines = [line for line in log.read_text().splitlines() if _whole(line)]
        log.write_text("".join(f"{line}\n" for line in lines if _done(json.loads(line), step)))


def _done(row: dict[str, Any], step: int) -> bool:
    """Whether a line was written before the checkpoint of `step`: a stage begins after the one before."""
    return row["step"] <= step - (row["kind"] == STAGE)


def _whole(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")  # a kill may have cut the last line


class BadSteps:
    """Counts skipped steps in a row, and stops the run when there are too many."""

    def __init__(self, most: int) -> None:
        self.most, self.row = most, 0

    def check(self, step: int, result: StepResult, bad_weights: list[str]) -> None:
        """Raise FloatingPointError at the `most`-th skipped step in a row, naming parameters."""
        if result.applied:
            self.row = 0
            return
        self.row += 1
        if self.row < self.most:
            return
        raise FloatingPointError(
            f"step {step}: {self.row} steps in a row (train.max_bad_steps) had a loss or gradient that is "
            f"not finite, and were skipped.\n"
            f"  loss                     {result.loss}\n"
            f"  gradients not finite     {_names(result.bad)}\n"
            f"  parameters not finite    {_names(bad_weights)}\n"
            "The last checkpoint is from before; a lower train.peak_lr is the first thing to try."
        )


def _names(names: list[str]) -> str:
    if not names:
        return "none"
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest
