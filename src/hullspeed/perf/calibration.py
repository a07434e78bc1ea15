"""Calibration: what one box does beside what the fit to published measurements expects of it.

Three factors at most: on decoding (bytes, launches), on prompts (arithmetic) and on what a first
token costs beside its step. Each observation, played as it was measured, is linear in them; least
squares on relative errors with a pull to 1 finds them, so that what was not observed stays as it
was.
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hullspeed.errors import UsageError
from hullspeed.perf.fitted import Coefficients, FittedCost, Spread, measured_gpus, spread_of
from hullspeed.perf.observed import Observed, ObservedLoad, ObservedStep
from hullspeed.perf.replay import Ask, Engine, Replayed, replay
from hullspeed.perf.terms import Terms
from hullspeed.perf.work import Shape
from hullspeed.sources.cache import cache_dir, write_atomically

DECODE = ("weights_s", "kv_s", "state_s", "layers", "steps", "sequences", "reduces", "moe_layers")
PROMPT = ("multiply_s", "multiply_low_s", "attention_s", "delta_s", "rows_s", "reduce_s",
          "eager_layers")  # fmt: skip
_PULL = 0.05  # weight of "as published" against one relative error
_LEAST, _MOST = 0.2, 5.0  # a box further off than this was described wrongly
_MOST_ERROR = 0.5
_LEAST_ERROR = 0.05
_REFILLS = 64  # of a long run: the steady part is repeated no further


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Factors of one model on one box.

    Attributes:
        decode, prompt, first_token: Factors on the published coefficients.
        error_before, error_after: Median relative error on the observations.
        origin: Where they were observed, and when.
    """

    model: str
    gpu: str
    tp: int
    engine: str
    decode: float
    prompt: float
    first_token: float
    observations: int
    error_before: float
    error_after: float
    origin: str

    def apply(self, coefficients: Coefficients) -> Coefficients:
        """The coefficients of this box."""
        factors = dict.fromkeys(DECODE, self.decode) | dict.fromkeys(PROMPT, self.prompt)
        factors["first_token_s"] = self.first_token
        what = (
            f"scaled to this box (decode x{self.decode:.2f}, prompts x{self.prompt:.2f}, "
            f"{self.observations} observations of {self.origin}: median error "
            f"{self.error_before:.0%} before, {self.error_after:.0%} after)"
        )
        return coefficients.scaled(factors, what)

    def spread(self, metric: str) -> Spread:
        """Factors around a calibrated prediction: twice the error left, at least 5 %."""
        half = max(2 * self.error_after, _LEAST_ERROR) * (2 if metric == "ttft" else 1)
        return Spread(1 / (1 + half), 1 + half)


def spread_on_gpu(
    metric: str,
    share: int,
    regime: str,
    *,
    gpu: str,
    kinds: Sequence[str],
    calibration: Calibration | None,
    tables: bool,
) -> Spread:
    """Factors that bound the real value of a prediction on ``gpu``: of the ``calibration`` if there
    is one, else :func:`hullspeed.perf.fitted.spread_of`. Measured ``tables`` are not fitted to what
    is published of the GPU, so there it counts as not seen, and a calibration says nothing.
    """
    if calibration is not None and not tables:
        return calibration.spread(metric)
    seen = not tables and gpu in measured_gpus()
    return spread_of(metric, share, regime, seen=seen, kinds=kinds)


def calibrate(
    cost: FittedCost,
    engine: Engine,
    observed: Sequence[Observed],
    *,
    model: str,
    gpu: str,
    tp: int,
    engine_name: str,
    origin: str,
) -> Calibration:
    """Factors that bring ``cost`` to what was ``observed``.

    Raises:
        UsageError: without observations, or if they are further from the prediction than any box
            of this kind could be.
    """
    rows = [row for one in observed for row in _rows(cost, engine, one)]
    if not rows:
        raise UsageError("nothing was observed to calibrate with")
    found = _solve(rows)
    error_after = statistics.median(abs(_dot(row, found) - 1) for row in rows)
    if error_after > _MOST_ERROR:
        raise UsageError(
            "what was observed is like no such box, however it is scaled",
            seen=f"median error {error_after:.0%}",
            fix="check --gpu, --tp and the model: the observations seem to be of another box",
        )
    for value, what in zip(found, ("decoding", "prompts"), strict=False):
        if not _LEAST < value < _MOST:
            raise UsageError(
                f"{what} would have to be scaled by a factor that no such box has",
                seen=f"{value:.2f}",
                fix="check --gpu, --tp and the model: the observations seem to be of another box",
            )
    return Calibration(
        model=model, gpu=gpu, tp=tp, engine=engine_name,
        decode=found[0], prompt=found[1], first_token=found[2],
        observations=len(rows),
        error_before=statistics.median(abs(sum(row) - 1) for row in rows),
        error_after=error_after,
        origin=origin,
    )  # fmt: skip


Row = tuple[float, float, float]
"""Predicted decode, prompt and first-token seconds of one metric, over its measured seconds."""


def _rows(cost: FittedCost, engine: Engine, one: Observed) -> list[Row]:
    if isinstance(one, ObservedStep):
        decode, prompt = _halves(cost, one.n_decode, one.context_tokens, ())
        return [(decode / one.seconds, prompt / one.seconds, 0.0)]
    return _load_rows(cost, engine, one)


