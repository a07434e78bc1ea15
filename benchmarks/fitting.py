"""The fit behind ``coefficients.toml``: rows linear in its coefficients, and least squares."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.perf.fitted import ENGINES, HOST_TERMS, Coefficients, FittedCost
from hullspeed.perf.points import Point
from hullspeed.perf.terms import Terms
from hullspeed.perf.work import Shape
from hullspeed.plan.measured import (
    engine_for,
    host_of,
    model_of,
    play,
    summarize,
    with_speculation,
)

Floats = npt.NDArray[np.float64]
REQUEST_S = 0.005  # before the scheduler: HTTP and tokenizing of a warm server
KEPT_BACK_PERCENT = 15
# Where the fit starts and what pulls it: NVIDIA's published measurements per operation
# (benchmarks/operations.py): shares of bandwidth and of what products sustain, seconds a layer.
GLOBAL = {
    "weights_s": 1.2, "multiply_s": 1.1, "multiply_low_s": 1.1, "attention_s": 1.6, "kv_s": 1.17,
    "layers": 36e-6, "eager_layers": 60e-6, "reduces": 5e-6, "reduce_s": 1.4,
}  # fmt: skip
# What the rows hardly tell apart shares a coefficient, times a ratio: recurrent state is read as KV
# is (0.75 to 1 of the bandwidth, measured per operation), chunk kernels a little slower; two in
# five of the reads and writes between products are fused away.
TIED = {
    "delta_s": ("kv_s", 1.2), "state_s": ("kv_s", 1.0), "rows_s": ("kv_s", 0.6),
    "moe_layers": ("layers", 1.0),
}  # fmt: skip
HOST = {
    "steps:vllm": 1.2e-3, "steps:sglang": 1.2e-3, "steps:trtllm": 1.2e-3, "steps:vllm-0.7": 3e-3,
    "steps:vllm-0.7-offline": 3e-3,
    "sequences": 6e-6, "sequences:vllm-0.7": 1.5e-4, "sequences:vllm-0.7-offline": 6e-5,
    "first_token_s:vllm": 0.015, "first_token_s:sglang": 0.015, "first_token_s:trtllm": 0.015,
    "first_token_s:in-process": 0.005,
}  # fmt: skip
NAMES = (*GLOBAL, *HOST)
SHARES = ("weights_s", "multiply_s", "multiply_low_s", "attention_s", "kv_s", "reduce_s")
LEAST = np.array([1.0 if name in SHARES else 0.0 for name in NAMES])  # nothing beats its peak
WEIGHT = {"ttft": 0.5, "tpot": 1.0, "output": 1.0}
# Data-centre GPUs that most is measured on and asked about; their errors are counted apart.
JUDGED = ("H100-SXM", "H200", "A100-80GB-SXM", "A100-40GB-SXM")
SLACK = 0.03  # below this error a row no longer pulls
PULL = 0.3
HOST_PULL = 0.25  # of a machine's factor to 1, in units of ln 2 and one row


class Model(NamedTuple):
    """Coefficients, and factors of named hosts."""

    x: Floats
    machines: dict[str, float]


class Row(NamedTuple):
    """One metric of one point, linear in the coefficients; ``host`` is what a host's speed scales,
    ``waited`` its time to first token over that of one request alone.
    """

    metric: str
    point: Point
    plain: Floats
    host: Floats
    measured: float
    weight: float
    waited: float


def start() -> Model:
    return Model(np.array([*GLOBAL.values(), *HOST.values()]), {})


def name_of(term: str, engine: str) -> str:
    """The coefficient that ``term`` takes for ``engine``."""
    term = TIED.get(term, (term, 1.0))[0]
    if term in ("steps", "sequences", "first_token_s", "eager_layers"):
        return f"{term}:{engine}" if f"{term}:{engine}" in HOST else term
    return term


def ratio_of(term: str) -> float:
    """What ``term`` takes of a coefficient that it shares."""
    return TIED.get(term, (term, 1.0))[1]


def coefficients(model: Model, engine: str, machine: str) -> Coefficients:
    value = dict(zip(NAMES, (float(v) for v in model.x), strict=True))
    terms = {name: value[name_of(name, engine)] * ratio_of(name) for name in Terms._fields}
    terms |= {name: terms[name] * model.machines.get(machine, 1.0) for name in HOST_TERMS}
    return Coefficients(terms=terms, first_token_s=0.0, origin="")


def kept_back(point: Point) -> bool:
    """Whether the point's group is kept back, by a hash of its name: chosen before any fit."""
    return int(hashlib.sha256(point.group.encode()).hexdigest(), 16) % 100 < KEPT_BACK_PERCENT


