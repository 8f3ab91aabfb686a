"""Line plots as inline SVG whose colours follow the page: no library, no file, no script."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 44
DASHES = ("", "7 4", "2 3", "10 3 2 3")
COLOURS = 6  # classes c0 to c5 of the page's style


@dataclasses.dataclass(frozen=True)
class Curve:
    """A named line; `colour` picks a colour and a dash, so that one model looks the same in every plot."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


@dataclasses.dataclass(frozen=True)
class Plot:
    """A title, axis labels with units, curves, and a sentence on how to read it."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    caption: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclasses.dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool
    start: float
    end: float

    def place(self, value: float) -> float:
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / ((high - low) or 1)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _even_ticks(self.low, self.high)


def figure(plot: Plot) -> str:
    """The plot as an HTML figure: drawing, legend in text, caption. Empty if no curve has a point."""
    curves = [dataclasses.replace(c, points=[p for p in c.points if _drawable(p, plot)]) for c in plot.curves]
    curves = [c for c in curves if c.points]
    if not curves:
        return ""
    body = [_drawing(plot, curves), _legend(curves)]
    if plot.caption:
        body.append(f"<p>{html.escape(plot.caption)}</p>")
    return f"<figure><figcaption>{html.escape(plot.title)}</figcaption>{''.join(body)}</figure>"


def _drawable(point: tuple[float, float], plot: Plot) -> bool:
    x, y = point
    fine = all(v is not None and math.isfinite(v) for v in point)
    return fine and (x > 0 or not plot.log_x) and (y > 0 or not plot.log_y)


def _drawing(plot: Plot, curves: Sequence[Curve]) -> str:
    xs, ys = zip(*(p for c in curves for p in c.points))
    x = _Axis(min(xs), max(xs), plot.log_x, LEFT, WIDTH - RIGHT)
    y = _Axis(*_padded(min(ys), max(ys), plot.log_y), plot.log_y, HEIGHT - BOTTOM, TOP)
    parts = [_grid(x, y), *(_line(c, x, y) for c in curves)]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" class="label">{html.escape(plot.x)}</text>')
    at = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(13 {at}) rotate(-90)" class="label">{html.escape(plot.y)}</text>'
    )
    label = html.escape(f"{plot.title}: {plot.y} against {plot.x}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _grid(x: _Axis, y: _Axis) -> str:
    parts = []
    for value in y.ticks():
        at = y.place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 5}" y="{at + 4:.1f}">{_tick(value)}</text>')
    for value in x.ticks():
        at = x.place(value)
        parts.append(f'<line class="grid" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="{at:.1f}" x2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}">{_tick(value)}</text>')
    return "".join(parts)


def _line(curve: Curve, x: _Axis, y: _Axis) -> str:
    places = [(x.place(a), y.place(b)) for a, b in curve.points]
    colour, dash = f"c{curve.colour % COLOURS}", DASHES[curve.colour % len(DASHES)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    line = f'<polyline class="{colour}" stroke-dasharray="{dash}" points="{path}"/>'
    if len(places) > 40:
        return line
    return line + "".join(f'<circle class="{colour}" r="3" cx="{a:.1f}" cy="{b:.1f}"/>' for a, b in places)


def _legend(curves: Sequence[Curve]) -> str:
    items = []
    for curve in curves:
        colour, dash = f"c{curve.colour % COLOURS}", DASHES[curve.colour % len(DASHES)]
        sample = f'<line class="{colour}" stroke-dasharray="{dash}" x1="0" x2="28" y1="6" y2="6"/>'
        items.append(
            f'<li><svg class="key" viewBox="0 0 28 12" aria-hidden="true">{sample}</svg>'
            f"{html.escape(curve.name)}</li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return low / 1.1, high * 1.1
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _even_ticks(low: float, high: float, about: int = 5) -> list[float]:
    if high <= low:
        return [low]
    raw = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = unit * next(m for m in (1, 2, 5, 10) if m * unit >= raw)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of two or ten times 1, 2, 5: whichever leaves at least three and at most nine."""
    if high <= low:
        return [low]
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5)):
        ticks = [m * 10.0**e for e in tens for m in steps if low <= m * 10.0**e <= high]
        if len(ticks) >= 3:
            return ticks if len(ticks) <= 9 else ticks[:: math.ceil(len(ticks) / 9)]
    return _even_ticks(low, high, 4)


def _tick(value: float) -> str:
    if value and abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if value and abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.4g}"
