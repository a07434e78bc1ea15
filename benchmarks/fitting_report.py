"""What the fit is worth on groups it has not seen, and ``coefficients.toml`` as text."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

from fitting import GLOBAL, HOST, JUDGED, NAMES, REQUEST_S, TIED, WEIGHT, Model, Row, name_of

from hullspeed.perf.fitted import ENGINE_TERMS, ENGINES, REGIMES, regime_of
from hullspeed.perf.points import Point
from hullspeed.perf.terms import Terms

Pair = tuple[Row, float]
FEW_ROWS = 40
FOLDS = 5
SOURCES = {
    "weights_s": "1 / share of peak bandwidth in reading weights",
    "multiply_s": "1 / share of the dense 16-bit peak in matrix products",
    "multiply_low_s": "1 / share of the dense 8- or 4-bit peak",
    "attention_s": "1 / share of the 16-bit peak in prompt attention",
    "kv_s": "1 / share of peak bandwidth in reading KV",
    "layers": "seconds a layer inside CUDA graphs",
    "reduces": "seconds an all-reduce beside its bytes",
    "reduce_s": "1 / share of one direction's link bandwidth, at most 450 GB/s",
    "eager_layers": "seconds a layer outside CUDA graphs",
    "delta_s": "recurrent prompt arithmetic",
    "state_s": "recurrent state",
    "rows_s": "activations between products",
    "moe_layers": "a routed layer beside its products",
}


def median_error(pairs: Sequence[Pair], metric: str) -> float:
    errors = [abs(v - 1) for row, v in pairs if row.metric == metric]
    return statistics.median(errors) if errors else math.nan


def interval(
    pairs: Sequence[Pair], regimes: Sequence[str], metric: str, wanted: str, share: float
) -> tuple[float, float] | None:
    """Factors on a prediction that hold ``share`` of what was measured in left-out groups; a group
    weighs as the root of its rows. ``None`` with few rows.
    """
    chosen = [
        (row, v) for (row, v), name in zip(pairs, regimes, strict=True)
        if row.metric == metric and wanted in ("", name)
    ]  # fmt: skip
    if len(chosen) < FEW_ROWS:
        return None
    size: dict[str, float] = {}
    for row, _ in chosen:
        size[row.point.group] = size.get(row.point.group, 0.0) + row.weight
    values = sorted((1 / v, row.weight / math.sqrt(size[row.point.group])) for row, v in chosen)
    total = sum(weight for _, weight in values)
    low, high, so_far = values[0][0], values[-1][0], 0.0
    for value, weight in values:
        if so_far <= total * (1 - share) / 2:
            low = value
        if so_far <= total * (1 + share) / 2:
            high = value
        so_far += weight
    return low, high


def fold_of(row: Row) -> int:
    return int(hashlib.sha256(("fold " + row.point.group).encode()).hexdigest(), 16) % FOLDS


def coverage(pairs: Sequence[Pair], regimes: Sequence[str]) -> dict[tuple[str, str], list[bool]]:
    """Whether each row lies in the 80 % interval that the other folds' groups give its regime, by
    metric and regime.
    """
    inside: dict[tuple[str, str], list[bool]] = {}
    for fold in range(FOLDS):
        away = [i for i, (row, _) in enumerate(pairs) if fold_of(row) != fold]
        others, names = [pairs[i] for i in away], [regimes[i] for i in away]
        spans = {
            (metric, name): interval(others, names, metric, name, 0.8)
            or interval(others, names, metric, "", 0.8)
            for metric in WEIGHT for name in REGIMES
        }  # fmt: skip
        for (row, value), name in zip(pairs, regimes, strict=True):
            span = spans[row.metric, name]
            if fold_of(row) == fold and span:
                inside.setdefault((row.metric, name), []).append(span[0] <= 1 / value <= span[1])
    return inside


def write(
    points: Sequence[Point], rows: Sequence[Row], model: Model, folds: dict[str, list[Pair]]
) -> None:
    pairs = folds["group"]
    regimes = [regime_of(row.waited, in_process=row.point.in_process) for row, _ in pairs]
    judged = [pair for pair in pairs if pair[0].point.gpu in JUDGED]
    served = [pair for pair in judged if not pair[0].point.in_process]
    print("# Written by benchmarks/fit_coefficients.py; rows from sgl-project/sglang, gpustack,")
    print(
        "# AccelMark, TensorRT-LLM, aiconfigurator-core's silicon_sample.csv (all Apache-2.0) and"
    )
    print("# NVIDIA NIM's tables.")
    print(f'\n[fit]\ndate = "{datetime.now(UTC):%Y-%m-%d}"\nrows = {len(rows)}')
    print(f"points = {len(points)}\ncoefficients = {len(GLOBAL)}\nhost_constants = {len(HOST)}")
    print(f"request_s = {REQUEST_S}")
    value = dict(zip(NAMES, (float(v) for v in model.x), strict=True))
    print(f"in_process_first_token_s = {value['first_token_s:in-process']:.4g}")
    what = {
        "cv": (pairs, "a group left out at a time"),
        "cv_judged": (judged, "groups left out; H100, H200 and A100"),
        "cv_served": (served, "the same behind a server: without AccelMark"),
        "cv_gpu": (folds["gpu"], "a GPU left out at a time"),
        "cv_model": (folds["model"], "a model left out at a time"),
    }
    for name, (fold, text) in what.items():
        errors = ", ".join(f"{m} = {median_error(fold, m):.3f}" for m in WEIGHT)
        print(f"{name} = {{ {errors} }} # median |error|, {text}")
    print(f"gpus = {sorted({p.gpu for p in points})}".replace("'", '"'))
    groups = sorted({point.group for point in points})
    print("groups = [\n" + "".join(f'  "{group}",\n' for group in groups) + "]")
    print("\n[terms]")
    for name in Terms._fields:
        if name in ENGINE_TERMS:
            continue
        of, ratio = TIED.get(name, (name, 1.0))
        text = SOURCES[name] + (f"; {ratio:g} x {of}" if of != name else "")
        print(f'{name} = {{ value = {value[of] * ratio:.4g}, source = "{text}" }}')
    for engine in ENGINES:
        print(f'\n[engine."{engine}"] # seconds a step, a sequence and step, a first token')
        for term in (*ENGINE_TERMS, "first_token_s"):
            key = name_of(term, engine)
            print(f"{term} = {value.get(key, value['first_token_s:vllm']):.4g}")
    print("\n# What the hosts of named machines take, as a multiple of the above.\n[machine]")
    for name, factor in model.machines.items():
        print(f'"{name}" = {factor:.3f}')
    _write_intervals(pairs, regimes, folds["gpu"])
    print(
        "\n# Share of left-out rows inside the 80 % interval of the other folds' groups.\n[covered]"
    )
    inside = coverage(pairs, regimes)
    for metric in WEIGHT:
        all_of = [i for (m, _), flags in inside.items() if m == metric for i in flags]
        parts = [("all", all_of)] + [(n, inside.get((metric, n), [])) for n in REGIMES]
        text = ", ".join(f"{n} = {sum(f) / len(f):.3f}" for n, f in parts if f)
        print(f"{metric} = {{ {text} }}")


def _write_intervals(pairs: Sequence[Pair], regimes: Sequence[str], by_gpu: Sequence[Pair]) -> None:
    print(
        "\n# Factors on a prediction that hold 80 and 90 % of the values of left-out groups, by how"
    )
    print("# long a request waits (alone, shared, queued) or without a server in front (process);")
    print("# unseen: of left-out GPUs.")
    none = [""] * len(by_gpu)
    for metric in WEIGHT:
        for name in ("", *REGIMES, "unseen"):
            use = (by_gpu, none, metric, "") if name == "unseen" else (pairs, regimes, metric, name)
            spans = [interval(*use, share) for share in (0.8, 0.9)]
            if spans[0] and spans[1]:
                print(f"[interval.{metric}.{name or 'all'}]")
                for share, (low, high) in zip((80, 90), spans, strict=True):  # type: ignore[misc]
                    print(f"p{share} = [{low:.3f}, {high:.3f}]")
