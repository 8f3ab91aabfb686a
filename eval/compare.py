"""Several results and training runs side by side: a table on the terminal and a page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unsoftmax.eval.plot import Curve, Plot
from unsoftmax.eval.report import Row, score_lines, write_report
from unsoftmax.eval.results import error_of, number


@dataclasses.dataclass(frozen=True)
class RunLog:
    """What log.jsonl of a training run holds, its steps and its held-out scores apart."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]


def compare(
    paths: Sequence[str | Path], *, out: str | Path = "compare.html", say: Callable[[str], None] = print
) -> Path:
    """Print one table of all, and write a page with the table and curves.

    Args:
        paths: each a results.json, a folder that holds one, or a run folder of unsoftmax-train.
        out: the page; or, without the ending .html, a folder that gets it as report.html.

    Returns:
        the page.

    Raises:
        ValueError: fewer than one path, one that holds neither results nor a log, or an `out` in no folder.
    """
    if not paths:
        raise ValueError("nothing to compare; name results.json files, folders that hold one, or run folders")
    out = _page(Path(out))
    names = short_names([str(path) for path in paths])
    rows, logs = [], {}
    for name, path in zip(names, paths):
        result, log = read_path(Path(path))
        if log is not None:
            logs[name] = log
        rows += _rows(name, result, log)
    rows = _one_teacher(rows)
    for line in table_lines(rows):
        say(line)
    page = write_report(
        out,
        rows,
        run_plots(logs, colours=[row.name for row in rows]),
        title="Side by side: " + ", ".join(names),
    )
    say(f"page: {page}")
    return page


def _page(out: Path) -> Path:
    page = out if out.suffix in (".html", ".htm") and not out.is_dir() else out / "report.html"
    for folder in page.parents:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {out}: {folder} is a file, not a folder; name another")
    return page


def read_path(path: Path) -> tuple[dict[str, Any] | None, RunLog | None]:
    """The results and the log that lie at `path`; ValueError if neither does."""
    result_file = path / "results.json" if path.is_dir() else path
    log_file = path / "log.jsonl"
    result = _read_json(result_file) if result_file.is_file() else None
    log = read_log(log_file) if path.is_dir() and log_file.is_file() else None
    if result is None and log is None:
        raise ValueError(
            f"{path} holds neither results.json (unsoftmax-eval CHECKPOINT --out DIR makes it) nor log.jsonl "
            "(a run folder of unsoftmax-train has it)"
        )
    return result, log


def _read_json(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict) or result.get("format") != 1:
        raise ValueError(f"{path} is not a results.json of unsoftmax-eval (its `format` is not 1)")
    return result


def read_log(path: Path) -> RunLog:
    """log.jsonl of a run; a last line that a kill has cut is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("{") and line.endswith("}"):
            rows.append(json.loads(line))
    held_out = [row for row in rows if "ppl" in row]
    return RunLog([row for row in rows if "loss" in row and "ppl" not in row], held_out)


def _rows(name: str, result: dict[str, Any] | None, log: RunLog | None) -> list[Row]:
    if result is None:
        last = log.held_out[-1] if log and log.held_out else None
        return [Row(name, last)]
    rows = [Row(name, result["text"]["checkpoint"], result["rows"])]
    if result["teacher"]:
        scores = [
            {**row, "score": row["teacher"], "stderr": row["teacher_stderr"]}
            for row in result["rows"]
            if row["teacher"] is not None
        ]
        rows.insert(
            0, Row(f"teacher {Path(result['teacher']['path']).name}", result["text"]["teacher"], scores)
        )
    return rows


def _one_teacher(rows: list[Row]) -> list[Row]:
    """Leave out a teacher that stands there already, with the same figures."""
    kept: list[Row] = []
    for row in rows:
        if row not in kept:
            kept.append(row)
    return kept


def short_names(paths: Sequence[str]) -> list[str]:
    """The shortest endings of the paths that tell them apart."""
    files = [Path(path).with_suffix("") if path.endswith(".json") else Path(path) for path in paths]
    named = [file.parent if file.name == "results" and file.parent.name else file for file in files]
    parts = [file.parts for file in named]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{n + 1}: {path}" for n, path in enumerate(paths)]


def table_lines(rows: Sequence[Row]) -> list[str]:
    """The table as text, one line a measure."""
    cells = [["", *(row.name for row in rows)]]
    for label, values in score_lines(rows):
        cells.append([label, *(_text_cell(*value) for value in values)])
    widths = [max(map(len, column)) for column in zip(*cells)]
    return [
        "  ".join(cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(line, widths)))
        for line in cells
    ]


def _text_cell(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{number(value)} ± {error_of(error)}" if error else number(value)


def run_plots(logs: dict[str, RunLog], colours: Sequence[str]) -> list[Plot]:
    """Training loss, held-out perplexity and recall against tokens, one curve a run."""

    def curves(points: Callable[[RunLog], list[tuple[Any, Any]]]) -> list[Curve]:
        return [Curve(name, points(log), colours.index(name)) for name, log in logs.items()]

    loss = curves(
        lambda log: smooth([(row["tokens"], row["loss"]) for row in log.train if row["loss"] is not None])
    )
    plots = [Plot("Training loss", "tokens", "nats a token", loss, "Running mean over the last steps.")]
    for key, title, unit in (
        ("ppl", "Held-out perplexity", "perplexity"),
        ("recall_nll", "Recall", "nats a recall token"),
    ):
        plots.append(
            Plot(
                title,
                "tokens",
                unit,
                curves(lambda log, key=key: [(r["tokens"], r[key]) for r in log.held_out]),
            )
        )
    return plots


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Running mean over a twentieth of the points, at least 1 and at most 50 of them."""
    width = max(1, min(50, len(points) // 20))
    total, found = 0.0, []
    for n, (x, y) in enumerate(points):
        total += y
        if n >= width:
            total -= points[n - width][1]
        found.append((x, total / min(n + 1, width)))
    return found
