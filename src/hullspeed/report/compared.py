"""Configurations of a sweep beside each other: a table, and cost against latency as a plot."""

from __future__ import annotations

from collections.abc import Sequence

from hullspeed.report.blocks import Paragraph, Plot, Point, Report, Section, Series, Table, number
from hullspeed.twin.question import Outcome
from hullspeed.twin.summary import Objective

METRICS = ("TTFT ms", "p99", "TPOT ms", "good/s", "kept", "hits", "preempt", "$/M out")


def sweep_report(
    title: str,
    outcomes: Sequence[Outcome],
    front: set[str],
    objective: Objective,
    *,
    ranked: bool = False,
    limit: int = 60,
) -> Report:
    """Configurations beside each other; those that no other beats in everything are numbered, the
    cheapest first, in table and plot alike. A ranking goes by goodput, best first.
    """
    shown = sorted(outcomes, key=_rank) if ranked else list(outcomes)
    if len(shown) > limit:
        shown = sorted(shown, key=lambda o: (o.label not in front, _rank(o)))
    cut = shown[:limit]
    marks = _marks(outcomes, front)
    axes = _axes(outcomes)
    rows = tuple(_row(outcome, axes, marks.get(outcome.label, "")) for outcome in cut)
    left_out = f"; {len(shown) - len(cut)} more in --json" if len(shown) > len(cut) else ""
    caption = (
        f"{len(outcomes)} configurations, medians; numbered: no other is better in all{left_out}"
    )
    table = Table(
        header=(*(axes or ("",)), "*", *METRICS), rows=rows, caption=caption,
        text_columns=max(1, len(axes)), wide=True,
    )  # fmt: skip
    plot = Plot(
        x_label="dollars per million output tokens",
        y_label="TTFT p99, s",
        series=(
            Series("no other is better in all (as in the table)", _points(outcomes, marks, True)),
            Series("others", _points(outcomes, marks, False)),
        ),
        caption="cost against latency",
    )
    sections = [Section("Compared", (table, plot, *_why_not(cut)))]
    first = next((outcome for outcome in shown if outcome.cost_source), None)
    if first is not None:
        rests = f"Steps of {first.label}: {first.cost_source}. Of the others: --json."
        sections.append(Section("What this rests on", (Paragraph(rests),)))
    good = [o for o in outcomes if o.summary is not None and o.summary.meets]
    keep = "keep the objective" if objective.given else "answer requests (no objective was given)"
    verdict = f"{len(good)} of {len(outcomes)} configurations {keep}"
    return Report(title=title, verdict=verdict, ok=bool(good), sections=tuple(sections))


def _axes(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Names of a sweep's axes; none where each outcome is a change of its own."""
    return tuple(outcomes[0].changes) if outcomes else ()


def _marks(outcomes: Sequence[Outcome], front: set[str]) -> dict[str, str]:
    """A number for each configuration of the front, by cost."""
    best = [o for o in outcomes if o.label in front and o.summary is not None]
    best.sort(key=lambda o: (o.summary.usd_per_m_output or 0.0) if o.summary else 0.0)
    return {o.label: str(place) for place, o in enumerate(best, 1)}


def _rank(outcome: Outcome) -> tuple[float, float, str]:
    summary = outcome.summary
    if summary is None:
        return (1.0, 0.0, outcome.label)
    return (-summary.goodput_per_s, summary.ttft_s.get("p99", 0.0), outcome.label)


def _row(outcome: Outcome, axes: tuple[str, ...], mark: str) -> tuple[str, ...]:
    summary = outcome.summary
    names = tuple(outcome.changes[axis] for axis in axes) or (outcome.label,)
    if summary is None or not summary.requests:
        return (*names, "", *["-"] * len(METRICS))
    tpot = summary.tpot_s
    price = summary.usd_per_m_output
    return (
        *names,
        mark,
        number(1e3 * summary.ttft_s["p50"]),
        number(1e3 * summary.ttft_s["p99"]),
        number(1e3 * tpot["p50"]) if tpot else "-",
        number(summary.goodput_per_s),
        f"{summary.attained:.0%}",
        f"{summary.hit_rate:.0%}",
        str(summary.preemptions),
        "-" if price is None else number(price),
    )


def _why_not(outcomes: Sequence[Outcome]) -> tuple[Table, ...]:
    """Why some have no figures, apart: sentences would widen the other table beyond reading."""
    rows = tuple(
        (outcome.label, outcome.error or "every request was refused")
        for outcome in outcomes
        if outcome.summary is None or not outcome.summary.requests
    )
    return (Table(header=("without figures", "why"), rows=rows, text_columns=2),) if rows else ()


def _points(
    outcomes: Sequence[Outcome], marks: dict[str, str], on_front: bool
) -> tuple[Point, ...]:
    return tuple(
        Point(
            o.summary.usd_per_m_output, o.summary.ttft_s["p99"], o.label, on_front,
            marks.get(o.label, ""),
        )
        for o in outcomes
        if o.summary is not None
        and o.summary.requests
        and o.summary.usd_per_m_output is not None
        and (o.label in marks) == on_front
    )  # fmt: skip
