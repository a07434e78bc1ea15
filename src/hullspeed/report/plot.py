"""plot: points and lines as inline SVG, on axes with round ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from hullspeed.report.blocks import Plot, Series, number

# Paul Tol's bright scheme, which is told apart with any colour vision, on light and dark pages.
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _LINE = 860, 340, 80, 20, 48, 20
_LETTER = 7.2  # width of a letter at 13 px
_WIDE = 30.0  # from this ratio of largest to smallest on an axis is logarithmic


class _Axis(NamedTuple):
    """Values to a share of the axis."""

    ticks: tuple[float, ...]
    low: float
    high: float
    log: bool

    def share(self, value: float) -> float:
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def plot_svg(plot: Plot) -> str:
    """``plot`` as one SVG element with its caption; hovering a point names it."""
    drawn = [series for series in plot.series if series.points]
    points = [point for series in drawn for point in series.points]
    if not points:
        return f"<p>{escape(plot.caption)}: nothing to draw</p>"
    lines = any(series.line for series in drawn)
    x_axis = _axis([point.x for point in points], may_be_log=not lines)
    y_axis = _axis([point.y for point in points], may_be_log=not lines)
    legend, top = _legend(drawn)
    top += _LINE + 8  # the name of the vertical axis stands above it
    base, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x_axis.share(x) * (right - _LEFT),
            base - y_axis.share(y) * (base - top),
        )

    parts = [legend, _axes(plot, x_axis, y_axis, top)]
    taken: list[tuple[float, float]] = []
    for index, series in reversed(list(enumerate(drawn))):
        places = [at(point.x, point.y) for point in series.points]
        parts.append(_drawn(series, places, _COLOURS[index % len(_COLOURS)], taken))
    return (
        f"<figure><figcaption>{escape(plot.caption)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" fill="currentColor" '
        f'aria-label="{escape(plot.caption)}">{"".join(parts)}</svg></figure>'
    )


def _drawn(
    series: Series,
    places: Sequence[tuple[float, float]],
    colour: str,
    taken: list[tuple[float, float]],
) -> str:
    """A line, or a circle for each point; short names stand beside those where there is room."""
    if series.line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    parts = []
    for (x, y), point in zip(places, series.points, strict=True):
        title = escape(f"{point.label} ({number(point.x)}, {number(point.y)})")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if point.marked else 4}" '
            f'fill="{colour if point.marked else "none"}" stroke="{colour}">'
            f"<title>{title}</title></circle>"
        )
        near = any(abs(x - a) < 9 * len(point.mark) + 6 and abs(y - b) < 14 for a, b in taken)
        if point.mark and not near:
            taken.append((x, y))
            parts.append(
                f'<text x="{x + 8:.1f}" y="{y - 7:.1f}" font-size="12">{escape(point.mark)}</text>'
            )
    return "".join(parts)


def _legend(drawn: Sequence[Series]) -> tuple[str, float]:
    """Names of the series beside their colours, as many rows as they take, and the rows' height."""
    parts, x, y = [], float(_LEFT), 14.0
    for index, series in enumerate(drawn):
        width = 34 + _LETTER * len(series.name)
        if x > _LEFT and x + width > _WIDTH:
            x, y = float(_LEFT), y + _LINE
        colour = _COLOURS[index % len(_COLOURS)]
        mark = (
            f'<path d="M{x:.0f} {y - 4:.0f}h14" stroke="{colour}" stroke-width="3"/>'
            if series.line
            else f'<circle cx="{x + 7:.0f}" cy="{y - 4:.0f}" r="5" stroke="{colour}" '
            f'fill="{colour if series.points[0].marked else "none"}"/>'
        )
        parts.append(
            f'{mark}<text x="{x + 20:.0f}" y="{y:.0f}" font-size="13">{escape(series.name)}</text>'
        )
        x += width
    return "".join(parts), y + 6


def _axes(plot: Plot, x_axis: _Axis, y_axis: _Axis, top: float) -> str:
    base, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    names = [label + (" (logarithmic)" if axis.log else "")
             for label, axis in ((plot.x_label, x_axis), (plot.y_label, y_axis))]  # fmt: skip
    parts = [
        f'<path d="M{_LEFT} {top:.0f}V{base}H{right}" fill="none" stroke="#888"/>',
        f'<text x="{right}" y="{_HEIGHT - 8}" text-anchor="end" font-size="13">'
        f"{escape(names[0])}</text>",
        f'<text x="4" y="{top - 12:.0f}" font-size="13">{escape(names[1])}</text>',
    ]
    for tick in x_axis.ticks:
        x = _LEFT + x_axis.share(tick) * (right - _LEFT)
        parts.append(
            f'<path d="M{x:.1f} {base}v5" stroke="#888"/>'
            f'<text x="{x:.1f}" y="{base + 18}" text-anchor="middle" font-size="12">'
            f"{tick:,g}</text>"
        )
    for tick in y_axis.ticks:
        y = base - y_axis.share(tick) * (base - top)
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#8883"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="12">'
            f"{tick:,g}</text>"
        )
    return "".join(parts)


def _axis(values: Sequence[float], *, may_be_log: bool) -> _Axis:
    """From zero in round steps; logarithmic where the values lie decades apart."""
    least, most = min(values), max(values)
    if may_be_log and least > 0 and most / least > _WIDE:
        first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
        ticks = tuple(10.0**power for power in range(first, last + 1))
        return _Axis(ticks, ticks[0], ticks[-1], True)
    step = _round_step(max(most, 1e-12) / 5)
    count = max(1, math.ceil(most / step - 1e-9))
    return _Axis(
        tuple(float(f"{step * i:.12g}") for i in range(count + 1)), 0.0, step * count, False
    )


def _round_step(least: float) -> float:
    """The first of 1, 2, 5, 10, ... that is not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
