"""TensorRT-LLM: ``free_gpu_memory_fraction`` is a share of what is FREE after loading."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hullspeed.arch.model import ModelArch
from hullspeed.findings import Finding, Severity
from hullspeed.memory.after_load import after_load_stack, page_pool
from hullspeed.memory.budget import (
    EngineSettings,
    GpuMemory,
    MemoryBudget,
    MemoryStack,
    WeightBytes,
)
from hullspeed.memory.layers import keeps_state
from hullspeed.memory.pages import PagePool
from hullspeed.memory.profile import EngineProfile, profile_of


@dataclass(frozen=True, slots=True)
class TrtllmAllocator:
    """TensorRT-LLM's PyTorch backend (implements :class:`hullspeed.memory.budget.Allocator`)."""

    extrapolate: bool = False

    def profile(self, settings: EngineSettings) -> EngineProfile:
        """The rules at ``settings.version``."""
        return profile_of("trtllm", settings, extrapolate=self.extrapolate)

    def stack(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, weights: WeightBytes
    ) -> MemoryStack:
        """``free_gpu_memory_fraction`` of what is free after loading and profiling."""
        stack = after_load_stack("trtllm", arch, gpu, settings, weights, self.profile(settings))
        return MemoryStack(
            engine=stack.engine,
            total_bytes=stack.total_bytes,
            items=stack.items,
            findings=stack.findings + _experimental(arch, self.profile(settings)),
        )

    def pool(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, pool_bytes: int
    ) -> PagePool:
        """Blocks of 32 tokens, and one state per sequence for hybrids."""
        return page_pool(arch, settings, self.profile(settings), pool_bytes)

    def knobs(self, budget: MemoryBudget) -> dict[str, str]:
        """The fraction of free memory that yields the pool (a YAML key, not a flag)."""
        free = budget.gpu.total_bytes - budget.weights_bytes - budget.runtime_bytes
        share = max(0.01, min(0.99, budget.pool_bytes / max(1, free)))
        return {
            "kv_cache_config.free_gpu_memory_fraction": f"{math.floor(share * 1000) / 1000:.3f}",
            "max_seq_len": str(budget.max_model_len),
            "max_batch_size": str(budget.max_num_seqs),
        }


def _experimental(arch: ModelArch, profile: EngineProfile) -> tuple[Finding, ...]:
    if not keeps_state(arch):
        return ()
    return (
        Finding(
            code="MEM021",
            severity=Severity.WARNING,
            what="hybrid models on TensorRT-LLM are experimental: no public run was found to check",
            evidence={"source": profile.source("hybrid_reuse")},
            fix="prefer vLLM or SGLang, or verify the endpoint first: hullspeed verify",
        ),
    )
