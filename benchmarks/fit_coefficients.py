"""Fit the cost model's coefficients to published measurements, and measure what that is worth.

    python benchmarks/fit_coefficients.py measured_points.csv > src/hullspeed/perf/coefficients.toml

Each row is played as it was measured; every term of every step is summed over the time that a
metric spans, so that a metric is linear in the coefficients. Least squares on relative errors,
reweighted towards the median, with a weak pull to physical starting values; schedules are replayed
with the new coefficients and the fit repeated. Errors are those of groups (model, format, GPUs,
engine) left out of the fit, by GPU, by model and by group.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hullspeed.hardware.catalogue import find_gpu
from hullspeed.perf.fitted import ENGINE_TERMS, ENGINES, Coefficients, FittedCost
from hullspeed.perf.points import Point, read_points
from hullspeed.perf.terms import Terms
from hullspeed.perf.work import Shape
from hullspeed.plan.measured import engine_for, model_of, play

Floats = npt.NDArray[np.float64]
SHARED = tuple(name for name in Terms._fields if name not in ENGINE_TERMS)
REQUEST_S = 0.005  # before the scheduler: HTTP and tokenizing of a warm server
# Where the fit starts and what pulls it: shares of peak of roofline.toml, its seconds a layer.
START = {
    "weights_s": 1.33, "multiply_s": 1.67, "multiply_low_s": 1.67, "attention_s": 2.2,
    "delta_s": 5.0, "kv_s": 1.67, "state_s": 1.67, "rows_s": 1.4, "layers": 20e-6,
    "reduces": 6e-6, "reduce_s": 1.4, "moe_layers": 30e-6, "eager_layers": 40e-6,
    "steps": 1.2e-3, "sequences": 5e-6, "first_token_s": 0.012,
}  # fmt: skip
SOURCES = {
    "weights_s": "1 / share of peak bandwidth in reading weights",
    "multiply_s": "1 / share of the dense 16-bit peak in matrix products",
    "multiply_low_s": "1 / share of the dense 8- or 4-bit peak",
    "attention_s": "1 / share of the 16-bit peak in prompt attention",
    "delta_s": "1 / share of the 16-bit peak in recurrent prompt arithmetic; hardly measured",
    "kv_s": "1 / share of peak bandwidth in reading KV",
    "state_s": "1 / share of peak bandwidth in recurrent state; hardly measured",
    "rows_s": "activations between products over peak bandwidth",
    "layers": "seconds a layer inside CUDA graphs",
    "reduces": "seconds an all-reduce beside its bytes",
    "reduce_s": "1 / share of one direction's link bandwidth",
    "moe_layers": "seconds a routed layer beside its products; hardly measured",
    "eager_layers": "seconds a layer outside CUDA graphs",
}
WEIGHT = {"ttft": 0.5, "tpot": 1.0, "output": 2.0}
FEW_ROWS = 200
SLACK = 0.03  # below this error a row no longer pulls


class Row(NamedTuple):
    """One metric of one point, linear in the coefficients."""

    metric: str
    point: Point
    features: Floats
    measured: float


def names() -> list[str]:
    own = [f"{term}:{engine}" for term in (*ENGINE_TERMS, "first_token_s") for engine in ENGINES]
    return [*SHARED, *own]


def start() -> Floats:
    return np.array([START[name.partition(":")[0]] for name in names()])


def coefficients(x: Floats, engine: str) -> Coefficients:
    value = dict(zip(names(), (float(v) for v in x), strict=True))
    terms = {name: value[name] for name in SHARED}
    terms |= {name: value[f"{name}:{engine}"] for name in ENGINE_TERMS}
    return Coefficients(terms=terms, first_token_s=value[f"first_token_s:{engine}"], origin="")


def usable(point: Point) -> bool:
    """Rows whose protocol and host are known well enough to learn from."""
    known = point.engine in ENGINES and point.accept == 1.0 and point.protocol == "closed"
    settled = (
        point.family in ("inferencemax", "sweep", "nim", "sglang") and point.concurrency <= 512
    )
    few = point.family == "gpustack" and point.concurrency <= 16 and not is_moe(point)
    return known and (settled or few)


def rows_of(point: Point, x: Floats) -> list[Row]:
    planned = model_of(point.model, point.quant)
    cost = FittedCost(
        planned.arch, find_gpu(point.gpu), weight_bytes=planned.weights.decoder,
        kv_dtype=point.kv_dtype, tp=point.tp, coefficients=coefficients(x, point.engine),
    )  # fmt: skip
    times, sums = [0.0], [np.zeros(len(Terms._fields))]

    def record(now: float, k: int, n: int, context: int, chunks: Sequence[Shape]) -> None:
        times.append(now)
        sums.append(sums[-1] + k * np.array(cost.terms_of(n, context, chunks), dtype=float))

    engine = engine_for(point)._replace(request_s=REQUEST_S, first_token_s=0.0)
    served = play(point, cost, engine, record).served
    at, total = np.array(times), np.array(sums)

    def spent(seconds: list[float]) -> Floats:
        return np.stack([np.interp(seconds, at, column) for column in total.T], axis=1)

    sent, first = spent([s.sent_s for s in served]), spent([s.first_s for s in served])
    last = spent([s.last_s for s in served])
    ttft = np.array([s.ttft_s for s in served])
    chosen = np.ones(len(ttft), dtype=bool)
    if point.median:
        low, high = np.quantile(ttft, (0.4, 0.6))
        chosen = (ttft >= low) & (ttft <= high)
    rows = []
    if point.ttft_s:
        waited = wide((first - sent)[chosen].mean(0), point.engine, 1.0)
        rows.append(Row("ttft", point, waited, point.ttft_s))
    gaps = np.array([s.osl - 1 for s in served])
    if point.tpot_s and gaps.max() > 0:
        each = (last - first)[gaps > 0] / gaps[gaps > 0, None]
        rows.append(Row("tpot", point, wide(each.mean(0), point.engine, 0.0), point.tpot_s))
    if point.output_tokens_per_s:
        tokens = sum(s.osl for s in served)
        per_token = wide(total[-1] / tokens, point.engine, 0.0)
        rows.append(Row("output", point, per_token, 1 / point.output_tokens_per_s))
    return rows


def wide(features: Floats, engine: str, request: float) -> Floats:
    """Features by term as features by coefficient."""
    value = dict(zip(Terms._fields, features, strict=True)) | {"first_token_s": request}
    parts = [name.partition(":") for name in names()]
    return np.array([value[n] if not e or e == engine else 0.0 for n, _, e in parts])


def fit(rows: list[Row], x: Floats, rounds: int = 15) -> Floats:
    relative = np.array([row.features / row.measured for row in rows])
    base = np.array([WEIGHT[row.metric] for row in rows])
    prior, pull = start(), 0.3 * math.sqrt(len(rows) / 50)
    for _ in range(rounds):
        predicted = relative @ x
        error = np.abs(np.log(np.maximum(predicted, 1e-3)))
        scale = np.sqrt(base / np.maximum(error, SLACK)) / np.maximum(predicted, 0.3)
        system = np.vstack([relative * prior * scale[:, None], pull * np.eye(len(prior))])
        target = np.concatenate([scale, np.full(len(prior), pull)])
        solved = np.linalg.lstsq(system, target, rcond=None)[0]
        x = 0.5 * x + 0.5 * prior * np.clip(solved, 0.05, 6.0)
    return x


def left_out(rows: list[Row], x: Floats, key: Callable[[Point], str]) -> list[tuple[Row, float]]:
    """Every row predicted by a fit that has not seen its group: predicted / measured."""
    found = []
    for group in sorted({key(row.point) for row in rows}):
        seen = fit([row for row in rows if key(row.point) != group], x, 8)
        found += [
            (row, float(row.features @ seen) / row.measured)
            for row in rows
            if key(row.point) == group
        ]
    return found


def ratio(row: Row, value: float) -> float:
    """Predicted over measured in the metric's own direction (output is a rate)."""
    return 1 / value if row.metric == "output" else value


