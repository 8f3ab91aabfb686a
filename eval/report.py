"""One self-contained HTML page: a table of models side by side, plots, slot lifetimes. Nothing is loaded."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsoftmax.eval.heldout import text_lines
from unsoftmax.eval.plot import Curve, Plot, figure
from unsoftmax.eval.results import error_of, number

STYLE = """
:root { color-scheme: light dark;
  --back: #fff; --ink: #1b1e23; --soft: #5b6470; --rule: #d9dee5;
  --c0: #1f5fa8; --c1: #b34d12; --c2: #25784a; --c3: #8a3b9c; --c4: #7a6200; --c5: #a8203a; }
@media (prefers-color-scheme: dark) { :root {
  --back: #14171b; --ink: #e4e7eb; --soft: #9aa4b0; --rule: #333a43;
  --c0: #7db4f5; --c1: #f19a5b; --c2: #6fcf97; --c3: #d595e8; --c4: #d9c04a; --c5: #f28a9b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(.8rem, 4vw, 2.5rem) 3rem; max-width: 72rem;
  background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft, figure p { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--back);
  white-space: normal; min-width: 8.5rem; padding-left: 0; }
thead th { vertical-align: bottom; border-bottom: 2px solid var(--soft); white-space: normal; }
td small { color: var(--soft); white-space: nowrap; }
@media (max-width: 40rem) {
  th, td { padding: .3rem .4rem; } td small { display: block; }
  th:first-child, td:first-child { min-width: 6.5rem; } }
.plots { display: grid; gap: 1.6rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); }
figure { margin: 0; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 13px; }
svg .label { text-anchor: middle; }
svg .tick { text-anchor: middle; fill: var(--soft); font-size: 12px; }
svg .end { text-anchor: end; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
polyline, .key line { fill: none; stroke-width: 2; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .2rem 0; padding: 0;
  list-style: none; font-size: .9rem; }
.legend li { display: flex; align-items: center; gap: .4rem; }
.key { width: 28px; height: 12px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
"""
STYLE += "".join(f".c{i} {{ stroke: var(--c{i}); }} circle.c{i} {{ fill: var(--c{i}); }}\n" for i in range(6))


@dataclasses.dataclass(frozen=True)
class Row:
    """One model of the table.

    text: a Measurement's dict (`unsoftmax.convert.measure`), or None. tasks: as `rows` in results.json.
    """

    name: str
    text: dict[str, Any] | None = None
    tasks: Sequence[dict[str, Any]] = ()


def write_report(
    out_html: Path,
    rows: Sequence[Row],
    curves: Sequence[Plot] = (),
    *,
    title: str,
    lead: str = "",
    lifetimes: Sequence[dict[str, Any]] = (),
    facts: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
) -> Path:
    """Write the page, whole or not at all.

    Args:
        rows: the models; the first is what the others are compared with.
        curves: further plots; perplexity by position is drawn from the rows.
        lead: a sentence under the title.
        lifetimes: what `unsoftmax.eval.lifetimes.slot_lifetimes` returns.
        facts: name and value pairs at the end: settings, versions, times.
        notes: sentences under the table.
    """
    plots = [*curves, position_plot(rows), lifetime_plot(lifetimes)]
    figures = [drawn for plot in plots if plot is not None and (drawn := figure(plot))]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="soft">{html.escape(lead)}</p>' if lead else "",
        "<h2>Scores</h2>",
        score_table(rows),
        *(f'<p class="soft">{html.escape(note)}</p>' for note in notes),
    ]
    if figures:
        parts += ["<h2>Curves</h2>", f'<div class="plots">{"".join(figures)}</div>']
    if lifetimes:
        parts += ["<h2>How long a slot keeps a token</h2>", LIFETIME_NOTE, lifetime_table(lifetimes)]
    if facts:
        items = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts)
        parts += ["<h2>How this was made</h2>", f"<dl>{items}</dl>"]
    return write_page(out_html, title, parts)


def write_page(out_html: Path, title: str, parts: Sequence[str]) -> Path:
    """Write an HTML page of `parts` in the report's style, whole or not at all."""
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )
    out_html.parent.mkdir(parents=True, exist_ok=True)
    part = out_html.with_name(f".{out_html.name}.part")
    part.write_text(page, encoding="utf-8")
    part.replace(out_html)
    return out_html


# Scores


def score_lines(rows: Sequence[Row]) -> list[tuple[str, list[tuple[float | None, float | None]]]]:
    """Label, and (figure, standard error) of each model, for every measure that any of them has."""
    lines: dict[str, list[tuple[float | None, float | None]]] = {}
    nothing: tuple[None, None] = (None, None)
    for place, row in enumerate(rows):
        for label, value, error in _measures(row):
            lines.setdefault(label, [nothing] * len(rows))[place] = (value, error)
    return list(lines.items())


def _measures(row: Row) -> list[tuple[str, float | None, float | None]]:
    found = []
    if row.text:
        figures = text_lines(row.text)
        error = figures.pop("perplexity, standard error")
        found = [(label, value, error if label == "perplexity" else None) for label, value in figures.items()]
    for task in row.tasks:
        kept = "" if task["filter"] == "none" else f" ({task['filter']})"
        shots = ", ".join(map(str, task["shots"]))
        limited = ", limited" if task["items"] < task["items_in_full"] else ""
        label = f"{task['task']} {task['metric']}{kept}, {shots} shots, {task['items']:,} items{limited}"
        found.append((label, task["score"], task["stderr"]))
    return found


def score_table(rows: Sequence[Row]) -> str:
    """The models as columns, the measures as lines."""
    head = "".join(f'<th scope="col">{html.escape(row.name)}</th>' for row in rows)
    body = "".join(
        f"<tr><td>{html.escape(label)}</td>{''.join(_cell(*value) for value in values)}</tr>"
        for label, values in score_lines(rows)
    )
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col"></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: float | None, error: float | None) -> str:
    if value is None:
        return "<td>–</td>"
    small = f" <small>± {error_of(error)}</small>" if error else ""
    return f"<td>{number(value)}{small}</td>"


def position_plot(rows: Sequence[Row]) -> Plot | None:
    """Perplexity against position in the row, one curve a model."""
    curves = [
        Curve(
            row.name,
            [((b["from"] * (b["to"] - 1)) ** 0.5, b["ppl"]) for b in row.text["by_position"]],
            colour,
        )
        for colour, row in enumerate(rows)
        if row.text
    ]
    if not curves:
        return None
    return Plot(
        "Perplexity by position",
        "tokens before it",
        "perplexity",
        curves,
        "Each point is a stretch of positions. A model that uses all of its context goes on falling where a "
        "window stops.",
        log_x=True,
        log_y=True,
    )


# Slots

LIFETIME_NOTE = (
    '<p class="soft">Tokens until half of what was written into a slot is gone, over a sample of held-out '
    "text: the middle one, and in brackets those of which a tenth live shorter or longer. “Kept” is the "
    "share still there when the text ended.</p>"
)


def lifetime_table(lifetimes: Sequence[dict[str, Any]]) -> str:
    """Layers as lines, kinds of slots as columns."""
    kinds = list(dict.fromkeys(kind for layer in lifetimes for kind in layer["slots"]))
    head = "".join(f'<th scope="col">{html.escape(kind)}</th>' for kind in kinds)
    body = []
    for layer in lifetimes:
        cells = "".join(_lifetime_cell(layer["slots"].get(kind)) for kind in kinds)
        body.append(f"<tr><td>layer {layer['layer']}</td>{cells}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col"></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _lifetime_cell(slots: dict[str, Any] | None) -> str:
    if slots is None:
        return "<td>–</td>"
    if slots["kept"] > 0.99:
        return "<td>kept</td>"
    kept = f", {slots['kept']:.0%} kept" if slots["kept"] >= 0.005 else ""
    spread = f" <small>({slots['p10']:.0f} – {slots['p90']:.0f}{kept})</small>"
    return f"<td>{slots['median']:.0f}{spread}</td>"


def lifetime_plot(lifetimes: Sequence[dict[str, Any]]) -> Plot | None:
    """Median lifetime against layer, one curve a kind of slot; kinds that keep everything are left out."""
    kinds = list(dict.fromkeys(kind for layer in lifetimes for kind in layer["slots"]))
    curves = []
    for colour, kind in enumerate(kinds):
        points = [
            (layer["layer"], layer["slots"][kind]["median"])
            for layer in lifetimes
            if kind in layer["slots"] and layer["slots"][kind]["kept"] < 0.5
        ]
        if points:
            curves.append(Curve(kind, points, colour))
    if not curves:
        return None
    caption = "Middle lifetime in each layer."
    return Plot("Slot lifetimes", "layer", "tokens", curves, caption, log_y=True)
