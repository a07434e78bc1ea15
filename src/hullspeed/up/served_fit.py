"""served_fit: overheads with which the twin sees what a client saw.

Streams of short cached prompts show what a step and a token cost beyond the kernels; the first
tokens of a cached prompt alone show what a request costs, those of several at once how long each
keeps a core from the others and from the steps; prompts that are not cached show how steps with
prompts go beside all that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.hardware.ceilings import (
    KERNELS_ERROR,
    Ceilings,
    Curve,
    Interruptions,
)
from hullspeed.perf.step import StepCost
from hullspeed.perf.work import Shape
from hullspeed.twin.closed_loop import TwinEngine, simulate
from hullspeed.twin.load import Load
from hullspeed.twin.outcome import percentile

_LEAST_ERROR = 0.1
_COLD_SHARE = 0.5  # of how far cold prompts are off, as a power of their ratio
_LEAST_LOST = 0.01
_INTERRUPTED_EVERY_S = 0.5
_LEAST_RATIO = 0.5  # of a step as served to the same step alone
_WORK_S = (8e-3, 1e-3, 2.5e-4)  # what a request may keep a core: at most, in steps, in finer ones


class Cached(NamedTuple):
    """A closed loop of ``requests`` of one cached prompt, ``streams`` at once, and its medians at a
    client: time to first token, time between tokens.
    """

    streams: int
    requests: int
    isl_tokens: int
    osl_tokens: int
    ttft_s: float
    itl_s: float

    @property
    def context_tokens(self) -> int:
        """Of a step half way."""
        return self.isl_tokens + self.osl_tokens // 2


class Seen(NamedTuple):
    """What a client saw.

    Attributes:
        cached: Loads of cached prompts of two lengths, one of them with one stream for each.
        cold_ttft_s: Time to first token of one prompt that is not cached, by its tokens; empty if
            not measured.
        mean_itl_s: The mean of the gaps of the first of ``cached``, in which interruptions show; 0
            if unknown.
    """

    cached: tuple[Cached, ...]
    cold_ttft_s: Mapping[int, float] = {}
    mean_itl_s: float = 0.0


def fit(
    seen: Seen,
    ceilings: Ceilings,
    arch: ModelArch,
    weight_dtype: str,
    step_tokens: int,
    *,
    own_core: bool = False,
) -> Ceilings:
    """``ceilings`` with overheads that explain what was ``seen``; ``own_core`` says that the API
    process has a core that no step uses.
    """

    def cost_of(ceilings: Ceilings) -> StepCost:
        return StepCost(arch, ceilings, weight_dtype)

    cost = cost_of(ceilings)
    step_s, token_s = _per_step(seen, cost)
    over = msgspec.structs.replace(
        ceilings.overheads, step_s=step_s, sequence_s=0.0, stream_token_s=token_s
    )
    fitted = msgspec.structs.replace(
        ceilings,
        overheads=over,
        decode_factor=_as_served(seen, cost, step_s, token_s),
        interruptions=_interruptions(seen, ceilings.interruptions),
        served=True,
    )
    cost = cost_of(fitted)
    first_s = step_s + token_s
    alone_s = {
        load.isl_tokens: load.ttft_s - first_s - _kernels_s(cost, [Shape(1, load.isl_tokens - 1)])
        for load in seen.cached if load.streams == 1
    }  # fmt: skip
    request_s, prompt_token_s = _line(alone_s)
    work_s, work_token_s = _line(_per_wave(seen, alone_s, cost, own_core=own_core))
    over = msgspec.structs.replace(
        over, request_s=request_s, prompt_token_s=prompt_token_s,
        request_work_s=work_s, work_token_s=work_token_s,
    )  # fmt: skip
    fitted = msgspec.structs.replace(fitted, overheads=over)
    return _cold_as_served(seen, fitted, cost_of(fitted), step_tokens)


def _kernels_s(cost: StepCost, shapes: Sequence[Shape]) -> float:
    parts = cost.parts(shapes)
    return parts.total_s - parts.step_overhead_s


def _per_step(seen: Seen, cost: StepCost) -> tuple[float, float]:
    """Seconds a step and a token, by least squares on relative residuals; neither below 0."""
    points = [
        (1 / load.itl_s, load.streams / load.itl_s, 1 - _together_s(load, cost) / load.itl_s)
        for load in seen.cached
    ]
    aa = sum(a * a for a, _, _ in points)
    bb = sum(b * b for _, b, _ in points)
    ab = sum(a * b for a, b, _ in points)
    ar = sum(a * r for a, _, r in points)
    br = sum(b * r for _, b, r in points)
    det = aa * bb - ab * ab
    step_s = (ar * bb - br * ab) / det if det > 0 else ar / aa
    token_s = (br * aa - ar * ab) / det if det > 0 else 0.0
    if token_s < 0:
        step_s, token_s = ar / aa, 0.0
    elif step_s < 0:
        step_s, token_s = 0.0, br / bb
    return max(step_s, 0.0), max(token_s, 0.0)


def _as_served(seen: Seen, cost: StepCost, step_s: float, token_s: float) -> Curve:
    """The factor on decode steps as they go when served: thousands of them were seen, over a longer
    time than each kind was timed alone, and a machine's speed changes.
    """
    ratios: dict[int, list[float]] = {}
    for load in seen.cached:
        kernels_s = load.itl_s - step_s - token_s * load.streams
        ratios.setdefault(load.streams, []).append(kernels_s / _together_s(load, cost))
    off = Curve(
        tuple(map(float, sorted(ratios))), tuple(_mean_of(ratios[n]) for n in sorted(ratios))
    )
    alone = cost.ceilings.decode_factor
    sizes = sorted({*alone.sizes, *off.sizes})
    return Curve(tuple(sizes), tuple(alone.at(n) * off.at(n) for n in sizes))


def _mean_of(ratios: Iterable[float]) -> float:
    """Their geometric mean."""
    return math.exp(fmean(math.log(max(ratio, _LEAST_RATIO)) for ratio in ratios))


def _interruptions(seen: Seen, alone: Interruptions | None) -> Interruptions | None:
    """As often as they came to the kernels alone, and as long as a stream shows."""
    if not seen.mean_itl_s:
        return alone
    share = seen.mean_itl_s / seen.cached[0].itl_s - 1
    if share < _LEAST_LOST:
        return None
    every_s = _INTERRUPTED_EVERY_S if alone is None else alone.every_s
    return Interruptions(every_s=every_s, lost_s=share * every_s)


def _together_s(load: Cached, cost: StepCost) -> float:
    """Kernels of a step in which all streams decode after their one prompt."""
    first = Shape(1, load.context_tokens)
    others = Shape(1, load.context_tokens, shared_tokens=load.isl_tokens)
    return _kernels_s(cost, [first, *[others] * (load.streams - 1)])


def _line(by_tokens: Mapping[int, float]) -> tuple[float, float]:
    """Seconds a request and a prompt token, neither below 0."""
    if not by_tokens:
        return 0.0, 0.0
    short, long = min(by_tokens), max(by_tokens)
    slope = (by_tokens[long] - by_tokens[short]) / (long - short) if long > short else 0.0
    slope = max(slope, 0.0)
    return max(by_tokens[short] - slope * short, 0.0), slope


def _per_wave(
    seen: Seen, alone_s: Mapping[int, float], cost: StepCost, *, own_core: bool
) -> dict[int, float]:
    """How long a request keeps a core, by its prompt's tokens: the values with which the twin's
    first tokens of requests that come at once are nearest to those seen.
    """
    arch, stream_token_s = cost.work.arch, cost.ceilings.overheads.stream_token_s

    def ttft_s(load: Cached, work_s: float) -> float:
        engine = TwinEngine(
            vocab=arch.vocab, max_context_tokens=arch.max_context_tokens, n_pages=4096,
            request_s=max(alone_s[load.isl_tokens], 0.0), request_work_s=work_s,
            own_core=own_core, stream_token_s=stream_token_s,
        )  # fmt: skip
        asked = Load(
            isl_tokens=load.isl_tokens, osl_tokens=load.osl_tokens, requests=load.requests,
            concurrency=load.streams, cache="cached",
        )  # fmt: skip
        return percentile(simulate(engine, cost, asked).ttft_s, 0.5)

    found = {}
    for isl_tokens in alone_s:
        loads = [x for x in seen.cached if x.isl_tokens == isl_tokens and x.streams > 1]

        def miss(work_s: float, loads: list[Cached] = loads) -> float:
            return sum(math.log(ttft_s(load, work_s) / load.ttft_s) ** 2 for load in loads)

        if loads:
            found[isl_tokens] = _least(miss)
    return found


def _least(miss: Callable[[float], float]) -> float:
    """Where ``miss`` is least, which has steps in it: a first token that misses a step comes with
    the next.
    """
    most, coarse, fine = _WORK_S
    best = min((i * coarse for i in range(round(most / coarse) + 1)), key=miss)
    n = round(coarse / fine) - 1
    return min((best + i * fine for i in range(-n, n + 1) if best + i * fine >= 0), key=miss)


def _cold_as_served(seen: Seen, ceilings: Ceilings, cost: StepCost, step_tokens: int) -> Ceilings:
    """The factor on steps with prompts half way between alone and as served: each was seen for a
    few seconds, and a machine's speed changes more than that from one to the next. How far they
    were apart goes into the interval.
    """
    rest = ceilings.relative_error - KERNELS_ERROR
    if not seen.cold_ttft_s:
        return msgspec.structs.replace(ceilings, relative_error=rest + _LEAST_ERROR)
    found = {n: _cold_s(n, ceilings, cost, step_tokens) for n in seen.cold_ttft_s}
    off = _mean_of(seen.cold_ttft_s[n] / found[n] for n in found)
    lengths = " and ".join(map(str, sorted(found)))
    note = (
        f"served: first tokens of prompts of {lengths} tokens came {off - 1:+.0%} off what "
        "their steps alone add up to; half of it is taken over"
    )
    factor = ceilings.chunk_factor
    return msgspec.structs.replace(
        ceilings,
        chunk_factor=Curve(
            factor.sizes, tuple(off**_COLD_SHARE * value for value in factor.values)
        ),
        relative_error=rest + max(_LEAST_ERROR, abs(off - 1)),
        notes=(*ceilings.notes, note),
    )


def _cold_s(n_tokens: int, ceilings: Ceilings, cost: StepCost, step_tokens: int) -> float:
    """First token of one prompt that is not cached."""
    over, others = ceilings.overheads, ceilings.interruptions
    lost = 1.0 if others is None else 1.0 + others.share
    seconds, done = over.request_seconds(n_tokens) + over.stream_token_s, 0
    while done < n_tokens:
        n = min(step_tokens, n_tokens - done)
        last = done + n == n_tokens
        seconds += lost * (over.step_s + _kernels_s(cost, [Shape(n, done, sample=last)]))
        done += n
    return seconds