def is_moe(point: Point) -> bool:
    return any(hasattr(layer.mlp, "experts") for layer in model_of(point.model, "none").arch.layers)


def median_error(pairs: list[tuple[Row, float]], metric: str) -> float:
    errors = [abs(ratio(row, v) - 1) for row, v in pairs if row.metric == metric]
    return statistics.median(errors) if errors else math.nan


def interval(pairs: list[tuple[Row, float]], metric: str, share: float) -> tuple[float, float]:
    """Factors on a prediction that hold ``share`` of the measured values: quantiles of measured /
    predicted on left-out groups, each group weighing the same.
    """
    if metric == "output" and sum(row.metric == metric for row, _ in pairs) < FEW_ROWS:
        low, high = interval(pairs, "tpot", share)  # a steady rate is what the gaps leave of it
        return 1 / high, 1 / low
    groups: dict[str, list[float]] = {}
    for row, value in pairs:
        if row.metric == metric:
            groups.setdefault(row.point.group, []).append(1 / ratio(row, value))
    values = [(v, 1 / len(vs)) for vs in groups.values() for v in vs]
    values.sort()
    total, so_far, low, high = sum(w for _, w in values), 0.0, values[0][0], values[-1][0]
    for value, weight in values:
        if so_far <= total * (1 - share) / 2:
            low = value
        if so_far <= total * (1 + share) / 2:
            high = value
        so_far += weight
    return low, high


