"""What engines have in common that take a share of what is FREE after loading."""

from __future__ import annotations

import math

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.memory.budget import (
    EngineSettings,
    GpuMemory,
    MemoryItem,
    MemoryStack,
    Term,
    WeightBytes,
    given_pool_findings,
)
from hullspeed.memory.layers import cache_layers, kv_dtype_of, state_dtype_of
from hullspeed.memory.pages import PagePool
from hullspeed.memory.profile import EngineProfile
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


def after_load_stack(
    engine: str,
    arch: ModelArch,
    gpu: GpuMemory,
    settings: EngineSettings,
    weights: WeightBytes,
    profile: EngineProfile,
) -> MemoryStack:
    """Weights, one step's activations, then the pool as a share of the rest."""
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

    items = (
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
    )
    return MemoryStack(
        engine=engine,
        total_bytes=gpu.total_bytes,
        items=items,
        findings=given_pool_findings(settings, gpu, items) + profile.findings(),
    )