def is_moe(point: Point) -> bool:
    return any(hasattr(layer.mlp, "experts") for layer in model_of(point.model, "none").arch.layers)


def kind_of(point: Point) -> str:
    """What a fit cannot learn from the point: experts or drafts; else empty."""
    return "moe" if is_moe(point) else "drafts" if point.accept != 1.0 else ""


def usable(point: Point) -> bool:
    """Rows whose protocol is known well enough to learn from."""
    if host_of(point) not in ENGINES or kind_of(point):
        return False
    # Suite D in an open loop serves prompts faster than the same source computes one alone: what it
    # reuses between prompts is not published.
    return not (point.family == "accelmark" and point.protocol == "open" and point.isl > 8192)


def rows_of(points: Sequence[Point], model: Model) -> list[Row]:
    """Each point's metrics; points that differ in what was measured alone are played once."""
    played: dict[Point, Features | None] = {}
    keys = [_alike(point) for point in points]
    times = Counter(keys)
    rows = []
    for point, key in zip(points, keys, strict=True):
        if key not in played:
            played[key] = features_of(key, model)
        features = played[key]
        if features is None:
            continue
        measured = (point.ttft_s, point.tpot_s, 1 / max(point.output_tokens_per_s, 1e-9))
        known = (point.ttft_s, point.tpot_s, point.output_tokens_per_s)
        *pairs, waited = features
        for metric, pair, value, given in zip(WEIGHT, pairs, measured, known, strict=True):
            if given and pair is not None:
                rows.append(Row(metric, point, *pair, value, 1 / times[key], waited))
    return rows


def _alike(point: Point) -> Point:
    return replace(
        point, line=0, source="", version="", assumed="", ttft_s=1.0, tpot_s=1.0,
        output_tokens_per_s=1.0,
    )  # fmt: skip


Pair = tuple[Floats, Floats]
Features = tuple[Pair | None, Pair | None, Pair | None, float]


def features_of(point: Point, model: Model) -> Features | None:
    """TTFT, TPOT and seconds a token as sums over coefficients, plain and of the host."""
    planned, engine_name = model_of(point.model, point.quant), host_of(point)
    cost = FittedCost(
        planned.arch, find_gpu(point.gpu), weight_bytes=planned.weights.decoder,
        kv_dtype=point.kv_dtype, tp=point.tp, eager=point.eager, engine=point.engine,
        coefficients=coefficients(model, engine_name, point.machine),
    )  # fmt: skip
    times, sums = [0.0], [np.zeros(len(Terms._fields))]

    def record(now: float, k: int, n: int, context: int, chunks: Sequence[Shape]) -> None:
        times.append(now)
        sums.append(sums[-1] + k * np.array(cost.terms_of(n, context, chunks), dtype=float))

    request_s = 0.0 if point.in_process else REQUEST_S
    engine = engine_for(point)._replace(request_s=request_s, first_token_s=0.0)
    try:
        replayed = play(point, cost, engine, record)
    except UsageError:
        return None
    served = replayed.served
    at, total = np.array(times), np.array(sums)

    def spent(seconds: Iterable[float]) -> Floats:
        wanted = np.array(list(seconds))
        return np.stack([np.interp(wanted, at, column) for column in total.T], axis=1)

    sent, first = spent(s.sent_s for s in served), spent(s.first_s for s in served)
    last = spent(s.last_s for s in served)
    gaps = np.array([s.osl - 1 for s in served])
    middle = _middle([s.ttft_s for s in served], point.median)
    ttft = wide((first - sent)[middle].mean(0), point, 1.0)
    tpot = None
    if gaps.max() > 0:
        each = (last - first)[gaps > 0] / gaps[gaps > 0, None]
        middle = _middle([s.tpot_s for s in served if s.osl > 1], point.median)
        tpot = wide(each[middle].mean(0), point, 0.0)
    waited = summarize(point, replayed, cost, engine).waited
    return ttft, tpot, wide(total[-1] / sum(s.osl for s in served), point, 0.0), waited


def _middle(values: list[float], median: bool) -> npt.NDArray[np.bool_]:
    """Which requests the published statistic speaks of."""
    array = np.array(values)
    low, high = np.quantile(array, (0.4, 0.6)) if median else (-math.inf, math.inf)
    chosen: npt.NDArray[np.bool_] = (array >= low) & (array <= high)
    return chosen


