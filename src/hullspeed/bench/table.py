"""A benchmark as a table, with what speaks against its numbers under it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hullspeed.bench.result import BenchResult, Cell, Distribution, Verdict

_CELLS_ABREAST = 3


def render(result: BenchResult) -> RenderableType:
    """For a terminal; every figure is also in the JSON."""
    spec = result.spec
    counted = " (estimated)" if result.prompt_tokens_by == "estimate" else ""
    shape = f"{spec.isl_tokens}{counted} in, {spec.osl_tokens} out"
    if spec.conversations:
        shape += f", {spec.turn_tokens} more per turn"
    if spec.shared_prefix_tokens:
        shape += f", {spec.shared_prefix_tokens} shared"
    title = f"{spec.model} at {spec.url}: {shape}, {spec.cache} cache"
    groups = [
        result.cells[at : at + _CELLS_ABREAST] for at in range(0, len(result.cells), _CELLS_ABREAST)
    ]
    lines = [Text.from_markup(line) for cell in result.cells for line in _remarks(cell)]
    return Group(Text(title, style="bold"), *(_table(cells) for cells in groups), *lines)


def _table(cells: list[Cell]) -> Table:
    """A column for each load: a narrow terminal holds it."""
    table = Table("")
    for cell in cells:
        table.add_column(cell.load + (" (cut short)" if cell.interrupted else ""), justify="right")
    columns = [_figures(cell) for cell in cells]
    for row in zip(_FIGURES, *columns, strict=True):
        table.add_row(*row)
    return table


_FIGURES = (
    "TTFT p50 / p99", "ITL p50 / p99", "TPOT p50 / p99", "max gap", "E2E p50 / p99", "output tok/s",
    "requests/s", "hit rate", "ok", "verdict",
)  # fmt: skip


def _figures(cell: Cell) -> tuple[str, ...]:
    colour = "green" if cell.trust.verdict is Verdict.VALID else "yellow"
    return (
        _pair(cell.ttft_s),
        _pair(cell.itl_s),
        _pair(cell.tpot_s),
        _ms(cell.max_gap_s.max) if cell.max_gap_s.count else "-",
        _pair(cell.e2e_s),
        f"{cell.output_tok_s:,.1f}",
        f"{cell.requests_per_s:.3g}",
        "-" if cell.hit_rate is None else f"{cell.hit_rate:.0%}",
        f"{cell.ok}/{cell.requests}",
        f"[{colour}]{cell.trust.verdict}[/]",
    )


def _remarks(cell: Cell) -> list[str]:
    lines = []
    trust, good = cell.trust, cell.goodput
    if good is not None:
        colour = "green" if good.held else "red"
        lines.append(
            f"[{colour}]{cell.load}: {good.share:.1%} of requests kept the objective[/] (95 % "
            f"interval {good.low:.1%} to {good.high:.1%}), {good.good_per_s:.3g} good requests/s; "
            f"judged by means alone {good.share_by_means:.1%}"
        )
    if trust.rate_asked is not None and trust.rate_scheduled is not None:
        lines.append(
            f"{cell.load}: {trust.rate_asked:.4g}/s asked, {trust.rate_scheduled:.4g}/s drawn, "
            f"{trust.rate_sent:.4g}/s sent, gap CV {trust.gap_cv:.2f}, at most "
            f"{trust.in_flight_max} in flight"
        )
    if cell.failures:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(cell.failures.items()))
        error = f": {escape(cell.first_error)}" if cell.first_error else ""
        lines.append(f"[red]{cell.load}: failed: {kinds}{error}[/]")
    if cell.turn_ttft_s:
        turns = " ".join(_ms(turn.p50) for turn in cell.turn_ttft_s)
        lines.append(f"{cell.load}: {cell.duration_s:.1f} s in all, TTFT p50 by turn: {turns}")
    lines += [f"[yellow]{cell.load}: {trust.verdict}: {escape(r)}[/]" for r in trust.reasons]
    lines += [f"[dim]{cell.load}: {escape(note)}[/]" for note in trust.notes]
    return lines


def _pair(values: Distribution) -> str:
    return f"{_ms(values.p50)} / {_ms(values.p99)}" if values.count else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
