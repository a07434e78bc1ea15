"""Measured points predicted: the row's model, engine and load, played as it was measured."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from hullspeed.arch import catalogue
from hullspeed.errors import HullspeedError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.memory.budget import EngineSettings
from hullspeed.memory.sglang_pool import SglangPool
from hullspeed.perf.fitted import FittedCost, coefficients_of, engine_of
from hullspeed.perf.points import Point, length_shares
from hullspeed.perf.replay import Ask, Engine, Record, Replayed, replay
from hullspeed.perf.speculative import MTP_ACCEPT, SpeculativeCost
from hullspeed.perf.steady import prefill_seconds
from hullspeed.perf.work import StepSeconds, Work
from hullspeed.plan.capacity import memory_of
from hullspeed.plan.model import PlannedModel

# Bytes of a weight by format, scales included.
_BYTES = {"none": 2.0, "fp8": 1.01, "int8": 1.0, "w8a16": 1.02, "gptq": 0.56, "gptq-exllama": 0.56,
          "awq": 0.56, "nvfp4": 0.56, "mxfp4": 0.53}  # fmt: skip
_DRAFT_TOKENS = 3
_MOST_PROMPTS = 3000


class Predicted(NamedTuple):
    """What a point is predicted to be; seconds and tokens per second.

    Attributes:
        waited: Time to first token over that of one such request alone.
    """

    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    waited: float = 1.0


@cache
def model_of(model: str, quant: str) -> PlannedModel:
    """The catalogue's model with its layers in another format, by its bytes alone."""
    arch = replace(catalogue.load(model), quant=quant)
    planned = PlannedModel.of(model, arch, "catalogue")
    if quant == "none" or catalogue.load(model).quant == quant:
        return planned
    tables = (1 if arch.tied_embeddings else 2) * 2 * arch.vocab * arch.hidden
    decoder = round(Work(arch).body_params * _BYTES[quant]) + tables
    return replace(planned, weights=replace(planned.weights, decoder=decoder))


def cost_of(point: Point) -> FittedCost:
    """The fitted cost of the point's model on its GPUs."""
    planned = model_of(point.model, point.quant)
    return FittedCost(
        planned.arch,
        find_gpu(point.gpu),
        engine=point.engine,
        weight_bytes=planned.weights.decoder,
        kv_dtype=point.kv_dtype,
        tp=point.tp,
        eager=point.eager,
        coefficients=coefficients_of(host_of(point), point.machine),
    )


def host_of(point: Point) -> str:
    """The engine as its host costs are kept: handed a batch, or behind a front end."""
    offline = point.engine == "vllm-0.7" and point.protocol == "burst"
    return f"{point.engine}-offline" if offline else point.engine


def with_speculation(point: Point, cost: FittedCost) -> StepSeconds:
    """``cost``, with the drafts that the point was measured with."""
    if point.accept == 1.0:
        return cost
    return SpeculativeCost(cost, _DRAFT_TOKENS, point.accept or MTP_ACCEPT)


class Room(NamedTuple):
    """What memory holds: KV tokens, and how many sequences it lets run."""

    tokens: float
    running: int = 1 << 30


@cache
def room_of(
    model: str,
    quant: str,
    kv_dtype: str,
    gpu: str,
    tp: int,
    engine: str,
    fraction: float,
    step_tokens: int,
    draft_tokens: int = 0,
) -> tuple[Room, float]:
    """Room, and bytes of one sequence's state in tokens where it shares the pool with them."""
    planned, card = model_of(model, quant), find_gpu(gpu)
    known = engine if engine in ("vllm", "sglang", "trtllm") else "vllm"
    settings = EngineSettings(
        engine=known, tp=tp, max_model_len=max(16384, step_tokens), max_num_seqs=256,
        memory_fraction=fraction or None, max_num_batched_tokens=step_tokens or None,
        draft_tokens=draft_tokens if known == "sglang" else 0,
    )  # fmt: skip
    token_bytes = planned.arch.kv_bytes_per_token(kv_dtype) / tp
    state_bytes = planned.arch.state_bytes("fp32", planned.arch.dtype) / tp
    try:
        from hullspeed.memory.allocators import allocator  # noqa: PLC0415 - only where needed

        memory, rules = memory_of(card), allocator(known)
        stack = rules.stack(planned.arch, memory, settings, planned.weights)
        pool_bytes = stack.pool_bytes
        if state_bytes and pool_bytes > 0:
            unlimited = replace(settings, max_num_seqs=None)
            pool = rules.pool(planned.arch, memory, unlimited, pool_bytes)
            if isinstance(pool, SglangPool):  # tokens and slots of state apart
                return Room(pool.printed_tokens, pool.max_running_requests), 0.0
    except HullspeedError:  # a model that the engine's allocator does not know
        pool_bytes = 0
    if pool_bytes <= 0:
        pool_bytes = round(0.9 * card.memory_bytes - planned.weights.decoder / tp - 3 * 2**30)
    return Room(max(pool_bytes, 0) / token_bytes), state_bytes / token_bytes


