"""The main job end to end on any machine: fetch, convert, train, score, report. Run again, it goes on."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import unsoftmax
from unsoftmax.convert.checkpoint import convert_checkpoint
from unsoftmax.convert.fetch import fetch
from unsoftmax.convert.load import load, read_config
from unsoftmax.convert.load import tokenizer as load_tokenizer
from unsoftmax.convert.verify import window_control
from unsoftmax.eval.compare import read_log, run_plots
from unsoftmax.eval.harness import score_model
from unsoftmax.eval.heldout import PYTHON_DOCS, held_out_rows
from unsoftmax.eval.lifetimes import slot_lifetimes
from unsoftmax.eval.report import Row, write_report
from unsoftmax.eval.results import number, write_results
from unsoftmax.eval.suites import Suite, Task, find_folder
from unsoftmax.recipes.schema import load_recipe

SOURCE = "smollm2-135m"
RECIPE = "demo"
ROWS, ROW_TOKENS = 4, 1_024  # of held-out text: under a minute for four models on two cores
TASKS = (
    Task("lambada_openai", 0, "EleutherAI/lambada_openai"),
    Task("arc_easy", 0, "allenai/ai2_arc"),
    Task("piqa", 0, "baber/piqa"),
)
TASK_ITEMS = 32
LIFETIME_TOKENS = 1_024
MOST_PROCESSES = 2  # the recipe's batch divides by one or two

Say = Callable[[str], None]


def demo(
    out: str | Path,
    *,
    source: str | Path | None = None,
    data: str | Path | None = None,
    say: Say = print,
) -> Path:
    """Convert and train a real checkpoint, score it beside its teacher, and write a page.

    Args:
        out: folder for all of it; what is there already from an earlier demo is used.
        source: a plain Llama or Mistral folder; None fetches SmolLM2-135M-Instruct.
        data: folder with evaluation data sets; those of lambada_openai, arc_easy and piqa found there are
            scored too.
        say: told each step.

    Returns:
        The page, `out`/report.html.

    Raises:
        ValueError: a step's input does not fit. RuntimeError: training failed; its own output says why.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    clock = _Clock(say)
    teacher = Path(source) if source is not None else fetch(SOURCE, out / "teacher", say=say)
    clock.done("fetch", f"{teacher} is ready")
    converted = _convert(teacher, out / "converted", say)
    clock.done("convert", f"{converted} is ready to train")
    trained = _train(converted, out / "run", say)
    clock.done("train", f"{trained} is trained")
    rows, lifetimes = _score(teacher, converted, trained, out, data, say)
    clock.done("score", "four models on the same text")
    page = _report(out, rows, lifetimes, clock)
    say(f"report: {page.resolve()}")
    return page


@dataclasses.dataclass
class _Clock:
    say: Say
    started: float = dataclasses.field(default_factory=time.monotonic)
    steps: list[tuple[str, float]] = dataclasses.field(default_factory=list)

    def done(self, name: str, what: str) -> None:
        before = self.started + sum(seconds for _, seconds in self.steps)
        self.steps.append((name, time.monotonic() - before))
        self.say(f"[{name}] {what}   {self.steps[-1][1]:.0f} s")


def _convert(teacher: Path, converted: Path, say: Say) -> Path:
    if (converted / "config.json").is_file():
        say(f"{converted} is there already")
        return converted
    return convert_checkpoint(teacher, converted, load_recipe(RECIPE), say=say)


def _train(converted: Path, run: Path, say: Say) -> Path:
    trained = run / "export"
    if (trained / "config.json").is_file():
        say(f"{trained} is there already")
        return trained
    command, environment = launch(converted, run)
    say(" ".join(command))
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"training ended with status {done.returncode}; what it printed is above")
    return trained


