"""plot: points and lines as inline SVG."""

from __future__ import annotations

from html import escape

from hullspeed.report.blocks import Plot, number

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 860, 320, 80, 14, 46


def plot_svg(plot: Plot) -> str:
    """``plot`` as one SVG element with its caption; hovering a point names it."""
    points = [point for series in plot.series for point in series.points]
    if not points:
        return f"<p>{escape(plot.caption)}: nothing to draw</p>"
    x_top = max(point.x for point in points) * 1.05 or 1.0
    y_top = max(point.y for point in points) * 1.05 or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / x_top * (_WIDTH - _LEFT - 20),
            _TOP + (1 - y / y_top) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [_axes(plot, x_top, y_top)]
    for index, series in enumerate(plot.series):
        colour = _COLOURS[index % len(_COLOURS)]
        places = [at(point.x, point.y) for point in series.points]
        if series.line:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        else:
            for (x, y), point in zip(places, series.points, strict=True):
                title = escape(f"{point.label} ({number(point.x)}, {number(point.y)})")
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if point.marked else 4}" '
                    f'fill="{colour if point.marked else "none"}" stroke="{colour}">'
                    f"<title>{title}</title></circle>"
                )
        parts.append(
            f'<text x="{_LEFT + 12 + 150 * index}" y="12" font-size="13" fill="{colour}">'
            f"{escape(series.name)}</text>"
        )
    return (
        f"<figure><figcaption>{escape(plot.caption)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" fill="currentColor" '
        f'aria-label="{escape(plot.caption)}">{"".join(parts)}</svg></figure>'
    )


def _axes(plot: Plot, x_top: float, y_top: float) -> str:
    base, right = _HEIGHT - _BOTTOM, _WIDTH - 20
    parts = [
        f'<path d="M{_LEFT} {_TOP}V{base}H{right}" fill="none" stroke="#888"/>',
        f'<text x="{right}" y="{_HEIGHT - 8}" text-anchor="end" font-size="13">'
        f"{escape(plot.x_label)}</text>",
        f'<text x="4" y="{_TOP + 10}" font-size="13">{escape(plot.y_label)}</text>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = _LEFT + share * (right - _LEFT), base - share * (base - _TOP)
        parts.append(
            f'<text x="{x:.0f}" y="{base + 16}" text-anchor="middle" font-size="12">'
            f"{number(share * x_top)}</text>"
        )
        if share < 1:
            parts.append(
                f'<text x="{_LEFT - 6}" y="{y:.0f}" text-anchor="end" font-size="12">'
                f"{number(share * y_top)}</text>"
            )
    return "".join(parts)
