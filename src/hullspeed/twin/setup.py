"""setup: an engine's memory plan as the numbers that the twin schedules by."""

from __future__ import annotations

from hullspeed.arch.model import ModelArch
from hullspeed.errors import CapacityError
from hullspeed.memory.allocators import MemoryPlan, plan_memory
from hullspeed.memory.budget import EngineSettings, GpuMemory, PoolPlan, WeightBytes
from hullspeed.memory.layers import keeps_state
from hullspeed.memory.vllm import VllmAllocator
from hullspeed.memory.vllm_runtime import resolve_limits
from hullspeed.perf.work import Shape, Work
from hullspeed.twin.engine import EngineModel
from hullspeed.twin.profiles import Profile, profile
from hullspeed.units import format_bytes

_DEFAULT_RUNNING = 256  # where neither the flag nor the pool bounds the sequences at once


def engine_model(
    arch: ModelArch,
    memory: GpuMemory,
    settings: EngineSettings,
    weights: WeightBytes,
    *,
    typical_tokens: int,
    cache: str | None = None,
    eviction: str = "lru",
    request_s: float = 0.0,
    stream_token_s: float = 0.0,
) -> EngineModel:
    """``settings.engine`` on ``arch`` with the memory that its allocator computes.

    Args:
        typical_tokens: Length of a typical sequence; only models with sliding windows need it,
            because pages here are alike and theirs are not: the pool holds as many sequences of
            this length as the allocator says.
        cache: Another prefix cache than the engine's own.

    Raises:
        UsageError: for settings that contradict each other, an unknown engine or cache.
        CapacityError: if the engine would not start: not one sequence fits.
        UnsupportedModelError: if the engine does not run the model.
    """
    how = profile(settings.engine)
    plan = plan_memory(arch, memory, settings, weights)
    pool, work = plan.pool, Work(arch)
    hybrid = keeps_state(arch)
    page_tokens = how.page_tokens or pool.block_tokens
    page_bytes = _page_bytes(pool, page_tokens)
    state_bytes = _state_bytes(pool, page_tokens, page_bytes) if hybrid else 0
    running = _max_running(plan, settings)
    if settings.prefix_caching is False:
        cache = "none"
    name = cache or (how.hybrid_cache if hybrid and how.hybrid_cache else how.cache)
    shared_bytes, slots = 0, 0
    if hybrid:
        shared_bytes = pool.pool_bytes
        running = min(running, max(1, (shared_bytes - page_bytes) // (2 * state_bytes)))
        slots = shared_bytes // state_bytes
        n_pages = (shared_bytes - 3 * state_bytes) // max(page_bytes, 1)
    else:
        sequences = pool.concurrency(typical_tokens)
        bound = settings.max_num_seqs
        if bound is not None and sequences >= bound:  # the flag binds, not the pages
            n_pages = pool.pool_bytes // max(page_bytes, 1)
        else:
            n_pages = int(sequences * -(-typical_tokens // page_tokens))
    if n_pages < 1 or pool.pool_bytes <= 0 or slots < (2 * running + 1 if hybrid else 0):
        raise CapacityError(
            f"{settings.engine} would not start: no sequence fits its pool",
            seen=format_bytes(pool.pool_bytes),
            fix="use more GPUs (--tp), a smaller model, or --kv-dtype fp8",
        )
    return EngineModel(
        n_pages=n_pages,
        page_tokens=page_tokens,
        page_bytes=page_bytes,
        state_slots=slots,
        state_bytes=state_bytes,
        shared_bytes=shared_bytes,
        max_running=running,
        step_tokens=_step_tokens(arch, memory, settings, how),
        max_context_tokens=settings.max_model_len or arch.max_context_tokens,
        cache=name,
        eviction=eviction,
        block_tokens=pool.hit_granularity_tokens,
        flops_per_token=work.body_flops(1),
        flops_per_token_pair=pair_flops(work),
        policy=how.policy,
        request_s=request_s,
        stream_token_s=stream_token_s,
    )


def pair_flops(work: Work) -> float:
    """FLOPs of attention of a token to one earlier token."""
    far, near = (work.attention_flops(Shape(1, context)) for context in (2_000, 1_000))
    return max(0.0, (far - near) / 1_000)


def _page_bytes(pool: PoolPlan, page_tokens: int) -> int:
    """Bytes of a page per rank: what a long request grows by."""
    long = 64 * max(page_tokens, pool.block_tokens)
    grown = pool.bytes_per_request(2 * long) - pool.bytes_per_request(long)
    return max(1, grown * page_tokens // long)


def _state_bytes(pool: PoolPlan, page_tokens: int, page_bytes: int) -> int:
    """Bytes of one recurrent state per rank."""
    return max(1, pool.bytes_per_request(page_tokens) - page_bytes)


def _max_running(plan: MemoryPlan, settings: EngineSettings) -> int:
    bounds = [settings.max_num_seqs or _DEFAULT_RUNNING]
    if plan.pool.max_num_seqs is not None:
        bounds.append(max(1, plan.pool.max_num_seqs))
    return min(bounds)


def _step_tokens(
    arch: ModelArch, memory: GpuMemory, settings: EngineSettings, how: Profile
) -> int:
    if settings.max_num_batched_tokens is not None:
        return settings.max_num_batched_tokens
    if settings.engine == "vllm":
        rules = VllmAllocator().profile(settings)
        return resolve_limits(arch, memory, settings, rules).max_num_batched_tokens
    return how.step_tokens
