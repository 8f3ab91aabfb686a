"""What is scored: named suites of lm-eval tasks, their shots and data sets, and the held-out rows.

Suites are data. A task is the name of a stock lm-eval task or group; its prompts, stop rules, filters and
metrics are those of the installed lm-eval, and their versions are written into every result.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Task:
    """One lm-eval task or group. `dataset` is the hub id that its task file names.

    An optional task whose data or package is missing is listed as not run; any other refuses the whole run.
    """

    name: str
    shots: int
    dataset: str
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tasks, and the held-out rows on which perplexity by position and recall are measured.

    rows: how many, 0 for none. row_tokens: tokens in each. spaced: rows spread over the whole text instead
    of taken from its start.
    """

    name: str
    tasks: tuple[Task, ...] = ()
    rows: int = 96
    row_tokens: int = 2_048
    spaced: bool = False
    planted: tuple[int, ...] = ()
    planted_rows: int = 32


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "paper",
            (
                Task("mmlu", 5, "cais/mmlu"),
                Task("bbh_cot_fewshot", 3, "SaylorTwift/bbh"),
                Task("nq_open", 5, "google-research-datasets/nq_open"),
            ),
        ),
        Suite(
            "core",
            (
                Task("lambada_openai", 0, "EleutherAI/lambada_openai"),
                Task("arc_easy", 0, "allenai/ai2_arc"),
                Task("arc_challenge", 0, "allenai/ai2_arc"),
                Task("hellaswag", 0, "Rowan/hellaswag"),
                Task("piqa", 0, "baber/piqa"),
                Task("winogrande", 0, "allenai/winogrande"),
                Task("openbookqa", 0, "allenai/openbookqa"),
                Task("wikitext", 0, "EleutherAI/wikitext_document_level"),
            ),
        ),
        Suite(
            "recall",
            (
                Task("fda", 0, "hazyresearch/based-fda", optional=True),
                Task("swde", 0, "hazyresearch/based-swde-v2", optional=True),
                Task("squad_completion", 0, "hazyresearch/based-squad", optional=True),
            ),
            planted=(256, 512, 1024, 2048, 4096),
        ),
        Suite(
            "long",
            (
                Task("longbench_qasper", 0, "Xnhyacinth/LongBench", optional=True),
                Task("longbench_narrativeqa", 0, "Xnhyacinth/LongBench", optional=True),
                Task("longbench_qmsum", 0, "Xnhyacinth/LongBench", optional=True),
                Task("scrolls_quality", 0, "tau/scrolls", optional=True),
            ),
            rows=12,
            row_tokens=16_384,
            planted=(4096, 8192, 16_384),
        ),
        Suite("text"),
    )
}

# Folder names a data set may have under --data, besides its full hub id and the part after the slash.
FOLDERS = {
    "allenai/ai2_arc": ("arc",),
    "EleutherAI/wikitext_document_level": ("wikitext2", "wikitext"),
    "hazyresearch/based-fda": ("fda",),
    "hazyresearch/based-swde-v2": ("swde",),
    "hazyresearch/based-squad": ("squad",),
    "Xnhyacinth/LongBench": ("longbench",),
}


def folder_names(dataset: str) -> tuple[str, ...]:
    """Names of the folder that may hold a hub data set, best first: `cais/mmlu`, `mmlu`."""
    return (dataset, dataset.split("/")[-1], *FOLDERS.get(dataset, ()))


def find_folder(data: Path, dataset: str) -> Path | None:
    """The folder under `data` that holds the hub data set `dataset`, or None."""
    return next((data / name for name in folder_names(dataset) if (data / name).is_dir()), None)


def named_suite(name: str | Suite) -> Suite:
    """The suite of that name; a Suite passes through. ValueError names the nearest one."""
    if isinstance(name, Suite):
        return name
    if name not in SUITES:
        near = difflib.get_close_matches(name, SUITES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"--suite {name!r} is not a suite.{hint} There are: {', '.join(SUITES)}.")
    return SUITES[name]


def missing_data(suite: Suite, data: Path) -> dict[str, str]:
    """Task name to a sentence that says which folder it needs, for every task without one under `data`."""
    if not data.is_dir():
        raise ValueError(
            f"--data {data} is not a folder; give one that holds {folder_names('cais/mmlu')[1]}/ and the like"
        )
    return {
        task.name: f"{task.name} needs the data set {task.dataset}: "
        f"no {' or '.join(str(data / n) for n in folder_names(task.dataset))}"
        for task in suite.tasks
        if find_folder(data, task.dataset) is None
    }