def main(path: str) -> None:
    points = [point for point in read_points(Path(path)) if usable(point)]
    x, rows = start(), list[Row]()
    for turn in range(3):
        rows = [row for point in points for row in rows_of(point, x)]
        x = fit(rows, x)
        sys.stderr.write(f"round {turn + 1}: {len(rows)} rows of {len(points)} points\n")
    folds = {
        "group": left_out(rows, x, lambda p: p.group),
        "gpu": left_out(rows, x, lambda p: p.gpu),
        "model": left_out(rows, x, lambda p: p.model),
    }
    write(points, rows, x, folds)


def write(
    points: list[Point], rows: list[Row], x: Floats, folds: dict[str, list[tuple[Row, float]]]
) -> None:
    value = dict(zip(names(), (float(v) for v in x), strict=True))
    pairs = folds["group"]
    print("# Written by benchmarks/fit_coefficients.py; rows from sgl-project/sglang, gpustack,")
    print("# aiconfigurator-core's silicon_sample.csv (all Apache-2.0) and NVIDIA NIM's tables.")
    print(f'\n[fit]\ndate = "{datetime.now(UTC):%Y-%m-%d}"\nrows = {len(rows)}')
    print(f"points = {len(points)}\nrequest_s = {REQUEST_S}")
    judged = [pair for pair in pairs if pair[0].point.gpu in ("H100-SXM", "H200", "A100-80GB-SXM")
              and not is_moe(pair[0].point)]  # fmt: skip
    for name, fold in {**folds, "judged": judged}.items():
        by = "cv" if name == "group" else f"cv_{name}"
        what = f"a {name} left out at a time"
        if name == "judged":
            what = "groups left out, H100, H200 and A100, dense and hybrid"
        errors = ", ".join(
            f"{m} = {median_error(fold, m):.3f}"
            for m in WEIGHT
            if not math.isnan(median_error(fold, m))
        )
        print(f"{by} = {{ {errors} }} # median |error|, {what}")
    groups = sorted({point.group for point in points})
    print("groups = [\n" + "".join(f'  "{group}",\n' for group in groups) + "]")
    print("\n[terms]")
    for name in SHARED:
        print(f'{name} = {{ value = {value[name]:.4g}, source = "{SOURCES[name]}" }}')
    for engine in ENGINES:
        print(f"\n[engine.{engine}] # seconds a step, a sequence and step, a first token")
        for term in (*ENGINE_TERMS, "first_token_s"):
            print(f"{term} = {value[f'{term}:{engine}']:.4g}")
    print("\n# Factors on a prediction that hold 80 and 90 % of the values of left-out groups.")
    for metric in WEIGHT:
        print(f"[interval.{metric}]")
        for share in (0.8, 0.9):
            low, high = interval(pairs, metric, share)
            print(f"p{share * 100:.0f} = [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
