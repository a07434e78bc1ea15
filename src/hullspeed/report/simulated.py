"""Reports of simulations: one configuration in full, cache policies in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hullspeed.findings import Finding
from hullspeed.report.blocks import (
    Block,
    Findings,
    Paragraph,
    Percentiles,
    Plot,
    Point,
    Report,
    Section,
    Series,
    Table,
    number,
)
from hullspeed.report.nearest import nearest_table
from hullspeed.twin.cache_rows import CacheRow
from hullspeed.twin.certainty import Certainty
from hullspeed.twin.played import Moment
from hullspeed.twin.question import Capacity
from hullspeed.twin.summary import Objective, Summary
from hullspeed.units import format_seconds


def simulation_report(
    title: str,
    summary: Summary,
    timeline: Sequence[Moment],
    n_pages: int,
    capacity: Capacity | None,
    objective: Objective,
    sure: Certainty,
    findings: Sequence[Finding],
    notes: Sequence[str],
) -> Report:
    """One configuration."""
    sections = [
        Section("Latency", (_latency(summary), _intervals(summary, sure))),
        Section("Load", (_load(summary),)),
        Section(
            "Memory over time", (*_memory(timeline, n_pages), _memory_table(timeline, n_pages))
        ),
    ]
    if capacity is not None:
        sections.insert(0, Section("Capacity", (Paragraph(_capacity(capacity)),)))
    if findings:
        sections.insert(0, Section("Findings", (Findings(tuple(findings)),)))
    rests: list[Block] = [Paragraph(note) for note in notes]
    if sure.nearest:
        rests.append(nearest_table(sure.nearest))
    if rests:
        sections.append(Section("What this rests on", tuple(rests)))
    verdict = _verdict(summary, objective)
    return Report(title=title, verdict=verdict, ok=summary.meets, sections=tuple(sections))


def _verdict(summary: Summary, objective: Objective) -> str:
    if not summary.requests:
        return f"all {summary.refused:,} requests are refused: longer than the context or the pool"
    refused = f"; {summary.refused:,} are refused" if summary.refused else ""
    if not objective.given:
        return f"{number(summary.requests_per_s)} requests/s; no objective was given{refused}"
    return (
        f"{summary.attained:.1%} of requests keep the objective; goodput "
        f"{number(summary.goodput_per_s)} of {number(summary.requests_per_s)} requests/s{refused}"
    )


def _intervals(summary: Summary, sure: Certainty) -> Block:
    """The main figures with what they may really be."""
    figures = (
        ("TTFT p50", "ttft_s", summary.ttft_s.get("p50")),
        ("TPOT p50", "tpot_s", summary.tpot_s.get("p50")),
        ("output", "output_tokens_per_s", summary.output_tokens_per_s),
    )
    rows = []
    for name, key, value in figures:
        if value is None:
            continue
        show = format_seconds if key.endswith("_s") and key != "output_tokens_per_s" else _per_s
        low, high = sure.intervals[key]
        rows.append((name, show(value), f"{show(low)} to {show(high)}"))
    return Table(header=("", "simulated", f"{sure.share} % interval"), rows=tuple(rows))


def _per_s(value: float) -> str:
    return f"{number(value)} tok/s"


def _latency(summary: Summary) -> Block:
    series = {
        name: {p: 1e3 * v for p, v in values.items()}
        for name, values in (
            ("TTFT", summary.ttft_s),
            ("ITL", summary.itl_s),
            ("TPOT", summary.tpot_s),
            ("E2E", summary.e2e_s),
        )
        if values
    }
    return Percentiles(unit="ms", series=series)


def _load(summary: Summary) -> Block:
    rows = [
        ("requests answered", str(summary.requests)),
        ("requests refused (could never fit)", str(summary.refused)),
        ("duration", f"{number(summary.duration_s)} s"),
        ("requests/s", number(summary.requests_per_s)),
        ("goodput, requests/s", number(summary.goodput_per_s)),
        ("output tok/s", number(summary.output_tokens_per_s)),
        ("all tok/s", number(summary.total_tokens_per_s)),
        ("prompt tokens from the cache", f"{summary.hit_rate:.1%}"),
        ("preemptions", str(summary.preemptions)),
        ("most running, waiting", f"{summary.running_peak}, {summary.waiting_peak}"),
        ("pages held by running sequences, at most", f"{summary.memory_peak:.0%}"),
        *(
            [("recurrent states, at most", f"{summary.states_peak:.0%} of the pool")]
            if summary.states_peak
            else []
        ),
        ("engine busy", f"{summary.busy:.0%}"),
    ]
    if summary.usd_per_hour is not None:
        rows += [
            ("$ an hour", number(summary.usd_per_hour)),
            ("$ per million output tokens", _money(summary.usd_per_m_output)),
            ("$ per million tokens", _money(summary.usd_per_m_total)),
            ("$ per useful task", _money(summary.usd_per_task)),
        ]
    return Table(header=("", ""), rows=tuple(rows))


def _money(value: float | None) -> str:
    return "-" if value is None else number(value)


def _memory(timeline: Sequence[Moment], n_pages: int) -> tuple[Block, ...]:
    """Memory and queue apart: a share and a count have no axis in common."""
    shares = [
        ("pages of running sequences", lambda m: 100 * m.pages_in_use / n_pages),
        ("pages of cached prefixes", lambda m: 100 * m.pages_cached / n_pages),
    ]
    if any(m.states_share for m in timeline):
        shares.append(("recurrent states, running and cached", lambda m: 100 * m.states_share))
    counts = (
        ("running requests", lambda m: float(m.running)),
        ("waiting requests", lambda m: float(m.waiting)),
    )

    def series(
        lines: Iterable[tuple[str, Callable[[Moment], float]]],
    ) -> tuple[Series, ...]:
        return tuple(
            Series(name, tuple(Point(m.at_s, value(m)) for m in timeline), line=True)
            for name, value in lines
        )

    return (
        Plot(x_label="seconds", y_label="% of the pool", series=series(shares),
             caption="memory over time"),
        Plot(x_label="seconds", y_label="requests", series=series(counts),
             caption="requests over time"),
    )  # fmt: skip


def _memory_table(timeline: Sequence[Moment], n_pages: int) -> Block:
    step = max(1, len(timeline) // 10)
    states = any(m.states_share for m in timeline)
    rows = tuple(
        (
            number(m.at_s),
            str(m.running),
            str(m.waiting),
            f"{m.pages_in_use / n_pages:.0%}",
            f"{m.pages_cached / n_pages:.0%}",
            *((f"{m.states_share:.0%}",) if states else ()),
        )
        for m in timeline[::step]
    )
    header = ("seconds", "running", "waiting", "pages held", "pages cached")
    return Table(header=(*header, "states") if states else header, rows=rows, text_columns=0)


def _capacity(capacity: Capacity) -> str:
    if capacity.summary is None:
        return "No load keeps the objective: a single request misses it, or nearly."
    edge = "more misses it" if capacity.bounded else "more was not tried"
    return f"{number(capacity.load)} {capacity.unit} keep the objective; {edge}."


def cache_report(title: str, rows: Sequence[CacheRow]) -> Report:
    """Policies down, budgets across."""
    budgets = sorted({row.budget_gib for row in rows})
    by_policy: dict[tuple[str, str], dict[float, CacheRow]] = {}
    for row in rows:
        by_policy.setdefault((row.policy, row.state_dtype), {})[row.budget_gib] = row
    header = ["policy", "states"]
    for budget in budgets:
        header += [f"hits, {budget:g} GiB", "TTFT p99 ms", "preempt"]
    cells = []
    for (policy, dtype), found in by_policy.items():
        line = [policy, dtype]
        for budget in budgets:
            row = found[budget]
            line += [f"{row.hit_rate:.3f}", number(1e3 * row.ttft_p99_s), str(row.preemptions)]
        cells.append(tuple(line))
    best = max(rows, key=lambda row: row.hit_rate)
    table = Table(header=tuple(header), rows=tuple(cells), text_columns=2)
    verdict = (
        f"most hits: {best.policy}, states in {best.state_dtype}, {best.budget_gib:g} GiB: "
        f"{best.hit_rate:.1%} of prompt tokens"
    )
    return Report(title=title, verdict=verdict, ok=True, sections=(Section("Policies", (table,)),))