def launch(converted: Path, run: Path) -> tuple[list[str], dict[str, str]]:
    """The training command under the deepspeed launcher, and the environment it needs.

    On a CPU, processes share the cores: with more threads than cores, gloo waits most of the time.
    """
    cores = len(os.sched_getaffinity(0))
    gpus = torch.cuda.device_count()
    processes = min(MOST_PROCESSES, gpus or cores)
    command = [
        program("deepspeed"),
        "--num_gpus" if gpus else "--num_accelerators",
        str(processes),
        "--master_port",
        str(_free_port()),
        "--no_python",
        "--no_local_rank",
        program("unsoftmax-train"),
        RECIPE,
        *("--run", str(run), "--model", str(converted), "--resume", "auto"),
    ]
    environment = dict(os.environ)
    # deepspeed starts helpers of its own environment by name
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    if not gpus:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return command, environment


def program(name: str) -> str:
    """A console script of this environment: beside the interpreter, or else on PATH. ValueError if absent."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise ValueError(
            f"the program {name} is not beside {sys.executable} nor on PATH; pip install unsoftmax"
        )
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _score(
    teacher: Path, converted: Path, trained: Path, out: Path, data: str | Path | None, say: Say
) -> tuple[list[Row], list[dict[str, Any]]]:
    suite = _suite(data)
    words = load_tokenizer(teacher)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _, window = window_control(read_config(converted))
    rows, lifetimes = [], []
    for name, path, mixers in (
        ("teacher", teacher, None),
        ("window control", teacher, window),
        ("converted", converted, None),
        ("trained", trained, None),
    ):
        model = load(path, device=device, layer_mixers=mixers)
        result = score_model(
            model,
            words,
            name,
            suite=suite,
            data=data,
            limit=TASK_ITEMS,
            text=PYTHON_DOCS,
            say=lambda line: None,
        )
        write_results(result, out / "results" / name.replace(" ", "-"))
        rows.append(Row(name, result["text"]["checkpoint"], result["rows"]))
        say(_line(rows[-1]))
        if name == "trained":
            lifetimes = slot_lifetimes(model, _sample(words))
    return rows, lifetimes


def _suite(data: str | Path | None) -> Suite:
    tasks = () if data is None else tuple(t for t in TASKS if find_folder(Path(data), t.dataset))
    return Suite("demo", tasks, rows=ROWS, row_tokens=ROW_TOKENS)


def _sample(words: Any) -> torch.Tensor:
    return held_out_rows(PYTHON_DOCS, words, Suite("sample", rows=1, row_tokens=LIFETIME_TOKENS))[0]


def _line(row: Row) -> str:
    text = row.text or {}
    scores = "".join(f"   {t['task']} {t['metric']} {number(t['score'])}" for t in row.tasks)
    return f"{row.name:<15} ppl {text['ppl']:6.2f}   recall nll {text['recall_nll']:.3f}{scores}"


def _report(out: Path, rows: list[Row], lifetimes: list[dict[str, Any]], clock: _Clock) -> Path:
    log = read_log(out / "run" / "log.jsonl")
    tokens = log.train[-1]["tokens"]
    names = [row.name for row in rows]
    return write_report(
        out / "report.html",
        rows,
        run_plots({"trained": log}, colours=names)[:1],
        title="SmolLM2-135M with gated slot attention",
        lead=(
            "A softmax checkpoint (teacher), the same weights with slots in place of attention (converted), "
            f"and after {tokens:,} tokens of continual pretraining (trained), on held-out Python "
            "documentation. Only the last has read text of this kind before. The window control is the "
            "teacher limited to a window of as many tokens as there are slots: a conversion that remembers "
            "more than a window has a lower recall loss."
        ),
        notes=(
            "Lower is better for perplexity and for recall nll, which is the loss on tokens whose pair with "
            "the token before was last seen more than 128 tokens back. ± is one standard error.",
        ),
        lifetimes=lifetimes,
        facts=[
            *((f"time: {name}", f"{seconds:.0f} s") for name, seconds in clock.steps),
            ("held-out text", f"{ROWS} rows of {ROW_TOKENS:,} tokens of {PYTHON_DOCS}"),
            ("machine", f"{_machine()}, Python {platform.python_version()}, torch {torch.__version__}"),
            ("unsoftmax", unsoftmax.__version__),
        ],
    )


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{len(os.sched_getaffinity(0))} CPU cores"
