"""Transformers: continuous batching pages the cache in a share of what is free after loading."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UnsupportedModelError
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
class TransformersAllocator:
    """``transformers serve --continuous-batching``."""

    extrapolate: bool = False

    def profile(self, settings: EngineSettings) -> EngineProfile:
        """The rules at ``settings.version``."""
        return profile_of("transformers", settings, extrapolate=self.extrapolate)

    def stack(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, weights: WeightBytes
    ) -> MemoryStack:
        """A share of what is free after loading."""
        _refuse_state(arch)
        profile = self.profile(settings)
        return after_load_stack("transformers", arch, gpu, settings, weights, profile)

    def pool(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, pool_bytes: int
    ) -> PagePool:
        """Pages of the paged cache."""
        _refuse_state(arch)
        return page_pool(arch, settings, self.profile(settings), pool_bytes)

    def knobs(self, budget: MemoryBudget) -> dict[str, str]:
        """The share of free memory."""
        free = budget.gpu.total_bytes - budget.weights_bytes - budget.runtime_bytes
        share = max(0.01, min(0.99, budget.pool_bytes / max(1, free)))
        return {"max_memory_percent": f"{math.floor(share * 1000) / 1000:.3f}"}


def _refuse_state(arch: ModelArch) -> None:
    if keeps_state(arch):
        raise UnsupportedModelError(
            "transformers' continuous batching has no allocator for linear attention "
            '("Invalid layer type: linear_attention")',
            seen=arch.family,
            fix="use vLLM or SGLang for hybrid models; transformers' plain generate gives "
            "reference logits",
        )
