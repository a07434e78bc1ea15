"""HTML: a report as one page that needs nothing else: inline style and SVG, no script, no fetch."""

from __future__ import annotations

import math
from html import escape

from hullspeed.findings import Finding
from hullspeed.memory.budget import MemoryStack, Term
from hullspeed.report.blocks import (
    Block,
    Bullets,
    Code,
    Comparison,
    Findings,
    MemoryBar,
    Paragraph,
    Percentiles,
    Plot,
    Report,
    Section,
    Table,
    number,
)
from hullspeed.report.plot import plot_svg
from hullspeed.units import format_bytes

# Paul Tol's bright scheme: told apart with any colour vision.
_COLOUR = {
    Term.WEIGHTS: "#4477aa",
    Term.SEQUENCE_STATE: "#228833",
    Term.RUNTIME: "#ccbb44",
    Term.HEADROOM: "#aaaaaa",
}
_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8882}
body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.verdict{font-weight:600;padding:.5rem .8rem;border-left:.3rem solid;margin:.8rem 0}
.ok{border-color:#228833;background:#22883322}.bad{border-color:#cc3311;background:#cc331122}
table{border-collapse:collapse;margin:.5rem 0;font-variant-numeric:tabular-nums}
caption{text-align:left;font-style:italic}td,th{padding:.15rem .8rem .15rem 0;text-align:right;
border-bottom:1px solid var(--line);vertical-align:top}.w{text-align:left}
td.note{font-size:.85rem;opacity:.75;text-align:left}.scroll{overflow-x:auto}
pre{background:var(--soft);padding:.6rem;overflow-x:auto}svg{max-width:100%;height:auto}
.key{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
.error{color:#cc3311}.warning{color:#aa7700}.info{color:#4477aa}dd{margin:0 0 0 1.5rem}
"""


def page(report: Report) -> str:
    """The whole page."""
    state = "ok" if report.ok else "bad"
    sections = "\n".join(section_html(section) for section in report.sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(report.title)}</h1>\n"
        f'<p class="verdict {state}">{escape(report.verdict)}</p>\n'
        f"{sections}\n</body></html>\n"
    )


def section_html(section: Section) -> str:
    """One section."""
    body = "\n".join(block_html(block) for block in section.blocks)
    return f"<section><h2>{escape(section.title)}</h2>\n{body}</section>"


def block_html(block: Block) -> str:
    """One block."""
    match block:
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Bullets(lines):
            return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Table():
            return _table(block.header, block.rows, block.caption, block.text_columns)
        case MemoryBar(stack):
            return memory_bar(stack)
        case Percentiles():
            return _percentiles(block)
        case Comparison():
            return _comparison(block)
        case Plot():
            return plot_svg(block)
        case Findings(findings):
            return "<dl>" + "".join(_finding(finding) for finding in findings) + "</dl>"


def memory_bar(stack: MemoryStack, width: int = 900) -> str:
    """The stack as an SVG bar, ``width`` user units wide, and a table of its items."""
    parts, x = [], 0.0
    for item in stack.items:
        w = min(max(0.0, item.bytes / stack.total_bytes * width), width - x)
        title = escape(f"{item.term}: {item.name}, {format_bytes(item.bytes)}")
        parts.append(
            f'<rect x="{x:.1f}" y="0" width="{w:.1f}" height="34" fill="{_COLOUR[item.term]}" '
            f'stroke="#fff" stroke-width="1"><title>{title}</title></rect>'
        )
        x += w
    total = format_bytes(stack.total_bytes)
    svg = (
        f'<svg viewBox="0 0 {width} 36" role="img" aria-label="memory of {total}">'
        f'<rect width="{width}" height="34" fill="none" stroke="#888"/>{"".join(parts)}</svg>'
    )
    rows = []
    for item in stack.items:
        span = (
            ""
            if item.interval is None
            else f"{format_bytes(item.low)} to {format_bytes(item.high)}"
        )
        rows.append(
            f'<tr><td class="w"><span class="key" style="background:{_COLOUR[item.term]}"></span>'
            f"{escape(item.term)}: {escape(item.name)}</td><td>{format_bytes(item.bytes)}</td>"
            f'<td>{span}</td><td class="note">{escape(item.source)}</td></tr>'
        )
    if stack.free_bytes > 0:
        free = format_bytes(stack.free_bytes)
        rows.append(f'<tr><td class="w">not claimed</td><td>{free}</td><td></td><td></td></tr>')
    return f'{svg}<div class="scroll"><table>{"".join(rows)}</table></div>'


def _table(
    header: tuple[str, ...], rows: tuple[tuple[str, ...], ...], caption: str, text_columns: int
) -> str:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        words = f'{tag} class="w"'
        return "".join(
            f"<{words if i < text_columns else tag}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', header)}</tr></thead>"
    return f'<div class="scroll"><table>{title}{head}<tbody>{body}</tbody></table></div>'


def _percentiles(block: Percentiles) -> str:
    """A row per series: a line from its least to its greatest value and a point at each, on a
    logarithmic axis, because an ITL and a cold TTFT are three decades apart.
    """
    values = [v for series in block.series.values() for v in series.values() if v > 0]
    labels = tuple(dict.fromkeys(label for series in block.series.values() for label in series))
    rows = tuple(
        (name, *(number(series[lb]) if lb in series else "-" for lb in labels))
        for name, series in block.series.items()
    )
    header = ("", *(f"{label} ({block.unit})" for label in labels))
    table = _table(header, rows, block.caption, 1)
    if not values:
        return table
    ticks = _ticks(min(values), max(values))
    low, decades = math.log10(ticks[0]), math.log10(ticks[-1] / ticks[0])
    left, width, row_height = 190, 640, 44
    height = len(block.series) * row_height + 30
    marked = ", ".join(labels)

    def at(value: float) -> float:
        return left + (math.log10(max(value, ticks[0])) - low) / decades * width

    parts = [
        f'<path d="M{at(tick):.1f} 0V{height - 20}" stroke="#8884"/>'
        f'<text x="{at(tick):.1f}" y="{height - 5}" text-anchor="middle" font-size="12">'
        f"{tick:,g}</text>"
        for tick in ticks
    ]
    parts.append(
        f'<text x="0" y="{height - 5}" font-size="12">{escape(block.unit)}; {escape(marked)}</text>'
    )
    for i, (name, series) in enumerate(block.series.items()):
        y = 22 + i * row_height
        parts.append(f'<text x="0" y="{y + 4}" font-size="14">{escape(name)}</text>')
        xs = [at(value) for value in series.values()]
        if xs:
            parts.append(
                f'<line x1="{min(xs):.1f}" x2="{max(xs):.1f}" y1="{y}" y2="{y}" stroke="#4477aa" '
                'stroke-width="6" stroke-linecap="round"/>'
            )
        for x, (label, value) in zip(xs, series.items(), strict=True):
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="#4477aa" stroke="#fff">'
                f"<title>{escape(name)} {escape(label)}: {number(value)} {escape(block.unit)}"
                "</title></circle>"
            )
    svg = (
        f'<svg viewBox="0 0 {left + width + 30} {height}" role="img" fill="currentColor" '
        f'aria-label="{escape(block.caption or "percentiles")}">{"".join(parts)}</svg>'
    )
    return svg + table


def _ticks(low: float, high: float) -> list[float]:
    """Of 1, 2, 5, 10, ...: from the last that is not above ``low`` to the first not below ``high``;
    decades alone where that would be more than eight.
    """
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    for steps in ((1, 2, 5), (1,)):
        ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        below = max(i for i, tick in enumerate(ticks) if tick <= low)
        above = min(i for i, tick in enumerate(ticks) if tick >= high and i > below)
        if above - below < 8:
            break
    return ticks[below : above + 1]


def _comparison(block: Comparison) -> str:
    rows = tuple(
        (
            f"{row.name} ({row.unit})",
            number(row.predicted),
            f"{number(row.low)} to {number(row.high)}",
            "-" if row.measured is None else number(row.measured),
            "-" if row.error is None else f"{row.error:+.0%}",
            {True: "inside", False: "outside", None: "-"}[row.inside],
        )
        for row in block.rows
    )
    header = ("", "predicted", "interval", "measured", "error", "interval holds it")
    return _table(header, rows, block.caption, 1)


def _finding(finding: Finding) -> str:
    lines = [
        f'<dt class="{finding.severity}"><b>{escape(finding.code)}</b> {escape(finding.what)}</dt>'
    ]
    evidence = ", ".join(f"{key} {value}" for key, value in finding.evidence.items())
    for label, text in (("why", finding.why), ("seen", evidence), ("fix", finding.fix)):
        if text:
            lines.append(f"<dd>{label}: {escape(text)}</dd>")
    return "".join(lines)
