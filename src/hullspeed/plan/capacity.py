"""Capacity: what fits, by the engine's own arithmetic."""

from __future__ import annotations

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.hardware.gpu import Gpu
from hullspeed.hardware.machine import Machine
from hullspeed.memory.allocators import allocator
from hullspeed.memory.budget import EngineSettings, GpuMemory, MemoryStack, PoolPlan
from hullspeed.memory.layers import kv_dtype_of, state_dtype_of
from hullspeed.memory.ours_room import kv_format
from hullspeed.memory.sglang import SglangAllocator
from hullspeed.memory.vllm import VllmAllocator
from hullspeed.memory.vllm_runtime import resolve_limits
from hullspeed.plan.model import PlannedModel
from hullspeed.plan.workload import Workload

CONTEXTS = (2048, 8192, 32768, 131072, 262144)
_STEP_TOKENS = 8192  # max_num_tokens of TensorRT-LLM
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class AtContext(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of one length fit at once.

    Attributes:
        divided: Pool bytes over KV bytes alone: the arithmetic that forgets state and blocks.
        engine: The engine's own figure, as its log prints it.
        served: Whole requests that really run at once.
    """

    context_tokens: int
    divided: float
    engine: float
    served: int


class AtConcurrency(msgspec.Struct, frozen=True, kw_only=True):
    """The longest context at which so many requests fit at once; 0 when none does."""

    concurrency: int
    max_context_tokens: int


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool of one rank holds.

    Attributes:
        pool_low_bytes: Lower end of the pool's 90 % interval.
        printed_tokens: "GPU KV cache size" of the start-up log.
        max_num_seqs: The largest setting that starts; ``None`` if nothing bounds it.
        needed: Requests of the workload in flight.
        served: How many of them run at once, at their full length.
        served_low: The same at the lower end of the pool.
    """

    pool_bytes: int
    pool_low_bytes: int
    pool_high_bytes: int
    block_tokens: int
    bytes_per_block: int
    blocks: int
    printed_tokens: int
    printed_concurrency: float
    max_num_seqs: int | None
    hit_granularity_tokens: int
    needed: int
    served: int
    served_low: int
    longest_served: int
    by_context: tuple[AtContext, ...]
    by_concurrency: tuple[AtConcurrency, ...]
    notes: tuple[str, ...]


def memory_of(gpu: Gpu) -> GpuMemory:
    """A catalogue GPU as allocators see it."""
    major, _, minor = gpu.compute_capability.partition(".")
    known = major.isdigit() and minor.isdigit()
    return GpuMemory(
        name=gpu.name,
        total_bytes=gpu.memory_bytes,
        compute_capability=(int(major), int(minor)) if known else (0, 0),
    )


def memory_of_machine(machine: Machine) -> GpuMemory:
    """This machine's memory as the embedded engine sees it."""
    return GpuMemory(
        name="this machine",
        total_bytes=machine.memory_bytes,
        baseline_bytes=machine.memory_bytes - machine.available_bytes,
    )


def make_capacity(
    model: PlannedModel,
    memory: GpuMemory,
    settings: EngineSettings,
    workload: Workload,
    *,
    tables: bool = True,
) -> tuple[MemoryStack, PoolPlan, Capacity]:
    """Stack, pool and what it holds; ``tables=False`` leaves out what only a reader needs.

    Raises:
        UsageError: for settings that contradict each other.
        UnsupportedModelError: if the engine does not run the model.
    """
    engine = allocator(settings.engine)
    stack = engine.stack(model.arch, memory, settings, model.weights)
    low, high = stack.pool_interval
    pool = engine.pool(model.arch, memory, settings, stack.divided_bytes[0])
    served = pool.served_concurrency(workload.request_tokens)
    served_low = served
    if tables and low != stack.pool_bytes:
        pool_low = engine.pool(model.arch, memory, settings, low)
        served_low = pool_low.served_concurrency(workload.request_tokens)
    capacity = Capacity(
        pool_bytes=stack.pool_bytes,
        pool_low_bytes=low,
        pool_high_bytes=high,
        block_tokens=pool.block_tokens,
        bytes_per_block=pool.bytes_per_block,
        blocks=pool.blocks,
        printed_tokens=pool.printed_tokens,
        printed_concurrency=pool.printed_concurrency,
        max_num_seqs=pool.max_num_seqs,
        hit_granularity_tokens=pool.hit_granularity_tokens,
        needed=workload.concurrency,
        served=served,
        served_low=served_low,
        longest_served=pool.served_concurrency(workload.context_tokens),
        by_context=_by_context(model.arch, pool, settings, workload) if tables else (),
        by_concurrency=_by_concurrency(model.arch, pool) if tables else (),
        notes=tuple(pool.notes) if tables else (),
    )
    return stack, pool, capacity


def _by_context(
    arch: ModelArch, pool: PoolPlan, settings: EngineSettings, workload: Workload
) -> tuple[AtContext, ...]:
    longest = arch.max_context_tokens
    contexts = {c for c in CONTEXTS if c <= longest}
    contexts |= {workload.request_tokens, workload.context_tokens, min(longest, CONTEXTS[-1])}
    dtype = kv_dtype(arch, settings)
    rows = []
    for context in sorted(contexts):
        kv_bytes = arch.kv_bytes(context, dtype) / settings.tp
        rows.append(
            AtContext(
                context_tokens=context,
                divided=pool.pool_bytes / kv_bytes if kv_bytes else 0.0,
                engine=pool.concurrency(context),
                served=pool.served_concurrency(context),
            )
        )
    return tuple(rows)


def _by_concurrency(arch: ModelArch, pool: PoolPlan) -> tuple[AtConcurrency, ...]:
    rows = []
    for concurrency in CONCURRENCIES:
        longest = min(pool.max_context_tokens(concurrency), arch.max_context_tokens)
        rows.append(AtConcurrency(concurrency=concurrency, max_context_tokens=longest))
        if longest == 0:
            break
    return tuple(rows)


def kv_dtype(arch: ModelArch, settings: EngineSettings) -> str:
    """Number format of the KV cache: asked for, declared by the checkpoint, or the model's own."""
    if settings.engine == "hullspeed":
        return kv_format(settings.kv_dtype)
    return kv_dtype_of(arch, settings.kv_dtype)


def state_dtype(arch: ModelArch, settings: EngineSettings) -> str:
    """Number format of the recurrent state."""
    return state_dtype_of(arch, settings.state_dtype)


def step_tokens(arch: ModelArch, memory: GpuMemory, settings: EngineSettings) -> int:
    """Token budget of a step: asked for, or the engine's default for this GPU."""
    if settings.max_num_batched_tokens is not None:
        return settings.max_num_batched_tokens
    if settings.engine == "vllm":
        profile = VllmAllocator().profile(settings)
        return resolve_limits(arch, memory, settings, profile).max_num_batched_tokens
    if settings.engine == "sglang":
        return SglangAllocator().chunked_prefill_tokens(memory, settings)
    return _STEP_TOKENS
