"""How far predictions are from published measurements, beside the roofline alone and a peer.

    python benchmarks/accuracy.py --points measured_points.csv [--markdown docs/accuracy.md]

Every row that names a known model, GPU, lengths and load is played as it was measured. Rows of
groups kept back from everything, rows that the fit does not use, and rows of groups that it has
seen (``coefficients.toml``) are counted apart. Worst first. With aiconfigurator-core 0.12.0
importable, its answers to the same rows stand beside ours.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from fitting import JUDGED, kept_back, usable

from hullspeed.arch import catalogue
from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.perf.fitted import kinds_of, regime_of, spread_of, training_groups
from hullspeed.perf.measured_tables import Tables, load_tables
from hullspeed.perf.points import Point, read_points
from hullspeed.perf.roofline import Roofline
from hullspeed.perf.steady import steady_state
from hullspeed.plan.measured import Predicted, model_of, predict_point

_TABLES = "## All tables"
METRICS = ("ttft", "tpot", "output")


class Result(NamedTuple):
    """One metric of one row: measured, and what each method says (0: nothing)."""

    point: Point
    metric: str
    measured: float
    fitted: float
    roofline: float
    tables: float
    regime: str

    def error(self, method: str) -> float:
        """Of ``method``, as a share of the measured value."""
        return abs(float(getattr(self, method)) / self.measured - 1)


def kind(point: Point) -> str:
    arch = catalogue.load(point.model)
    if any(hasattr(layer.mlp, "experts") for layer in arch.layers):
        return "MoE"
    return "hybrid" if arch.state_bytes("fp32", "bf16") else "dense"


def roofline(point: Point) -> Predicted:
    planned = model_of(point.model, point.quant)
    cost = Roofline(
        planned.arch, find_gpu(point.gpu), weight_bytes=planned.weights.decoder, tp=point.tp
    )
    steady = steady_state(
        cost,
        isl=int(point.isl),
        osl=max(int(point.osl), 1),
        concurrency=max(point.concurrency, 1),
        step_tokens=max(8192, point.concurrency + 1),
        request_s=cost.efficiency.request_s,
    )
    return Predicted(steady.ttft_s, steady.itl_s, steady.output_tokens_per_s)


def results_of(point: Point, tables: Tables | None) -> list[Result]:
    try:
        ours = predict_point(point)
    except UsageError as error:
        sys.stderr.write(f"line {point.line}: {error}\n")
        return []
    plain = roofline(point) if point.protocol != "open" else Predicted(0.0, 0.0, 0.0)
    theirs = tables.steady(point) if tables else None
    regime = regime_of(ours.waited, in_process=point.in_process)
    measured = (point.ttft_s, point.tpot_s, point.output_tokens_per_s)
    return [
        Result(point, metric, value, ours[i], plain[i], theirs[i] if theirs else 0.0, regime)
        for i, (metric, value) in enumerate(zip(METRICS, measured, strict=True))
        if value > 0
    ]


def covered(result: Result) -> bool:
    point = result.point
    kinds = kinds_of(catalogue.load(point.model), drafts=point.accept != 1.0)
    low, high = spread_of(result.metric, 80, result.regime, kinds=kinds)
    return low * result.fitted <= result.measured <= high * result.fitted


def summary(results: list[Result], method: str) -> str:
    errors = sorted(r.error(method) for r in results if getattr(r, method) > 0)
    if not errors:
        return "-"
    return f"{statistics.median(errors):.1%} / {errors[math.ceil(0.9 * (len(errors) - 1))]:.0%}"


def table(title: str, results: list[Result], key: Callable[[Result], tuple[str, ...]]) -> list[str]:
    groups: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in results:
        groups[key(result)].append(result)

    def worst(item: tuple[tuple[str, ...], list[Result]]) -> float:
        return -statistics.median(r.error("fitted") for r in item[1])

    peer = any(r.tables for r in results)
    head = ["group", "metric", "rows", "fitted", "80 % interval holds", "roofline alone"]
    head += ["aiconfigurator-core"] if peer else []
    lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for names, rows in sorted(groups.items(), key=worst):
        cells = [", ".join(names[:-1]) or "all", names[-1], str(len(rows)), summary(rows, "fitted")]
        cells += [f"{sum(map(covered, rows)) / len(rows):.0%}", summary(rows, "roofline")]
        cells += [summary(rows, "tables")] if peer else []
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def report(results: list[Result]) -> list[str]:
    seen = training_groups()
    judged = [r for r in results if r.point.gpu in JUDGED and kind(r.point) != "MoE"]
    kept = [r for r in results if kept_back(r.point)]
    rest = [r for r in results if not kept_back(r.point)]
    used = [r for r in rest if usable(r.point) and r.point.group in seen]
    parts: Iterable[tuple[str, list[Result]]] = (
        ("kept back", [r for r in kept if usable(r.point)]),
        ("kept back, rows that the fit would not use", [r for r in kept if not usable(r.point)]),
        (
            "not used by the fit",
            [r for r in rest if not (usable(r.point) and r.point.group in seen)],
        ),
        ("seen by the fit", used),
    )
    lines = ["Median / 90th percentile of |predicted / measured - 1|.", ""]
    for name, rows in parts:
        if not rows:
            continue
        lines += [f"## Groups {name}", ""]
        narrow = [r for r in judged if r in rows]
        if narrow:
            lines += table("H100, H200, A100; dense and hybrid", narrow, lambda r: (r.metric,))
            lines += table("the same by load", narrow, lambda r: (r.regime, r.metric))
        lines += table("by source and engine", rows,
                       lambda r: (r.point.family, r.point.engine, r.metric))  # fmt: skip
        lines += table("by GPU", rows, lambda r: (r.point.gpu, r.metric))
        lines += table("by kind of model", rows, lambda r: (kind(r.point), r.metric))
        lines += table("by model", rows, lambda r: (r.point.model, r.metric))
    return lines


def write_tables(path: Path, lines: list[str]) -> None:
    """Replace the tables of a page; what stands before their heading stays."""
    before = path.read_text(encoding="utf-8").partition(_TABLES)[0] if path.exists() else ""
    path.write_text(f"{before}{_TABLES}\n\n" + "\n".join(lines), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row as well")
    given = parser.parse_args(arguments)
    tables = load_tables()
    results = [r for point in read_points(given.points) for r in results_of(point, tables)]
    lines = report(results)
    print("\n".join(lines))
    if given.rows:
        for r in results:
            print(
                f"{r.point.line} {r.point.group} C={r.point.concurrency} {r.point.isl:.0f}/"
                f"{r.point.osl:.0f} {r.metric} {r.measured:.4g} fitted {r.fitted:.4g}"
            )
    if given.markdown:
        write_tables(given.markdown, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
