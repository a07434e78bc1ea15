"""Terminal: a report drawn with rich; plain text where colour is off."""

from __future__ import annotations

import math

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from hullspeed.findings import Finding, Severity
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
from hullspeed.units import format_bytes

_MOST_COLUMNS = 160
_FILL = {Term.WEIGHTS: "█", Term.SEQUENCE_STATE: "▓", Term.RUNTIME: "▒", Term.HEADROOM: "░"}
_COLOUR = {
    Term.WEIGHTS: "blue",
    Term.SEQUENCE_STATE: "green",
    Term.RUNTIME: "yellow",
    Term.HEADROOM: "bright_black",
}
_SEVERITY = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


def render(report: Report, console: Console) -> None:
    """Print ``report`` on ``console``. A file or a pipe has no width: comparisons, whose cells are
    short, are then as wide as they need to be.
    """
    if not console.is_terminal:
        console.width = max(console.width, *(_width(t, console) for t in _wide(report)), 0)
    console.print(Text(report.title, style="bold"))
    console.print(Text(report.verdict, style="bold green" if report.ok else "bold red"))
    for section in report.sections:
        console.print()
        console.print(section_renderable(section))


def _wide(report: Report) -> list[Table]:
    blocks = [block for section in report.sections for block in section.blocks]
    return [block for block in blocks if isinstance(block, Table) and block.wide]


def _width(table: Table, console: Console) -> int:
    """Of its longest cells, and the margin of a section."""
    wide = console.options.update(max_width=_MOST_COLUMNS)
    return console.measure(_table(table), options=wide).maximum + 2


def section_renderable(section: Section) -> RenderableType:
    """One section as a rich renderable."""
    parts: list[RenderableType] = [Text(section.title, style="bold underline")]
    parts += [Padding(block_renderable(block), (0, 0, 0, 2)) for block in section.blocks]
    return Group(*parts)


def block_renderable(block: Block) -> RenderableType:
    """One block as a rich renderable."""
    match block:
        case Paragraph(text):
            return Text(text)
        case Bullets(lines):
            return Group(*[_bullet(line) for line in lines])
        case Code(text):
            return Text(text, style="cyan", no_wrap=True, overflow="ignore")
        case Table():
            return _table(block)
        case MemoryBar(stack):
            return memory_bar(stack)
        case Percentiles():
            return _percentiles(block)
        case Comparison():
            return _comparison(block)
        case Plot(caption=caption):
            return Text(f"(plot: {caption}; see --html)", style="dim")
        case Findings(findings):
            return Group(*[_finding(finding) for finding in findings])


def memory_bar(stack: MemoryStack, width: int = 64) -> RenderableType:
    """The stack as a bar of ``width`` cells and a line for each item."""
    bar = Text()
    for term, cells in _cells(stack, width):
        bar.append(_FILL[term] * cells, style=_COLOUR[term])
    bar.append(f"  {format_bytes(stack.total_bytes)}")
    lines = RichTable(box=None, show_header=False, pad_edge=False)
    lines.add_column()
    lines.add_column(justify="right", no_wrap=True)
    lines.add_column(style="dim", overflow="fold")
    for item in stack.items:
        name = Text(f"{_FILL[item.term]} ", style=_COLOUR[item.term])
        name.append(f"{item.term}: {item.name}", style="default")
        span = ""
        if item.interval is not None:
            span = f"{format_bytes(item.low)} to {format_bytes(item.high)}; "
        lines.add_row(name, format_bytes(item.bytes), span + item.source)
    if stack.free_bytes > 0:
        lines.add_row("  not claimed", format_bytes(stack.free_bytes), "")
    return Group(bar, lines)


def _cells(stack: MemoryStack, width: int) -> list[tuple[Term, int]]:
    """Cells of each term: no term that holds anything vanishes, and none runs past the bar."""
    cells, used = [], 0
    for term in Term:
        share = stack.bytes_of(term) / stack.total_bytes
        n = max(1, round(share * width)) if share > 0 else 0
        n = min(n, width - used)
        cells.append((term, n))
        used += n
    return cells


def _bullet(line: str) -> RenderableType:
    row = RichTable.grid(padding=(0, 1, 0, 0))
    row.add_row("-", Text(line))
    return row


def _table(block: Table) -> RenderableType:
    table = RichTable(box=None, pad_edge=False, header_style="dim", title=block.caption or None,
                      title_justify="left", title_style="italic")  # fmt: skip
    for i, name in enumerate(block.header):
        # Folded, never cut: a flag or a number that ends in dots cannot be copied.
        words = i < block.text_columns
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    for row in block.rows:
        table.add_row(*[Text(cell) for cell in row])
    return table


def _percentiles(block: Percentiles) -> RenderableType:
    labels = list(dict.fromkeys(label for values in block.series.values() for label in values))
    top = max((v for s in block.series.values() for v in s.values()), default=0.0)
    table = RichTable(box=None, pad_edge=False, header_style="dim", title=block.caption or None,
                      title_justify="left", title_style="italic")  # fmt: skip
    table.add_column("")
    for label in labels:
        table.add_column(f"{label} {block.unit}", justify="right")
    table.add_column("")
    for name, values in block.series.items():
        cells = [number(values[label]) if label in values else "-" for label in labels]
        first = values.get("p50", next(iter(values.values()), 0.0))
        bar = "█" * math.ceil(20 * first / top) if top > 0 else ""
        table.add_row(Text(name), *cells, Text(bar, style="blue"))
    return table


def _comparison(block: Comparison) -> RenderableType:
    table = RichTable(box=None, pad_edge=False, header_style="dim", title=block.caption or None,
                      title_justify="left", title_style="italic")  # fmt: skip
    for i, name in enumerate(("", "predicted", "interval", "measured", "error")):
        table.add_column(name, justify="right" if i else "left")
    for row in block.rows:
        error = "-" if row.error is None else f"{row.error:+.0%}"
        style = {True: "green", False: "red", None: "dim"}[row.inside]
        table.add_row(
            Text(f"{row.name} ({row.unit})"),
            number(row.predicted),
            f"{number(row.low)} to {number(row.high)}",
            "-" if row.measured is None else number(row.measured),
            Text(error, style=style),
        )
    return table


def _finding(finding: Finding) -> RenderableType:
    text = Text(f"{finding.code} {finding.severity}: ", style=_SEVERITY[finding.severity])
    text.append(finding.what, style="default")
    evidence = ", ".join(f"{name} {value}" for name, value in finding.evidence.items())
    for label, value in (("why", finding.why), ("seen", evidence), ("fix", finding.fix)):
        if value:
            text.append(f"\n    {label}: {value}", style="default" if label == "fix" else "dim")
    return text