def _load_rows(cost: FittedCost, engine: Engine, one: ObservedLoad) -> list[Row]:
    times, halves = [0.0], [(0.0, 0.0)]

    def record(now: float, k: int, n: int, context: int, chunks: Sequence[Shape]) -> None:
        decode, prompt = _halves(cost, n, context, chunks)
        times.append(now)
        halves.append((halves[-1][0] + k * decode, halves[-1][1] + k * prompt))

    count = min(one.requests, one.concurrency * (_REFILLS // max(one.concurrency, 1) + 4))
    first_s = cost.coefficients.first_token_s
    played = replay(
        cost, [Ask(one.isl, one.osl)] * count, engine._replace(first_token_s=0.0),
        concurrency=one.concurrency, record=record,
    )  # fmt: skip
    rows: list[Row] = []
    if one.ttft_s:
        spans = [_between(times, halves, s.sent_s, s.first_s) for s in played.served]
        rows.append(_row(spans, 1, one.ttft_s, first_s + engine.request_s))
    if one.tpot_s and one.osl > 1:
        spans = [_between(times, halves, s.first_s, s.last_s) for s in played.served]
        rows.append(_row(spans, one.osl - 1, one.tpot_s, 0.0))
    if one.output_tokens_per_s:
        rows.append(_output_row(played, halves[-1], one))
    return rows


def _output_row(played: Replayed, total: tuple[float, float], one: ObservedLoad) -> Row:
    tokens = sum(s.osl for s in played.served)
    per_token_s = 1 / one.output_tokens_per_s
    return total[0] / tokens / per_token_s, total[1] / tokens / per_token_s, 0.0


def _row(spans: list[tuple[float, float]], parts: int, measured_s: float, first_s: float) -> Row:
    decode, prompt = (statistics.fmean(values) / parts for values in zip(*spans, strict=True))
    return decode / measured_s, prompt / measured_s, first_s / measured_s


def _halves(
    cost: FittedCost, n_decode: int, context_tokens: int, chunks: Sequence[Shape]
) -> tuple[float, float]:
    """Seconds of a step that decoding and that prompts answer for."""
    terms = cost.terms_of(n_decode, context_tokens, chunks)
    weights = cost.coefficients.terms
    seconds = {name: weights[name] * getattr(terms, name) for name in Terms._fields}
    return sum(seconds[name] for name in DECODE), sum(seconds[name] for name in PROMPT)


def _between(
    times: list[float], sums: list[tuple[float, float]], start_s: float, end_s: float
) -> tuple[float, float]:
    low, high = _at(times, sums, start_s), _at(times, sums, end_s)
    return high[0] - low[0], high[1] - low[1]


def _at(times: list[float], sums: list[tuple[float, float]], when_s: float) -> tuple[float, float]:
    i = bisect_left(times, when_s)
    if i == 0:
        return sums[0]
    if i == len(times):
        return sums[-1]
    share = (when_s - times[i - 1]) / (times[i] - times[i - 1])
    return (
        sums[i - 1][0] + share * (sums[i][0] - sums[i - 1][0]),
        sums[i - 1][1] + share * (sums[i][1] - sums[i - 1][1]),
    )


def _dot(row: Sequence[float], factors: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(row, factors, strict=True))


def _solve(rows: Sequence[Row]) -> list[float]:
    """Least squares of ``row . factors = 1`` with a pull to factors of 1."""
    size = 3
    pull = _PULL * math.sqrt(len(rows))
    normal = [[sum(r[i] * r[j] for r in rows) for j in range(size)] for i in range(size)]
    target = [sum(r[i] for r in rows) for i in range(size)]
    for i in range(size):
        normal[i][i] += pull
        target[i] += pull
    for i in range(size):  # Gauss-Jordan; the pull keeps every pivot above zero
        pivot = normal[i][i]
        normal[i] = [value / pivot for value in normal[i]]
        target[i] /= pivot
        for j in range(size):
            if j != i:
                factor = normal[j][i]
                normal[j] = [a - factor * b for a, b in zip(normal[j], normal[i], strict=True)]
                target[j] -= factor * target[i]
    return [max(value, 0.0) if i == size - 1 else value for i, value in enumerate(target)]


def calibration_path(
    model: str, gpu: str, tp: int, engine: str, folder: Path | None = None
) -> Path:
    """The file that holds the calibration of this model on this box, beside the ceilings."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{model} {tp}x{gpu} {engine}").strip("-").lower()
    return (folder or cache_dir()) / f"calibration-{name}.json"


def save_calibration(calibration: Calibration, folder: Path | None = None) -> Path:
    """Keep ``calibration``; the file appears whole or not at all."""
    c = calibration
    path = calibration_path(c.model, c.gpu, c.tp, c.engine, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(calibration), indent=1))
    return path


def load_calibration(
    model: str, gpu: str, tp: int, engine: str, folder: Path | None = None
) -> Calibration | None:
    """The calibration of this model on this box, or ``None``."""
    try:
        data = calibration_path(model, gpu, tp, engine, folder).read_bytes()
        return msgspec.json.decode(data, type=Calibration)
    except (OSError, msgspec.MsgspecError):  # absent or of an older shape: as if never made
        return None