def engine_for(point: Point) -> Engine:
    """The point's engine with its memory."""
    drafts = _DRAFT_TOKENS if point.accept != 1.0 else 0
    base = engine_of(
        point.engine, find_gpu(point.gpu), in_process=point.in_process, drafts=bool(drafts)
    )
    room, state_tokens = room_of(
        point.model, point.quant, point.kv_dtype, point.gpu, point.tp, point.engine,
        point.memory_fraction, point.step_tokens if point.engine == "vllm-0.7" else 0, drafts,
    )  # fmt: skip
    length, tokens = point.isl + point.osl, room.tokens
    running = min(point.max_running or base.max_running, max(room.running, 1))
    if state_tokens:  # recurrent state and KV share the pool
        running = min(running, max(1, int(tokens / (length + 2 * state_tokens))))
        tokens = max(tokens - 2 * running * state_tokens, length)
    step_tokens = max(
        int(point.step_tokens or base.step_tokens), min(running, point.concurrency or running) + 1
    )
    return base._replace(
        step_tokens=step_tokens,
        max_running=running,
        pool_tokens=max(tokens, 8.0 * length if point.spread == 0 else length + 64),
        wait_steps=point.wait_steps,
        wait_tokens=point.wait_share * step_tokens,
    )


def asks_of(point: Point, seed: int = 0) -> list[Ask]:
    """The requests of the point's protocol, the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    asks, at_s = [], 0.0
    for _ in range(min(point.prompts, max(_MOST_PROMPTS, 2 * point.concurrency))):
        if point.lengths:
            shares = length_shares(point.lengths)
            isl, osl = (
                int(_at(shares[part], rng.random()) * mean)
                for part, mean in (("input", point.isl), ("output", point.osl))
            )
        elif point.spread:
            isl, osl = (int(rng.uniform(point.spread, 1) * n) for n in (point.isl, point.osl))
        else:
            isl, osl = (
                min(int(rng.expovariate(1 / n)), 4 * int(n)) for n in (point.isl, point.osl)
            )
        asks.append(Ask(max(isl, 4), max(osl, 1), 0, at_s))
        at_s += rng.expovariate(point.rate) if point.rate else 0.0
    return asks


def _at(deciles: list[float], share: float) -> float:
    """The value that ``share`` of the requests stay below."""
    place = share * (len(deciles) - 1)
    low = min(int(place), len(deciles) - 2)
    return deciles[low] + (deciles[low + 1] - deciles[low]) * (place - low)


def play(point: Point, cost: StepSeconds, engine: Engine, record: Record | None = None) -> Replayed:
    """The point's load on ``engine``."""
    return replay(cost, asks_of(point), engine, concurrency=point.concurrency, record=record)


def summarize(point: Point, replayed: Replayed, cost: StepSeconds, engine: Engine) -> Predicted:
    """The statistics that the point was published as."""
    middle = statistics.median if point.median else statistics.fmean
    tpots = [s.tpot_s for s in replayed.served if s.osl > 1]
    ttft_s = middle([s.ttft_s for s in replayed.served])
    alone_s = prefill_seconds(cost, int(point.isl), 0, engine.step_tokens)
    return Predicted(
        ttft_s=ttft_s,
        tpot_s=middle(tpots) if tpots else 0.0,
        output_tokens_per_s=replayed.output_tokens_per_s,
        waited=ttft_s / (alone_s + engine.request_s + engine.first_token_s),
    )


def predict_point(point: Point) -> Predicted:
    """What the point is predicted to be.

    Raises:
        UsageError: if its requests do not fit.
    """
    cost, engine = with_speculation(point, cost_of(point)), engine_for(point)
    return summarize(point, play(point, cost, engine), cost, engine)
