"""What a launch takes, from the model's architecture: memory on a CPU, the pool on a GPU.

A caller that has a plan gives its numbers in the ask; this fills in what it leaves open.
"""

from __future__ import annotations

import msgspec

from hullspeed.arch.load import load_arch
from hullspeed.arch.model import ModelArch
from hullspeed.errors import ModelError, UsageError
from hullspeed.memory.allocators import MemoryPlan, plan_memory
from hullspeed.memory.budget import EngineSettings, GpuMemory, Term, WeightBytes
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.case import Case
from hullspeed.preflight.checkpoint import local_files
from hullspeed.preflight.stack import Stack

# Interpreter, torch, numba and the compiled kernels, resident before a weight is read; measured
# on x86_64 with torch 2.13.
_CPU_RUNTIME_BYTES = 600 * 1024**2


def sized(ask: Ask, stack: Stack) -> Ask:
    """``ask`` with the memory it takes, where the model and the engine's rules are known."""
    arch = _arch(ask, stack)
    if arch is None:
        return ask
    if not ask.on_gpu:
        need = ask.need_bytes if ask.need_bytes is not None else cpu_need_bytes(ask, arch)
        return msgspec.structs.replace(ask, need_bytes=need)
    case = Case(ask, stack)
    plan = _plan(case, arch) if case.used_gpus else None
    if plan is None:
        return ask
    context = ask.context_tokens or arch.max_context_tokens
    holds_one = plan.pool.concurrency(context) >= 1
    return msgspec.structs.replace(
        ask,
        weight_bytes_per_gpu=ask.weight_bytes_per_gpu or plan.stack.bytes_of(Term.WEIGHTS),
        pool_blocks=plan.low.max_num_seqs if ask.pool_blocks is None else ask.pool_blocks,
        plan_findings=(*plan.stack.findings, *plan.pool.findings),
        pool_tokens=_pool_tokens(ask, plan, context, holds_one=holds_one),
    )


def cpu_need_bytes(ask: Ask, arch: ModelArch) -> int:
    """Least memory of the embedded engine: linear weights in fp16 (as the CPU kernels hold them),
    fp32 keys and values of one request of the asked length, and the runtime.
    """
    context = ask.context_tokens or min(arch.max_context_tokens, 8192)
    weights = 2 * arch.param_count(extras=False)
    return weights + arch.kv_bytes(context, "fp32") + _CPU_RUNTIME_BYTES


def _pool_tokens(ask: Ask, plan: MemoryPlan, context: int, *, holds_one: bool) -> int | None:
    if ask.pool_tokens is not None:
        return ask.pool_tokens
    return context if holds_one else plan.pool.max_context_tokens(1)


def _arch(ask: Ask, stack: Stack) -> ModelArch | None:
    model = stack.model
    if not model.found or model.error or model.unsupported or model.missing_files:
        return None
    try:
        files = local_files(ask.model)
        return load_arch(files) if files else None
    except ModelError:  # the model's own rules report it
        return None


def _plan(case: Case, arch: ModelArch) -> MemoryPlan | None:
    gpu = min(case.used_gpus, key=lambda each: each.total_bytes)
    torch = case.torch
    memory = GpuMemory(
        name=gpu.name,
        total_bytes=gpu.total_bytes,
        compute_capability=gpu.capability,
        cuda_major=int((torch.cuda if torch and torch.cuda else "13").split(".")[0]),
    )
    ask = case.ask
    settings = EngineSettings(
        engine=ask.engine,
        version=case.engine_version,
        memory_fraction=ask.memory_share,
        max_model_len=ask.context_tokens,
        max_num_seqs=ask.max_num_seqs,
        kv_dtype=None if ask.kv_dtype == "auto" else ask.kv_dtype,
        tp=ask.tensor_parallel,
        pp=ask.pipeline_parallel,
        draft_tokens=ask.draft_tokens,
        prefix_caching=ask.prefix_caching,
    )
    weights = WeightBytes(decoder=case.stack.model.size_bytes, source="files on disk")
    try:
        return plan_memory(arch, memory, settings, weights)
    except (UsageError, ModelError):  # outside the allocator's table: PF044 and PF020 say so
        return None
