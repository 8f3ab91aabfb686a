"""What a score is written as: results.json and results.md, with errors, settings and versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import unsoftmax
from unsoftmax.eval.heldout import paired_lines

PACKAGES = ("transformers", "lm_eval", "datasets")
IDENTITY = ("path", "hash", "parameters", "mixers", "seconds")


def versions() -> dict[str, str]:
    """Versions of everything that a score depends on."""
    found = {"python": platform.python_version(), "unsoftmax": unsoftmax.__version__}
    others = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {**found, "torch": torch.__version__, **others}


def assemble(
    suite: str,
    settings: dict[str, Any],
    ours: dict[str, Any],
    theirs: dict[str, Any] | None,
    not_run: dict[str, str],
    seconds: float,
) -> dict[str, Any]:
    """The result of a run from what was measured of the checkpoint (`ours`) and its teacher (`theirs`)."""
    files = json.dumps(ours["data"], sort_keys=True).encode()
    return {
        "format": 1,
        "suite": suite,
        "limited": settings["limit"] is not None,
        "checkpoint": {key: ours[key] for key in IDENTITY},
        "teacher": theirs and {key: theirs[key] for key in IDENTITY},
        "rows": _rows(ours["tasks"], theirs["tasks"] if theirs else {}),
        "text": {"checkpoint": ours["text"], "teacher": theirs and theirs["text"]},
        "tasks": {"checkpoint": ours["tasks"], "teacher": theirs and theirs["tasks"]},
        "not_run": not_run,
        "settings": {
            **settings,
            "data_sha256": hashlib.sha256(files).hexdigest() if ours["data"] else None,
        },
        "versions": versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),
    }


def _rows(ours: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a task and metric, with the teacher's score and the difference."""
    rows = []
    for name, task in ours.items():
        others = {(m["metric"], m["filter"]): m for m in theirs.get(name, {}).get("metrics", ())}
        about = {key: task[key] for key in ("version", "shots", "items", "items_in_full")}
        for metric in task["metrics"]:
            other = others.get((metric["metric"], metric["filter"]), {})
            teacher = other.get("score")
            rows.append(
                {
                    "task": name,
                    **about,
                    **metric,
                    "teacher": teacher,
                    "teacher_stderr": other.get("stderr"),
                    "difference": None if teacher is None else metric["score"] - teacher,
                }
            )
    return rows


def write_results(result: dict[str, Any], out: Path) -> Path:
    """Write results.json and results.md into `out`, each whole or not at all; returns the Markdown's path."""
    out.mkdir(parents=True, exist_ok=True)
    plain = json.dumps(_finite(result), indent=1, ensure_ascii=False) + "\n"
    for name, content in (("results.json", plain), ("results.md", markdown(result))):
        part = out / f".{name}.part"
        part.write_text(content, encoding="utf-8")
        part.replace(out / name)
    return out / "results.md"


def _finite(value: Any) -> Any:
    """The same with plain numbers, and None where a number is not finite: JSON has no other way to say it."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return float(value) if math.isfinite(value) else None


# Markdown


def markdown(result: dict[str, Any]) -> str:
    """The result as a Markdown page."""
    settings = result["settings"]
    lines = [f"# {result['checkpoint']['path']}: suite {result['suite']}", ""]
    if result["limited"]:
        lines += [f"**Limited to {settings['limit']} items a task and rows of text: compare with care.**", ""]
    if result["rows"]:
        lines += [
            "| task | metric | score | std. err. | teacher | difference | shots | items | version |",
            "|---|---|---|---|---|---|---|---|---|",
            *map(_score_row, result["rows"]),
            "",
        ]
    if ours := result["text"]["checkpoint"]:
        lines += ["| held-out text | checkpoint | teacher |", "|---|---|---|"]
        lines += [
            f"| {label} | {number(value)} | {number(other)} |"
            for label, value, other in paired_lines(ours, result["text"]["teacher"])
        ]
        lines.append("")
    lines += _behaviour(result) + [f"- not run: {reason}" for reason in result["not_run"].values()]
    return "\n".join([*lines, "", *_conditions(result)]) + "\n"


def _score_row(row: dict[str, Any]) -> str:
    metric = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
    teacher = number(row["teacher"]) + (
        f" ± {error_of(row['teacher_stderr'])}" if row["teacher_stderr"] else ""
    )
    items = f"{row['items']:,}"
    if row["items"] < row["items_in_full"]:
        items += f" of {row['items_in_full']:,} (limited)"
    scores = (number(row["score"]), error_of(row["stderr"]), teacher, number(row["difference"], sign=True))
    shots = ", ".join(map(str, row["shots"]))
    return "| " + " | ".join((row["task"], metric, *scores, shots, items, str(row["version"]))) + " |"


def _behaviour(result: dict[str, Any]) -> list[str]:
    """What scores hide: one letter answered always, answers that were not found or could not be given."""
    lines = []
    for name, task in result["tasks"]["checkpoint"].items():
        if letters := task.get("letters"):
            right = letters["right"]
            shares = ", ".join(f"{k} {v} (right {right.get(k, 0)})" for k, v in letters["chosen"].items())
            lines.append(f"- {name} chose: {shares}")
            if letters["always"]:
                lines.append(f"- **{name}: the model answers {letters['always']} nearly always**")
        if generated := task.get("generated"):
            lines.append(
                f"- {name}: no answer found in {generated['no_answer']:.1%} of the texts; the stop rule cuts "
                f"off every accepted answer of {generated['unreachable']:.1%} of the problems"
            )
    return lines


def _conditions(result: dict[str, Any]) -> list[str]:
    settings, who, teacher = result["settings"], result["checkpoint"], result["teacher"]
    mixers = ", ".join(f"{count} {name}" for name, count in who["mixers"].items())
    weights = f"{who['parameters']:,} parameters; layers: {mixers}; weights {who['hash'][:12]}"
    if teacher:
        weights += f"; teacher {teacher['path']} {teacher['hash'][:12]}"
    data = "from the hub" if settings["data"] is None else f"local {(settings['data_sha256'] or '')[:12]}"
    how = f"{settings['dtype']} on {settings['device']}, batch {settings['batch_size']}, data {data}, "
    how += f"text {settings['text']} in rows of {settings['row_tokens']:,} tokens"
    if settings["max_new_tokens"]:
        how += f", at most {settings['max_new_tokens']} new tokens a problem"
    made = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [weights, "", how, "", f"{made}; {result['date']}, {result['seconds']:.0f} s"]


def number(value: float | None, *, sign: bool = False, digits: int = 4) -> str:
    """So many digits, or all of them before the point; empty for None."""
    plus = "+" if sign else ""
    if value is None:
        return ""
    return f"{value:{plus},.0f}" if abs(value) >= 1000 else f"{value:{plus}#.{digits}g}".rstrip(".")


def error_of(value: float | None) -> str:
    """A standard error as it stands after ±."""
    return number(value, digits=2)
