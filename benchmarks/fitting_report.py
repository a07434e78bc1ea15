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
FEW_ROWS_OF_A_KIND = 12
FOLDS = 5
POOLED = ("group", "model", "source")  # a new row's group is as new as all of these
SHARES = (0.80, 0.82, 0.84, 0.86, 0.88, 0.90, 0.92)
SOURCES = {
    "weights_s": "1 / share of peak bandwidth in reading weights",
    "multiply_s": "over what 16-bit products sustain (sustained.toml)",
    "multiply_low_s": "over what 8- or 4-bit products sustain",
    "attention_s": "1 / share of the 16-bit peak in prompt attention",
    "kv_s": "1 / share of peak bandwidth in reading KV",
    "layers": "seconds a layer inside CUDA graphs",
    "reduces": "seconds an all-reduce beside its bytes",
    "reduce_s": "1 / share of one direction's link bandwidth",
    "eager_layers": "seconds a layer outside CUDA graphs",
    "delta_s": "what recurrent layers move for prompts",
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
        (row.point.group, v, row.weight) for (row, v), name in zip(pairs, regimes, strict=True)
        if row.metric == metric and wanted in ("", name)
    ]  # fmt: skip
    return span(chosen, share) if len(chosen) >= FEW_ROWS else None


def span(values: Sequence[tuple[str, float, float]], share: float) -> tuple[float, float]:
    """The same of groups, predicted / measured and weights."""
    size: dict[str, float] = {}
    for group, _, weight in values:
        size[group] = size.get(group, 0.0) + weight
    ordered = sorted((1 / v, weight / math.sqrt(size[group])) for group, v, weight in values)
    total = sum(weight for _, weight in ordered)
    low, high, so_far = ordered[0][0], ordered[-1][0], 0.0
    for value, weight in ordered:
        if so_far <= total * (1 - share) / 2:
            low = value
        if so_far <= total * (1 + share) / 2:
            high = value
        so_far += weight
    return low, high


def fold_of(row: Row) -> int:
    return int(hashlib.sha256(("fold " + row.point.group).encode()).hexdigest(), 16) % FOLDS


Inside = dict[tuple[str, str, str], list[bool]]


def coverage(pooled: Sequence[Pair], pairs: Sequence[Pair], metric: str, share: float) -> Inside:
    """Whether each row of ``pairs`` lies in the interval that the groups of other folds give its
    regime, by metric, regime and group.
    """
    inside: Inside = {}
    pooled = [pair for pair in pooled if pair[0].metric == metric]
    for fold in range(FOLDS):
        others = [pair for pair in pooled if fold_of(pair[0]) != fold]
        names = regimes_of(others)
        spans = {
            name: interval(others, names, metric, name, share)
            or interval(others, names, metric, "", share)
            for name in REGIMES
        }
        for row, value in pairs:
            found = spans[_regime(row)]
            if row.metric == metric and fold_of(row) == fold and found:
                key = (metric, _regime(row), row.point.group)
                inside.setdefault(key, []).append(found[0] <= 1 / value <= found[1])
    return inside


def share_for(pooled: Sequence[Pair], pairs: Sequence[Pair], metric: str) -> float:
    """The share of left-out rows that an interval has to hold so that in groups it has not seen,
    each counted once, it holds 80 %.
    """
    for share in SHARES:
        held = coverage(pooled, pairs, metric, share).values()
        if statistics.fmean(sum(flags) / len(flags) for flags in held) >= 0.8:
            return share
    return SHARES[-1]


def regimes_of(pairs: Sequence[Pair]) -> list[str]:
    return [_regime(row) for row, _ in pairs]


def _regime(row: Row) -> str:
    return regime_of(row.waited, in_process=row.point.in_process)


def write(
    points: Sequence[Point],
    rows: Sequence[Row],
    model: Model,
    folds: dict[str, list[Pair]],
    others: Sequence[tuple[str, str, str, float]],
) -> None:
    pairs = folds["group"]
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
        "cv_source": (folds["source"], "a source left out at a time"),
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
    _write_intervals(folds, others)


def _write_intervals(
    folds: dict[str, list[Pair]], others: Sequence[tuple[str, str, str, float]]
) -> None:
    pooled = [pair for name in POOLED for pair in folds[name]]
    pairs, by_gpu = folds["group"], folds["gpu"]
    print(
        "\n# Factors on a prediction that hold 80 and 90 % of the values of left-out groups, by how"
    )
    print("# long a request waits (alone, shared, queued) or without a server in front (process);")
    print(
        "# unseen: of left-out GPUs; moe, drafts: of experts and speculation, outside of the fit."
    )
    held: dict[str, Inside] = {}
    for metric in WEIGHT:
        share = share_for(pooled, pairs, metric)
        held[metric] = coverage(pooled, pairs, metric, share)
        shares = (share, 0.5 + share / 2)
        for name in ("", *REGIMES, "unseen"):
            rows = by_gpu if name == "unseen" else pooled
            names, wanted = ([""] * len(rows), "") if name == "unseen" else (regimes_of(rows), name)
            _write_spans(metric, name or "all", [
                interval(rows, names, metric, wanted, share) for share in shares
            ])  # fmt: skip
        for kind in ("moe", "drafts"):
            values = [(g, v, 1.0) for k, m, g, v in others if (k, m) == (kind, metric)]
            if len(values) >= FEW_ROWS_OF_A_KIND:
                _write_spans(metric, kind, [span(values, share) for share in shares])
    print("\n# Share of left-out rows inside the 80 % interval of the other folds' groups.")
    print("[covered]")
    for metric in WEIGHT:
        parts = [("all", "")] + [(name, name) for name in REGIMES]
        flags = {
            name: [f for (_, r, _), found in held[metric].items() if wanted in ("", r)
                   for f in found]
            for name, wanted in parts
        }  # fmt: skip
        text = ", ".join(f"{n} = {sum(f) / len(f):.3f}" for n, f in flags.items() if f)
        print(f"{metric} = {{ {text} }}")


def _write_spans(metric: str, name: str, spans: Sequence[tuple[float, float] | None]) -> None:
    if all(spans):
        print(f"[interval.{metric}.{name}]")
        for share, found in zip((80, 90), spans, strict=True):
            if found:
                print(f"p{share} = [{found[0]:.3f}, {found[1]:.3f}]")
