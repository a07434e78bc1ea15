"""served_costs: what requests and tokens cost beside the engine's steps, seen from a client.

The server runs as it does for users: an API process, an engine process and here the client share
the cores, so what they take from one another is in the numbers. Streams of short cached prompts
show what a step and a token cost beyond the kernels; the first tokens of cached prompts of two
lengths show what a request costs. A prompt that is not cached was used for nothing: how far the
prediction of its first token is off goes into the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.bench import BenchSpec, run_sync
from hullspeed.bench import run as run_bench
from hullspeed.bench.result import Cell
from hullspeed.errors import EngineError
from hullspeed.hardware.ceilings import (
    KERNELS_ERROR,
    Ceilings,
    Curve,
    Interruptions,
    Overheads,
    disturbed,
)
from hullspeed.hardware.foreign import ForeignLoad
from hullspeed.hardware.machine import detect_machine
from hullspeed.memory.held import held_dtype
from hullspeed.perf.step import StepCost
from hullspeed.perf.work import Shape
from hullspeed.runtime.config import EngineConfig
from hullspeed.twin.closed_loop import TwinEngine, simulate
from hullspeed.twin.load import Load
from hullspeed.twin.outcome import percentile
from hullspeed.up.served import Server, served

_STREAMS = (1, 8, 32)
_SHORT_TOKENS, _LONG_TOKENS = 64, 1024
_OSL_TOKENS = 32
_CHECK_TOKENS = 512
_LEAST_ERROR = 0.1
_LEAST_LOST = 0.01
_INTERRUPTED_EVERY_S = 0.5
_LEAST_RATIO = 0.5  # of a decode step as served to the same step alone
_WORK_S = tuple(i * 5e-4 for i in range(13))  # what is tried: up to 6 ms


class Seen(NamedTuple):
    """Medians at a client.

    Attributes:
        itl_s: Time between tokens by streams at once, after prompts of ``short_tokens`` of which
            each gets ``osl_tokens``.
        ttft_s: Time to first token of one cached prompt, by its tokens.
        wave_ttft_s: Of several of ``short_tokens`` at once, by their number.
        cold_ttft_s: Of one prompt of ``cold_tokens`` that is not cached; 0 if it was not measured.
        mean_itl_s: The mean of one stream's gaps, in which interruptions show; 0 if unknown.
    """

    short_tokens: int
    osl_tokens: int
    itl_s: dict[int, float]
    ttft_s: dict[int, float]
    wave_ttft_s: dict[int, float]
    cold_tokens: int = 0
    cold_ttft_s: float = 0.0
    mean_itl_s: float = 0.0


def measure_served(
    config: EngineConfig,
    arch: ModelArch,
    ceilings: Ceilings,
    progress: Callable[[str], None] = lambda _: None,
) -> Ceilings:
    """``ceilings`` with overheads as a served model shows them; takes some ten seconds.

    Raises:
        EngineError: if the server does not start or does not answer.
    """
    foreign = ForeignLoad()
    progress("a server")
    with served(config) as server:
        progress("requests and streams")
        seen = observe(server, config, arch)
    dtype = held_dtype(arch, config.weight_dtype, detect_machine().isa)
    fitted = fit(seen, ceilings, arch, dtype, config.step_tokens)
    return disturbed(fitted, foreign.share())


def observe(server: Server, config: EngineConfig, arch: ModelArch) -> Seen:
    """Measure a server that nobody else uses."""
    context = config.max_context_tokens or arch.max_context_tokens
    short = min(_SHORT_TOKENS, context // 4)
    long = min(_LONG_TOKENS, context - _OSL_TOKENS)
    cold = min(_CHECK_TOKENS, context - _OSL_TOKENS)
    osl = min(_OSL_TOKENS, context // 4)
    itl_s: dict[int, float] = {}
    ttft_s: dict[int, float] = {}
    wave_ttft_s: dict[int, float] = {}
    mean_itl_s = 0.0
    for n in (n for n in _STREAMS if n <= config.max_running):
        cell = _cell(server, short, osl, n, _waves(n))
        itl_s[n] = cell.itl_s.p50
        if n == 1:
            mean_itl_s = cell.itl_s.mean
        (ttft_s if n == 1 else wave_ttft_s)[short if n == 1 else n] = cell.ttft_s.p50
    ttft_s[long] = _cell(server, long, 2, 1, 16).ttft_s.p50
    check = _cell(server, cold, 2, 1, 3, cold=True)
    return Seen(short, osl, itl_s, ttft_s, wave_ttft_s, cold, check.ttft_s.p50, mean_itl_s)


def _waves(streams: int) -> int:
    """Requests of a cell: all its streams end together and are sent again together."""
    return 24 if streams == 1 else max(64, 3 * streams)


def _cell(
    server: Server, isl: int, osl: int, streams: int, requests: int, *, cold: bool = False
) -> Cell:
    spec = BenchSpec(
        url=server.url, model=server.model, isl_tokens=isl, osl_tokens=osl, requests=requests,
        concurrency=(streams,), cache="cold" if cold else "cached",
    )  # fmt: skip
    cell = run_sync(run_bench(spec)).cells[0]
    if cell.ok < cell.requests:
        raise EngineError("the server fails requests", seen=cell.first_error or cell.failures)
    return cell


def fit(
    seen: Seen, ceilings: Ceilings, arch: ModelArch, weight_dtype: str, step_tokens: int
) -> Ceilings:
    """``ceilings`` with overheads that explain what was ``seen``."""
    cost = StepCost(arch, ceilings, weight_dtype)
    step_s, token_s = _per_step(seen, cost)
    over = msgspec.structs.replace(
        ceilings.overheads, step_s=step_s, sequence_s=0.0, stream_token_s=token_s
    )
    ceilings = msgspec.structs.replace(
        ceilings,
        decode_factor=_as_served(seen, cost, step_s, token_s),
        interruptions=_interruptions(seen, ceilings.interruptions),
    )
    cost = StepCost(arch, ceilings, weight_dtype)
    first_s = step_s + token_s
    request_s, prompt_token_s = _per_request(
        {n: s - first_s - _kernels_s(cost, [Shape(1, n - 1)]) for n, s in seen.ttft_s.items()}
    )
    over = msgspec.structs.replace(over, request_s=request_s, prompt_token_s=prompt_token_s)
    fitted = msgspec.structs.replace(ceilings, overheads=over)
    work_s = _per_wave(seen, StepCost(cost.work.arch, fitted, weight_dtype))
    over = msgspec.structs.replace(over, request_work_s=work_s)
    error = _cold_error(seen, over, cost, step_tokens)
    note = (
        f"served: the first token of a {seen.cold_tokens}-token prompt was predicted {error:+.0%} "
        "off what was then measured"
    )
    return msgspec.structs.replace(
        ceilings,
        overheads=over,
        served=True,
        relative_error=ceilings.relative_error - KERNELS_ERROR + max(_LEAST_ERROR, 2 * abs(error)),
        notes=(*ceilings.notes, note) if seen.cold_ttft_s else ceilings.notes,
    )


def _kernels_s(cost: StepCost, shapes: Sequence[Shape]) -> float:
    parts = cost.parts(shapes)
    return parts.total_s - parts.step_overhead_s


def _per_step(seen: Seen, cost: StepCost) -> tuple[float, float]:
    """Seconds a step and a token, by least squares on relative residuals; neither below 0."""
    context = seen.short_tokens + seen.osl_tokens // 2
    points = [
        (1 / itl, n / itl, (itl - _kernels_s(cost, _together(n, context))) / itl)
        for n, itl in seen.itl_s.items()
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
    """The factor on decode steps half way between alone and as served: each was measured for a
    second or two, and a machine's speed changes more than that from one to the next.
    """
    context = seen.short_tokens + seen.osl_tokens // 2
    streams = sorted(seen.itl_s)
    ratios = [
        (seen.itl_s[n] - step_s - token_s * n) / _kernels_s(cost, _together(n, context))
        for n in streams
    ]
    off = Curve(
        tuple(map(float, streams)),
        tuple(math.sqrt(max(ratio, _LEAST_RATIO)) for ratio in ratios),
    )
    alone = cost.ceilings.decode_factor
    sizes = sorted({*alone.sizes, *off.sizes})
    return Curve(tuple(sizes), tuple(alone.at(n) * off.at(n) for n in sizes))


def _interruptions(seen: Seen, alone: Interruptions | None) -> Interruptions | None:
    """As often as they came to the kernels alone, and as long as a stream shows."""
    if not seen.mean_itl_s:
        return alone
    share = seen.mean_itl_s / seen.itl_s[min(seen.itl_s)] - 1
    if share < _LEAST_LOST:
        return None
    every_s = _INTERRUPTED_EVERY_S if alone is None else alone.every_s
    return Interruptions(every_s=every_s, lost_s=share * every_s)


def _together(n: int, context_tokens: int) -> list[Shape]:
    """Decodes of sequences that have one prompt."""
    return [Shape(1, context_tokens), *[Shape(1, context_tokens, True, context_tokens)] * (n - 1)]


def _per_request(rest_s: dict[int, float]) -> tuple[float, float]:
    """Seconds a request and a prompt token, from what first tokens took beside their step."""
    short, long = min(rest_s), max(rest_s)
    slope = (rest_s[long] - rest_s[short]) / (long - short) if long > short else 0.0
    slope = max(slope, 0.0)
    return max(rest_s[short] - slope * short, 0.0), slope


def _per_wave(seen: Seen, cost: StepCost) -> float:
    """How long a request keeps the API process from the next one: the value with which the twin's
    first tokens of requests that come at once are nearest to those seen.
    """
    over = cost.ceilings.overheads
    arch = cost.work.arch

    def ttft_s(streams: int, work_s: float) -> float:
        engine = TwinEngine(
            vocab=arch.vocab, max_context_tokens=arch.max_context_tokens, n_pages=4096,
            request_s=over.request_seconds(seen.short_tokens),
            request_work_s=work_s + over.prompt_token_s * seen.short_tokens,
            stream_token_s=over.stream_token_s,
        )  # fmt: skip
        load = Load(
            isl_tokens=seen.short_tokens, osl_tokens=seen.osl_tokens, requests=_waves(streams),
            concurrency=streams, cache="cached",
        )  # fmt: skip
        return percentile(simulate(engine, cost, load).ttft_s, 0.5)

    def miss(work_s: float) -> float:
        return sum(
            math.log(ttft_s(streams, work_s) / found) ** 2
            for streams, found in seen.wave_ttft_s.items()
        )

    return min(_WORK_S, key=miss) if seen.wave_ttft_s else 0.0


def _cold_error(seen: Seen, over: Overheads, cost: StepCost, step_tokens: int) -> float:
    """How far the predicted first token of the prompt that was not cached is off, relative."""
    if not seen.cold_ttft_s:
        return 0.0
    others = cost.ceilings.interruptions
    lost = 1.0 if others is None else 1.0 + others.share
    seconds, done = over.request_seconds(seen.cold_tokens) + over.stream_token_s, 0
    while done < seen.cold_tokens:
        n = min(step_tokens, seen.cold_tokens - done)
        last = done + n == seen.cold_tokens
        seconds += lost * (over.step_s + _kernels_s(cost, [Shape(n, done, sample=last)]))
        done += n
    return seconds / seen.cold_ttft_s - 1
