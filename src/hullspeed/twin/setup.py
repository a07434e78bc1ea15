"""setup: an engine's memory plan as the numbers that the twin schedules by."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from hullspeed.arch.model import ModelArch
from hullspeed.core.build import STATE_BLOCK_TOKENS
from hullspeed.errors import CapacityError
from hullspeed.hardware.ceilings import Interruptions
from hullspeed.memory.allocators import MemoryPlan, plan_memory
from hullspeed.memory.budget import EngineSettings, GpuMemory, PoolPlan, WeightBytes
from hullspeed.memory.layers import keeps_state, state_dtype_of
from hullspeed.memory.ours_pool import RoomPool
from hullspeed.memory.profile import engine_profile
from hullspeed.memory.sglang import SglangAllocator
from hullspeed.memory.sglang_pool import SglangPool
from hullspeed.memory.vllm import VllmAllocator
from hullspeed.memory.vllm_runtime import Limits, resolve_limits
from hullspeed.memory.windows import largest_window
from hullspeed.perf.work import Shape, Work
from hullspeed.twin.engine import EngineModel
from hullspeed.twin.profiles import profile
from hullspeed.units import format_bytes


class Host(NamedTuple):
    """Time that passes beside the steps.

    Attributes:
        request_s: From a request's bytes to its arrival at the scheduler.
        work_s: Of that, how long it keeps a core from the next one and from the steps.
        own_core: The API process has a core that no step uses.
        stream_token_s: Per token that a step puts out.
        interruptions: By other processes.
    """

    request_s: float = 0.0
    work_s: float = 0.0
    own_core: bool = False
    stream_token_s: float = 0.0
    interruptions: Interruptions | None = None


def engine_model(
    arch: ModelArch,
    memory: GpuMemory,
    settings: EngineSettings,
    weights: WeightBytes,
    *,
    typical_tokens: int,
    cache: str | None = None,
    eviction: str = "lru",
    host: Host | None = None,
) -> EngineModel:
    """``settings.engine`` on ``arch`` with the memory that its allocator computes.

    ``typical_tokens`` is the length of a typical sequence: of models with sliding windows, whose
    pages are not alike, another engine's pool holds as many sequences of this length as its
    allocator says.
    ``cache`` is another prefix cache than the engine's own, and ``host`` what passes beside the
    steps.

    Raises:
        UsageError: for settings that contradict each other, an unknown engine or cache.
        CapacityError: if the engine would not start: not one sequence fits.
        UnsupportedModelError: if the engine does not run the model.
    """
    how, host = profile(settings.engine), host or Host()
    settings = replace(settings, cache=cache)
    plan = plan_memory(arch, memory, settings, weights)
    hybrid = keeps_state(arch)
    page_tokens = how.page_tokens or plan.pool.block_tokens
    running = _max_running(arch, memory, plan)
    if isinstance(plan.pool, RoomPool):
        room = _own_room(plan.pool)
    elif hybrid:
        room = _hybrid_room(arch, plan, page_tokens, running)
    else:
        room = _dense_room(arch, plan, page_tokens, running, typical_tokens)
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
        stored_slots=room.stored_slots,
        n_window_pages=room.n_window_pages,
        window_tokens=room.window_tokens,
        window_page_bytes=room.window_page_bytes,
        shared_bytes=room.shared_bytes,
        max_running=room.max_running,
        step_tokens=_step_tokens(arch, memory, settings),
        max_context_tokens=settings.max_model_len or arch.max_context_tokens,
        cache=cache or (how.hybrid_cache if hybrid and how.hybrid_cache else how.cache),
        eviction=eviction,
        block_tokens=STATE_BLOCK_TOKENS
        if settings.engine == "hullspeed"
        else plan.pool.hit_granularity_tokens,
        flops_per_token=work.body_flops(1),
        flops_per_token_pair=pair_flops(work),
        policy=how.policy,
        request_s=host.request_s,
        request_work_s=host.work_s,
        own_core=host.own_core,
        stream_token_s=host.stream_token_s,
        interrupted_every_s=host.interruptions.every_s if host.interruptions else math.inf,
        interrupted_s=host.interruptions.lost_s if host.interruptions else 0.0,
    )


class _Room(NamedTuple):
    n_pages: int
    page_bytes: int
    max_running: int
    state_slots: int = 0
    state_bytes: int = 0
    stored_slots: int = 0
    shared_bytes: int = 0
    n_window_pages: int = 0
    window_tokens: int = 0
    window_page_bytes: int = 1


def _own_room(pool: RoomPool) -> _Room:
    """What the embedded engine itself would make of the memory, or why it would not start."""
    if pool.room is None:
        raise CapacityError(
            f"hullspeed would not start: {pool.shortage}", seen=format_bytes(pool.budget_bytes)
        ) from pool.shortage
    room = pool.room
    return _Room(
        n_pages=room.n_pages,
        page_bytes=max(1, room.page_bytes),
        max_running=pool.rules.max_running,
        state_slots=room.n_state_slots,
        state_bytes=room.end_bytes,
        stored_slots=room.n_stored_slots,
        n_window_pages=room.n_window_pages,
        window_tokens=room.window_tokens,
        window_page_bytes=max(1, room.window_page_bytes),
    )


def _dense_room(
    arch: ModelArch, plan: MemoryPlan, page_tokens: int, running: int, typical_tokens: int
) -> _Room:
    pool = plan.pool
    page_bytes = _page_bytes(pool, page_tokens)
    sequences = pool.concurrency(typical_tokens)
    if largest_window(arch) and sequences < running:
        n_pages = int(sequences * -(-typical_tokens // page_tokens))
        return _Room(n_pages, page_bytes, running)
    return _Room(pool.pool_bytes // page_bytes, page_bytes, running)


def _hybrid_room(arch: ModelArch, plan: MemoryPlan, page_tokens: int, running: int) -> _Room:
    """SGLang has slots apart from pages; the others take both out of the same bytes. A sequence
    that computes holds up to two states: the one it reads and the one it writes.
    """
    pool, settings = plan.pool, plan.settings
    page_bytes = _page_bytes(pool, page_tokens)
    dtype = state_dtype_of(arch, settings.state_dtype)
    state_bytes = max(1, round(arch.state_bytes(dtype, arch.dtype)) // settings.tp)
    if isinstance(pool, SglangPool):
        running = min(running, (pool.slots - 1) // 2)
        n_pages = pool.tokens // page_tokens
        return _Room(n_pages, page_bytes, running, pool.slots, state_bytes)
    n_bytes = pool.pool_bytes
    slots = n_bytes // state_bytes
    running = min(running, (slots - 1) // 2)
    n_pages = (n_bytes - 3 * state_bytes) // page_bytes
    return _Room(n_pages, page_bytes, running, slots, state_bytes, shared_bytes=n_bytes)


def pair_flops(work: Work) -> float:
    """FLOPs of attention of a token to one earlier token."""
    far, near = (work.attention_flops(Shape(1, context)) for context in (2_000, 1_000))
    return max(0.0, (far - near) / 1_000)


def _page_bytes(pool: PoolPlan, page_tokens: int) -> int:
    """Bytes of a page per rank: what a long request grows by."""
    long = 64 * max(page_tokens, pool.block_tokens)
    grown = pool.bytes_per_request(2 * long) - pool.bytes_per_request(long)
    return max(1, grown * page_tokens // long)


def _max_running(arch: ModelArch, memory: GpuMemory, plan: MemoryPlan) -> int:
    """The flag, else the engine's own default, as far as it starts."""
    pool, settings = plan.pool, plan.settings
    if isinstance(pool, SglangPool):
        return pool.max_running_requests
    running = settings.max_num_seqs
    if running is None and settings.engine == "vllm":
        running = _vllm_limits(arch, memory, settings).max_num_seqs
    if running is None:
        running = int(engine_profile(settings.engine, settings.version).number("default_num_seqs"))
    return running if pool.max_num_seqs is None else min(running, max(1, pool.max_num_seqs))


def _step_tokens(arch: ModelArch, memory: GpuMemory, settings: EngineSettings) -> int:
    """The flag, else the engine's own default."""
    if settings.max_num_batched_tokens is not None:
        return settings.max_num_batched_tokens
    if settings.engine == "vllm":
        return _vllm_limits(arch, memory, settings).max_num_batched_tokens
    if settings.engine == "sglang":
        return SglangAllocator().chunked_prefill_tokens(memory, settings)
    profile = engine_profile(settings.engine, settings.version)
    return int(profile.number("default_batched_tokens"))


def _vllm_limits(arch: ModelArch, memory: GpuMemory, settings: EngineSettings) -> Limits:
    return resolve_limits(arch, memory, settings, VllmAllocator().profile(settings))
