"""Reports of simulations: one in full, several beside each other, cache policies in a table."""

from __future__ import annotations

from collections.abc import Sequence

from hullspeed.report.blocks import (
    Block,
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
from hullspeed.twin.cache_rows import CacheRow
from hullspeed.twin.played import Moment
from hullspeed.twin.question import Capacity, Outcome
from hullspeed.twin.summary import Summary


def simulation_report(
    title: str,
    summary: Summary,
    timeline: Sequence[Moment],
    n_pages: int,
    capacity: Capacity | None,
    notes: Sequence[str],
) -> Report:
    """One configuration."""
    sections = [
        Section("Latency", (_latency(summary),)),
        Section("Load", (_load(summary),)),
        Section("Memory over time", (_memory(timeline, n_pages), _memory_table(timeline, n_pages))),
    ]
    if capacity is not None:
        sections.insert(0, Section("Capacity", (Paragraph(_capacity(capacity)),)))
    if notes:
        sections.append(Section("What this rests on", tuple(Paragraph(note) for note in notes)))
    verdict = (
        f"{summary.attained:.1%} of requests keep the objective; goodput "
        f"{number(summary.goodput_per_s)} of {number(summary.requests_per_s)} requests/s"
    )
    return Report(title=title, verdict=verdict, ok=summary.meets, sections=tuple(sections))


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


def _memory(timeline: Sequence[Moment], n_pages: int) -> Block:
    lines = (
        ("held by running sequences, %", lambda m: 100 * m.pages_in_use / n_pages),
        ("cached prefixes, %", lambda m: 100 * m.pages_cached / n_pages),
        ("waiting requests", lambda m: float(m.waiting)),
    )
    series = tuple(
        Series(name, tuple(Point(m.at_s, value(m)) for m in timeline), line=True)
        for name, value in lines
    )
    return Plot(x_label="seconds", y_label="", series=series, caption="pages over time")


def _memory_table(timeline: Sequence[Moment], n_pages: int) -> Block:
    step = max(1, len(timeline) // 10)
    rows = tuple(
        (
            number(m.at_s),
            str(m.running),
            str(m.waiting),
            f"{m.pages_in_use / n_pages:.0%}",
            f"{m.pages_cached / n_pages:.0%}",
        )
        for m in timeline[::step]
    )
    header = ("seconds", "running", "waiting", "pages held", "pages cached")
    return Table(header=header, rows=rows, text_columns=0)


def _capacity(capacity: Capacity) -> str:
    if capacity.summary is None:
        return "No load keeps the objective: a single request misses it, or nearly."
    edge = "more misses it" if capacity.bounded else "more was not tried"
    return f"{number(capacity.load)} {capacity.unit} keep the objective; {edge}."


def sweep_report(
    title: str,
    outcomes: Sequence[Outcome],
    front: set[str],
    *,
    ranked: bool = False,
    limit: int = 60,
) -> Report:
    """Configurations beside each other, those that no other beats marked ``*``; a ranking goes by
    goodput, best first.
    """
    shown = sorted(outcomes, key=_rank) if ranked else list(outcomes)
    if len(shown) > limit:
        shown = sorted(shown, key=lambda o: (o.label not in front, _rank(o)))
    cut = shown[:limit]
    header = (
        "", "*", "TTFT ms", "p99", "TPOT ms", "good/s", "hits", "preempt", "$/M out",
    )  # fmt: skip
    rows = tuple(_row(outcome, outcome.label in front) for outcome in cut)
    left_out = f"; {len(shown) - len(cut)} more in --json" if len(shown) > len(cut) else ""
    caption = f"{len(outcomes)} configurations, medians; * no other is better in all{left_out}"
    table = Table(header=header, rows=rows, caption=caption)
    plot = Plot(
        x_label="dollars per million output tokens",
        y_label="TTFT p99, s",
        series=(Series("filled: no other is better in everything", _points(outcomes, front)),),
        caption="cost against latency",
    )
    good = [o for o in outcomes if o.summary is not None and o.summary.meets]
    verdict = f"{len(good)} of {len(outcomes)} configurations keep the objective"
    sections = [Section("Compared", (table, plot))]
    first = next((outcome for outcome in shown if outcome.cost_source), None)
    if first is not None:
        rests = f"Steps of {first.label}: {first.cost_source}. Of the others: --json."
        sections.append(Section("What this rests on", (Paragraph(rests),)))
    return Report(title=title, verdict=verdict, ok=bool(good), sections=tuple(sections))


def _rank(outcome: Outcome) -> tuple[float, float, str]:
    summary = outcome.summary
    if summary is None:
        return (1.0, 0.0, outcome.label)
    return (-summary.goodput_per_s, summary.ttft_s.get("p99", 0.0), outcome.label)


def _row(outcome: Outcome, on_front: bool) -> tuple[str, ...]:
    summary = outcome.summary
    if summary is None or not summary.requests:
        why = outcome.error or "every request was refused"
        return (f"{outcome.label}: {why}", *[""] * 8)
    tpot = summary.tpot_s
    return (
        outcome.label,
        "*" if on_front else "",
        number(1e3 * summary.ttft_s["p50"]),
        number(1e3 * summary.ttft_s["p99"]),
        number(1e3 * tpot["p50"]) if tpot else "-",
        number(summary.goodput_per_s),
        f"{summary.hit_rate:.0%}",
        str(summary.preemptions),
        _money(summary.usd_per_m_output),
    )


def _points(outcomes: Sequence[Outcome], front: set[str]) -> tuple[Point, ...]:
    return tuple(
        Point(o.summary.usd_per_m_output, o.summary.ttft_s["p99"], o.label, o.label in front)
        for o in outcomes
        if o.summary is not None and o.summary.requests and o.summary.usd_per_m_output is not None
    )


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
