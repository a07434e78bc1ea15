"""setup: an engine's memory plan as the numbers that the twin schedules by."""

from __future__ import annotations

from typing import NamedTuple

from hullspeed.arch.model import ModelArch
from hullspeed.errors import CapacityError
from hullspeed.memory.allocators import MemoryPlan, plan_memory
from hullspeed.memory.budget import EngineSettings, GpuMemory, PoolPlan, WeightBytes
from hullspeed.memory.layers import keeps_state, state_dtype_of
from hullspeed.memory.ours import HullspeedAllocator
from hullspeed.memory.pages import PagePool
from hullspeed.memory.sglang_pool import SglangPool
from hullspeed.memory.vllm import VllmAllocator
from hullspeed.memory.vllm_runtime import resolve_limits
from hullspeed.memory.windows import largest_window
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

    ``typical_tokens`` is the length of a typical sequence: of models with sliding windows, whose
    pages are not alike, another engine's pool holds as many sequences of this length as its
    allocator says.
    ``cache`` is another prefix cache than the engine's own.

    Raises:
        UsageError: for settings that contradict each other, an unknown engine or cache.
        CapacityError: if the engine would not start: not one sequence fits.
        UnsupportedModelError: if the engine does not run the model.
    """
    how = profile(settings.engine)
    plan = plan_memory(arch, memory, settings, weights)
    hybrid = keeps_state(arch)
    page_tokens = how.page_tokens or plan.pool.block_tokens
    if hybrid:
        room = _hybrid_room(arch, settings, plan, page_tokens)
    else:
        room = _window_room(arch, settings, plan, cache) or _dense_room(
            settings, plan, page_tokens, typical_tokens
        )
    if room.n_pages < 1 or room.max_running < 1:
        raise CapacityError(
            f"{settings.engine} would not start: no sequence fits its pool",
            seen=format_bytes(plan.pool.pool_bytes),
            fix="use more GPUs (--tp), a smaller model, or --kv-dtype fp8",
        )
    if settings.prefix_caching is False:
        cache = "none"
    work = Work(arch)
    return EngineModel(
        n_pages=room.n_pages,
        page_tokens=page_tokens,
        page_bytes=room.page_bytes,
        state_slots=room.state_slots,
        state_bytes=room.state_bytes,
        n_window_pages=room.n_window_pages,
        window_tokens=room.window_tokens,
        window_page_bytes=room.window_page_bytes,
        shared_bytes=room.shared_bytes,
        max_running=room.max_running,
        step_tokens=_step_tokens(arch, memory, settings, how),
        max_context_tokens=settings.max_model_len or arch.max_context_tokens,
        cache=cache or (how.hybrid_cache if hybrid and how.hybrid_cache else how.cache),
        eviction=eviction,
        block_tokens=plan.pool.hit_granularity_tokens,
        flops_per_token=work.body_flops(1),
        flops_per_token_pair=pair_flops(work),
        policy=how.policy,
        request_s=request_s,
        stream_token_s=stream_token_s,
    )


class _Room(NamedTuple):
    n_pages: int
    page_bytes: int
    max_running: int
    state_slots: int = 0
    state_bytes: int = 0
    shared_bytes: int = 0
    n_window_pages: int = 0
    window_tokens: int = 0
    window_page_bytes: int = 1


def _dense_room(
    settings: EngineSettings, plan: MemoryPlan, page_tokens: int, typical_tokens: int
) -> _Room:
    pool = plan.pool
    page_bytes = _page_bytes(pool, page_tokens)
    running = _max_running(plan, settings)
    sequences = pool.concurrency(typical_tokens)
    bound = settings.max_num_seqs
    if bound is not None and sequences >= bound:  # the flag binds, not the pages
        return _Room(pool.pool_bytes // page_bytes, page_bytes, running)
    return _Room(int(sequences * -(-typical_tokens // page_tokens)), page_bytes, running)


def _window_room(
    arch: ModelArch, settings: EngineSettings, plan: MemoryPlan, cache: str | None
) -> _Room | None:
    """Of the embedded engine, which keeps pages of windows apart."""
    pool = plan.pool
    if settings.engine != "hullspeed" or cache == "hash" or not isinstance(pool, PagePool):
        return None
    split = HullspeedAllocator().window_split(arch, settings, pool)
    if split is None:
        return None
    return _Room(
        split.n_pages,
        max(1, pool.bytes_per_block),
        _max_running(plan, settings),
        n_window_pages=split.n_window_pages,
        window_tokens=largest_window(arch),
        window_page_bytes=pool.bytes_per_window_page,
    )


def _hybrid_room(
    arch: ModelArch, settings: EngineSettings, plan: MemoryPlan, page_tokens: int
) -> _Room:
    """SGLang has slots apart from pages; the others take both out of the same bytes. A sequence
    that computes holds up to two states: the one it reads and the one it writes.
    """
    pool = plan.pool
    page_bytes = _page_bytes(pool, page_tokens)
    dtype = state_dtype_of(arch, settings.state_dtype)
    state_bytes = max(1, round(arch.state_bytes(dtype, arch.dtype)) // settings.tp)
    running = _max_running(plan, settings)
    if isinstance(pool, SglangPool):
        running = min(running, (pool.slots - 1) // 2)
        n_pages = pool.tokens // page_tokens
        return _Room(n_pages, page_bytes, running, pool.slots, state_bytes)
    n_bytes = pool.pool_bytes
    slots = n_bytes // state_bytes
    running = min(running, (slots - 1) // 2)
    n_pages = (n_bytes - 3 * state_bytes) // page_bytes
    return _Room(n_pages, page_bytes, running, slots, state_bytes, n_bytes)


def pair_flops(work: Work) -> float:
    """FLOPs of attention of a token to one earlier token."""
    far, near = (work.attention_flops(Shape(1, context)) for context in (2_000, 1_000))
    return max(0.0, (far - near) / 1_000)


def _page_bytes(pool: PoolPlan, page_tokens: int) -> int:
    """Bytes of a page per rank: what a long request grows by."""
    long = 64 * max(page_tokens, pool.block_tokens)
    grown = pool.bytes_per_request(2 * long) - pool.bytes_per_request(long)
    return max(1, grown * page_tokens // long)


def _max_running(plan: MemoryPlan, settings: EngineSettings) -> int:
    bounds = [settings.max_num_seqs or _DEFAULT_RUNNING]
    if plan.pool.max_num_seqs is not None:
        bounds.append(max(1, plan.pool.max_num_seqs))
    return min(bounds)


def _step_tokens(arch: ModelArch, memory: GpuMemory, settings: EngineSettings, how: Profile) -> int:
    if settings.max_num_batched_tokens is not None:
        return settings.max_num_batched_tokens
    if settings.engine == "vllm":
        rules = VllmAllocator().profile(settings)
        return resolve_limits(arch, memory, settings, rules).max_num_batched_tokens
    return how.step_tokens
