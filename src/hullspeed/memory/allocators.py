"""One budget in, each engine's own knobs out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.findings import Finding, Severity
from hullspeed.memory.budget import (
    POOL_TOO_LARGE,
    Allocator,
    EngineSettings,
    GpuMemory,
    MemoryBudget,
    MemoryStack,
    PoolPlan,
    Term,
    WeightBytes,
)
from hullspeed.memory.ours import HullspeedAllocator
from hullspeed.memory.sglang import SglangAllocator
from hullspeed.memory.transformers import TransformersAllocator
from hullspeed.memory.trtllm import TrtllmAllocator
from hullspeed.memory.vllm import VllmAllocator

ENGINES = ("hullspeed", "vllm", "sglang", "trtllm", "transformers")


def allocator(engine: str, *, extrapolate: bool = False) -> Allocator:
    """The allocator of an engine.

    Raises:
        UsageError: an engine that is not one of :data:`ENGINES`.
    """
    match engine:
        case "vllm":
            return VllmAllocator(extrapolate)
        case "sglang":
            return SglangAllocator(extrapolate)
        case "trtllm":
            return TrtllmAllocator(extrapolate)
        case "transformers":
            return TransformersAllocator(extrapolate)
        case "hullspeed":
            return HullspeedAllocator()
    raise UsageError("unknown engine", seen=engine, fix=f"one of {', '.join(ENGINES)}")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the bytes go and what the pool holds, with the pool's uncertainty carried through.

    Attributes:
        low: The pool at the lower bound of its interval: what can be promised.
    """

    settings: EngineSettings
    stack: MemoryStack
    pool: PoolPlan
    low: PoolPlan

    @property
    def fits(self) -> bool:
        """Whether one request of the longest context fits the best estimate."""
        return self.stack.bytes_of(Term.SEQUENCE_STATE) > 0 and not any(
            finding.code in ("MEM001", POOL_TOO_LARGE, "MEM011")
            for finding in (*self.stack.findings, *self.pool.findings)
        )

    @property
    def starting_num_seqs(self) -> int | None:
        """The ``max_num_seqs`` that starts even at the lower bound; ``None`` when unbounded."""
        return self.low.max_num_seqs


def of_default_seqs(finding: Finding) -> Finding:
    """``finding`` about a ``max_num_seqs`` that nobody asked for, as a warning."""
    return msgspec.structs.replace(
        finding,
        severity=Severity.WARNING,
        what=f"left at the engine's default max_num_seqs: {finding.what}",
    )


def plan_memory(
    arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, weights: WeightBytes
) -> MemoryPlan:
    """Stack and pool of one engine.

    Raises:
        UsageError: settings that contradict each other or the model.
        UnsupportedModelError: the engine does not run this model.
    """
    engine = allocator(settings.engine)
    stack = engine.stack(arch, gpu, settings, weights)
    divided, low = stack.divided_bytes
    return MemoryPlan(
        settings=settings,
        stack=stack,
        pool=engine.pool(arch, gpu, settings, divided),
        low=engine.pool(arch, gpu, settings, low),
    )


def budget_of(plan: MemoryPlan, gpu: GpuMemory, max_model_len: int) -> MemoryBudget:
    """The engine-neutral form of a plan."""
    seqs = plan.starting_num_seqs or plan.settings.max_num_seqs or 256
    return MemoryBudget(
        gpu=gpu,
        weights_bytes=plan.stack.bytes_of(Term.WEIGHTS),
        runtime_bytes=plan.stack.bytes_of(Term.RUNTIME),
        pool_bytes=plan.stack.pool_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max(1, seqs),
    )


def translate(budget: MemoryBudget) -> dict[str, dict[str, str]]:
    """The same budget in every engine's words: the same number means three things (share of total
    with everything, share of total for weights and pools, share of what is free after loading).
    """
    return {engine: allocator(engine).knobs(budget) for engine in ENGINES}


def with_starting_seqs(plan: MemoryPlan) -> EngineSettings:
    """The plan's settings with a ``max_num_seqs`` that starts."""
    bound = plan.starting_num_seqs
    asked = plan.settings.max_num_seqs
    if bound is None or (asked is not None and asked <= bound):
        return plan.settings
    return replace(plan.settings, max_num_seqs=max(1, bound))
