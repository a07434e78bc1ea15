"""Engines that take a share of what is FREE after loading: TensorRT-LLM and Transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UnsupportedModelError, UsageError
from hullspeed.findings import Finding, Severity
from hullspeed.memory.budget import (
    EngineSettings,
    GpuMemory,
    MemoryBudget,
    MemoryItem,
    MemoryStack,
    Term,
    WeightBytes,
)
from hullspeed.memory.layers import cache_layers, kv_dtype_of, state_dtype_of
from hullspeed.memory.pages import PagePool
from hullspeed.memory.profile import EngineProfile, engine_profile
from hullspeed.units import GIB

Z90 = 1.645


def page_pool(
    arch: ModelArch, settings: EngineSettings, profile: EngineProfile, pool_bytes: int
) -> PagePool:
    """Pages of the profile's size over the layers of one rank."""
    if pool_bytes < 0:
        raise UsageError("a pool cannot be negative", seen=pool_bytes)
    layers = cache_layers(
        arch,
        kv_dtype=kv_dtype_of(arch, settings.kv_dtype),
        state_dtype=state_dtype_of(arch, settings.state_dtype, default="fp32"),
        tp=settings.tp,
        draft_tokens=settings.draft_tokens,
    )
    return PagePool(
        engine=profile.engine,
        pool_bytes=pool_bytes,
        layers=layers,
        page_tokens=settings.block_tokens or int(profile.rule("page_tokens")),
        max_model_len=settings.max_model_len or arch.max_context_tokens,
        asked_num_seqs=settings.max_num_seqs or int(profile.number("default_num_seqs")),
    )


def _after_load_stack(
    engine: str,
    arch: ModelArch,
    gpu: GpuMemory,
    settings: EngineSettings,
    weights: WeightBytes,
    profile: EngineProfile,
) -> MemoryStack:
    number = profile.number
    loaded = weights.decoder - weights.replicated
    loaded += 0 if settings.language_model_only else weights.vision
    loaded += weights.mtp if settings.draft_tokens else 0
    per_rank = -(-loaded // (settings.tp * settings.pp)) + weights.replicated
    chunk = settings.max_num_batched_tokens or int(number("default_batched_tokens"))
    width = max(getattr(layer.mlp, "intermediate", 0) for layer in arch.layers)
    activations = round(number("activation_bytes_per_width") * width * chunk / settings.tp)
    context = round(number("context_gib") * GIB) + gpu.baseline_bytes
    free = gpu.total_bytes - per_rank - context - activations
    share = settings.memory_fraction or float(profile.rule("default_fraction"))
    pool = settings.kv_cache_bytes or math.floor(max(0, free) * share)
    if free <= 0:
        pool = free
    spread = round(Z90 * number("runtime_sigma_gib") * share * GIB)

    def item(term: Term, name: str, size: int, source: str) -> MemoryItem:
        return MemoryItem(term=term, name=name, bytes=size, source=source, exact=False)

    return MemoryStack(
        engine=engine,
        total_bytes=gpu.total_bytes,
        items=(
            item(Term.WEIGHTS, "weights", per_rank, weights.source),
            item(Term.RUNTIME, "CUDA context and others", context, "estimate"),
            item(Term.RUNTIME, "activations of one step", activations, f"{chunk} tokens"),
            MemoryItem(
                term=Term.SEQUENCE_STATE,
                name="KV and state pool",
                bytes=pool,
                source=f"{share} x free after load",
                exact=False,
                interval=(pool - spread, pool + spread),
            ),
            item(Term.HEADROOM, "left free", free - pool, f"{1 - share:.2f} x free after load"),
        ),
    )


@dataclass(frozen=True, slots=True)
class TrtllmAllocator:
    """TensorRT-LLM's PyTorch backend (implements :class:`hullspeed.memory.budget.Allocator`)."""

    extrapolate: bool = False

    def profile(self, settings: EngineSettings) -> EngineProfile:
        """The rules at ``settings.version``."""
        return engine_profile("trtllm", settings.version, extrapolate=self.extrapolate)

    def stack(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, weights: WeightBytes
    ) -> MemoryStack:
        """``free_gpu_memory_fraction`` of what is free after loading and profiling."""
        stack = _after_load_stack("trtllm", arch, gpu, settings, weights, self.profile(settings))
        return MemoryStack(
            engine=stack.engine,
            total_bytes=stack.total_bytes,
            items=stack.items,
            findings=_experimental(arch, self.profile(settings)),
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
    if not arch.state_bytes("fp32", "fp16"):
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


@dataclass(frozen=True, slots=True)
class TransformersAllocator:
    """``transformers serve --continuous-batching``."""

    extrapolate: bool = False

    def profile(self, settings: EngineSettings) -> EngineProfile:
        """The rules at ``settings.version``."""
        return engine_profile("transformers", settings.version, extrapolate=self.extrapolate)

    def stack(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, weights: WeightBytes
    ) -> MemoryStack:
        """A share of what is free after loading."""
        _refuse_state(arch)
        profile = self.profile(settings)
        return _after_load_stack("transformers", arch, gpu, settings, weights, profile)

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
    if arch.state_bytes("fp32", "fp16"):
        raise UnsupportedModelError(
            "transformers' continuous batching has no allocator for linear attention "
            '("Invalid layer type: linear_attention")',
            seen=arch.family,
            fix="use vLLM or SGLang for hybrid models; transformers' plain generate gives "
            "reference logits",
        )
