"""summary: an UpResult as a report for the terminal and the HTML file."""

from __future__ import annotations

from hullspeed.report.blocks import (
    Compared,
    Comparison,
    Findings,
    MemoryBar,
    Paragraph,
    Percentiles,
    Report,
    Section,
    Table,
    number,
)
from hullspeed.up.result import MeasuredCell, UpResult
from hullspeed.verify.report import Outcome


def up_report(result: UpResult) -> Report:
    """Objectives first, then what each stage found."""
    missed = [objective.name for objective in result.objectives if not objective.held]
    verdict = "every objective held" if not missed else f"missed: {'; '.join(missed)}"
    return Report(
        title=f"hullspeed up: {result.model} on {result.machine}",
        verdict=verdict,
        ok=result.ok,
        sections=(
            Section("Memory, as planned", (MemoryBar(result.plan.stack), _pool(result))),
            Section("Predicted beside measured", (_compared(result),)),
            Section("Latency", _latencies(result)),
            Section("Cold against cached", _cold_and_cached(result)),
            Section("Correctness", _correctness(result)),
            Section("Objectives", (_objectives(result),)),
            Section("Stages", (_stages(result),)),
        ),
    )


def _pool(result: UpResult) -> Paragraph:
    capacity = result.plan.capacity
    return Paragraph(
        f"{result.plan.summary} KV: {result.plan.kv_formula}; "
        f"{capacity.blocks:,} pages of {capacity.block_tokens} tokens."
        + (f" Skipped: {'; '.join(result.skipped)}." if result.skipped else "")
    )


def _compared(result: UpResult) -> Comparison:
    rows = [row for cell in result.cells for row in _compared_cell(cell)]
    return Comparison(
        rows=tuple(rows),
        caption="Predicted before the server was started: the production scheduler on a virtual "
        "clock, with this machine's measured step times.",
    )


def _compared_cell(cell: MeasuredCell) -> list[Compared]:
    found, expected = cell.measured, cell.predicted
    ttft = itl = output = None
    if found is not None:
        ttft, itl, output = found.ttft_s.p50, found.itl_s.p50, found.output_tok_s
    factor = 1 + expected.relative_error
    return [
        Compared(
            name=f"{cell.cell.title}: {name}",
            unit=unit,
            predicted=value * scale,
            low=value * scale / factor,
            high=value * scale * factor,
            measured=None if measured is None else measured * scale,
        )
        for name, unit, scale, value, measured in (
            ("TTFT p50", "ms", 1e3, expected.ttft_s, ttft),
            ("ITL p50", "ms", 1e3, expected.itl_s, itl),
            ("output", "tok/s", 1.0, expected.output_tok_s, output),
        )
    ]


def _latencies(result: UpResult) -> tuple[Percentiles, Table]:
    series = {}
    rows = []
    for cell in result.cells:
        found = cell.measured
        if found is None:
            continue
        for name, values in (("TTFT", found.ttft_s), ("ITL", found.itl_s)):
            series[f"{cell.cell.title}: {name}"] = {
                "p50": values.p50 * 1e3,
                "p90": values.p90 * 1e3,
                "p99": values.p99 * 1e3,
            }
        trust = found.trust
        reasons = f": {'; '.join(trust.reasons)}" if trust.reasons else ""
        rows.append(
            (
                cell.cell.title,
                f"{trust.verdict}{reasons}",
                found.load,
                f"{found.ok}/{found.requests}",
                number(found.output_tok_s),
            )
        )
    table = Table(
        header=("cell", "trust", "load", "served", "output tok/s"),
        rows=tuple(rows),
        text_columns=3,
    )
    return Percentiles(unit="ms", series=series), table


def _cold_and_cached(result: UpResult) -> tuple[Table]:
    by_cache = {cell.cell.cache: cell for cell in result.cells[-2:]}
    rows = [_cache_row(by_cache[name]) for name in ("cold", "cached") if name in by_cache]
    return (
        Table(
            header=("prefix", "prompt tokens", "from the cache", "TTFT p50 ms", "TTFT p90 ms"),
            rows=tuple(rows),
        ),
    )


def _cache_row(cell: MeasuredCell) -> tuple[str, ...]:
    found = cell.measured
    if found is None:
        return (cell.cell.cache, "-", "-", "-", "-")
    hit = "-" if found.hit_rate is None else f"{found.hit_rate:.1%}"
    ttft = found.ttft_s
    return (
        cell.cell.cache,
        number(found.prompt_tokens.mean),
        hit,
        number(ttft.p50 * 1e3),
        number(ttft.p90 * 1e3),
    )


def _correctness(result: UpResult) -> tuple[Table, Findings]:
    rows = tuple(
        (check.code, check.title, str(check.outcome), check.reason)
        for check in result.verify.checks
    )
    header = ("check", "", "outcome", "")
    passed = result.verify.count(Outcome.PASSED)
    caption = f"{passed} of {len(rows)} checks passed"
    table = Table(header=header, rows=rows, caption=caption, text_columns=4)
    return table, Findings((*result.preflight, *result.verify.findings))


def _objectives(result: UpResult) -> Table:
    rows = tuple(
        ("held" if objective.held else "missed", objective.name, objective.evidence)
        for objective in result.objectives
    )
    return Table(header=("", "objective", "evidence"), rows=rows, text_columns=3)


def _stages(result: UpResult) -> Table:
    rows = tuple((name, f"{seconds:.1f}") for name, seconds in result.stages_s.items())
    return Table(header=("stage", "seconds"), rows=rows)