def wide(terms: Floats, point: Point, requests: float) -> Pair:
    """Features by term as features by coefficient."""
    engine = host_of(point)
    plain, host = np.zeros(len(NAMES)), np.zeros(len(NAMES))
    for term, value in zip(Terms._fields, terms, strict=True):
        into = host if term in HOST_TERMS else plain
        into[NAMES.index(name_of(term, engine))] += value * ratio_of(term)
    key = "first_token_s:" + ("in-process" if point.in_process else engine)
    host[NAMES.index(key if key in NAMES else "first_token_s:vllm")] += requests
    return plain, host


def beside(points: Sequence[Point], model: Model) -> list[tuple[str, str, str, float]]:
    """Points of experts and drafts, which take no part in the fit: kind, metric, group, and
    predicted / measured.
    """
    found = []
    first = dict(zip(NAMES, (float(v) for v in model.x), strict=True))
    for point in points:
        if not kind_of(point) or kept_back(point) or point.in_process:
            continue
        planned, host = model_of(point.model, point.quant), host_of(point)
        cost = with_speculation(point, FittedCost(
            planned.arch, find_gpu(point.gpu), weight_bytes=planned.weights.decoder,
            kv_dtype=point.kv_dtype, tp=point.tp, eager=point.eager, engine=point.engine,
            coefficients=coefficients(model, host, point.machine),
        ))  # fmt: skip
        engine = engine_for(point)._replace(
            request_s=REQUEST_S, first_token_s=first[f"first_token_s:{host}"]
        )
        try:
            said = summarize(point, play(point, cost, engine), cost, engine)
        except UsageError:
            continue
        given = (point.ttft_s, point.tpot_s, point.output_tokens_per_s)
        found += [
            (kind_of(point), metric, point.group, value / measured)
            for metric, value, measured in zip(WEIGHT, said, given, strict=False)
            if measured
        ]
    return found


def fit(rows: Sequence[Row], model: Model, rounds: int = 15) -> Model:
    """Coefficients and host factors that bring the rows' relative errors down."""
    measured = np.array([row.measured for row in rows])[:, None]
    plain = np.array([row.plain for row in rows]) / measured
    host = np.array([row.host for row in rows]) / measured
    base = np.array([WEIGHT[row.metric] * row.weight for row in rows])
    names = sorted({row.point.machine for row in rows if row.point.machine})
    number = {name: i for i, name in enumerate(names)}
    where = np.array([number.get(row.point.machine, -1) for row in rows])
    factors = np.array([model.machines.get(name, 1.0) for name in names] + [1.0])
    prior, pull = start().x, PULL * math.sqrt(base.sum() / 50)
    x = model.x
    for _ in range(rounds):
        relative = plain + factors[where, None] * host
        predicted = relative @ x
        error = np.abs(np.log(np.maximum(predicted, 1e-3)))
        scale = np.sqrt(base / np.maximum(error, SLACK)) / np.maximum(predicted, 0.3)
        system = np.vstack([relative * prior * scale[:, None], pull * np.eye(len(prior))])
        target = np.concatenate([scale, np.full(len(prior), pull)])
        solved = np.linalg.lstsq(system, target, rcond=None)[0]
        x = np.maximum(0.5 * x + 0.5 * prior * np.clip(solved, 0.05, 6.0), LEAST)
        of_gpu, of_host = plain @ x, host @ x
        for i in range(len(names)):
            mine = where == i
            a, b, s = of_gpu[mine], of_host[mine], scale[mine]
            anchor = HOST_PULL * float((s * s).sum()) * 0.1
            best = float((s * s * b * (1 - a)).sum() + anchor) / float(
                (s * s * b * b).sum() + anchor
            )
            factors[i] = 0.5 * factors[i] + 0.5 * min(max(best, 0.3), 4.0)
    return Model(x, dict(zip(names, (float(f) for f in factors[:-1]), strict=True)))


def predicted(row: Row, model: Model) -> float:
    """Predicted over measured in the metric's own direction (output is a rate)."""
    factor = model.machines.get(row.point.machine, 1.0)
    value = float((row.plain + factor * row.host) @ model.x) / row.measured
    return 1 / value if row.metric == "output" else value


def left_out(
    rows: Sequence[Row], model: Model, key: Callable[[Point], str]
) -> list[tuple[Row, float]]:
    """Every row predicted by a fit that has not seen its group: predicted / measured."""
    found = []
    names = np.array([key(row.point) for row in rows])
    for group in sorted(set(names)):
        seen = fit([row for row, name in zip(rows, names, strict=True) if name != group], model, 8)
        found += [
            (row, predicted(row, seen)) for row, name in zip(rows, names, strict=True)
            if name == group
        ]  # fmt: skip
    return found
