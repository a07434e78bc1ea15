"""vLLM 0.19 to 0.33: utilization is a share of the GPU's TOTAL memory, everything included."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.findings import Finding, Severity
from hullspeed.memory.budget import (
    EngineSettings,
    GpuMemory,
    MemoryBudget,
    MemoryItem,
    MemoryStack,
    Term,
    WeightBytes,
    given_pool_findings,
)
from hullspeed.memory.layers import (
    cache_layers,
    keeps_state,
    kv_dtype_of,
    partition,
    state_dtype_of,
)
from hullspeed.memory.profile import EngineProfile, profile_of
from hullspeed.memory.vllm_groups import Layout, StateMode, plan_layout
from hullspeed.memory.vllm_pool import VllmPool
from hullspeed.memory.vllm_runtime import (
    Limits,
    gdn_scratch,
    graph_bytes,
    graphs_charged,
    loaded_weights,
    resolve_limits,
    runtime_items,
)
from hullspeed.units import GIB


def state_mode(settings: EngineSettings, profile: EngineProfile) -> StateMode:
    """``mamba_cache_mode``: follows prefix caching, whose default for hybrids changed in 0.28."""
    asked = settings.extra.get("mamba_cache_mode")
    caching = settings.prefix_caching
    if caching is None:
        caching = bool(profile.rule("hybrid_prefix_caching"))
    if asked is not None:
        if not profile.rule("mamba_cache_mode_flag"):
            raise UsageError(
                "--mamba-cache-mode is gone in this version", seen=asked, fix="drop it"
            )
        if asked not in tuple(StateMode):
            raise UsageError("unknown mamba cache mode", seen=asked, fix="all, align or none")
        # vLLM forces "none" when prefix caching is off, whatever the flag says.
        return StateMode(asked) if caching else StateMode.NONE
    return StateMode.ALIGN if caching else StateMode.NONE


def gdn_prefill_active(arch: ModelArch, gpu: GpuMemory, profile: EngineProfile) -> bool:
    """FlashInfer's GDN prefill: SM90 always, SM10x and SM12x with CUDA 13 or newer."""
    if not profile.rule("gdn_prefill_64"):
        return False
    if not any(layer.mixer.kind == "gated_delta_net" for layer in arch.layers):
        return False
    major = gpu.compute_capability[0]
    return major == 9 or (major in (10, 12) and gpu.cuda_major >= 13)


@dataclass(frozen=True, slots=True)
class VllmAllocator:
    """Implements :class:`hullspeed.memory.budget.Allocator`."""

    extrapolate: bool = False

    def profile(self, settings: EngineSettings) -> EngineProfile:
        """The rules at ``settings.version``."""
        return profile_of("vllm", settings, extrapolate=self.extrapolate)

    def layout(self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings) -> Layout:
        """Groups and block size of this model under these settings."""
        profile = self.profile(settings)
        limits = resolve_limits(arch, gpu, settings, profile)
        layers = cache_layers(
            arch,
            kv_dtype=kv_dtype_of(arch, settings.kv_dtype),
            state_dtype=state_dtype_of(arch, settings.state_dtype),
            tp=settings.tp,
            draft_tokens=settings.draft_tokens,
        )
        return plan_layout(
            layers,
            state_mode=state_mode(settings, profile),
            draft_tokens=settings.draft_tokens,
            batched_tokens=limits.max_num_batched_tokens,
            gdn_prefill=gdn_prefill_active(arch, gpu, profile),
            block_tokens=settings.block_tokens or _latent_block(arch),
            stages=partition(len(arch.layers), settings.pp) if settings.pp > 1 else (),
        )

    def pool(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, pool_bytes: int
    ) -> VllmPool:
        """Exact given ``pool_bytes``, the smallest among the ranks."""
        if pool_bytes < 0:
            raise UsageError("a pool cannot be negative", seen=pool_bytes)
        profile = self.profile(settings)
        limits = resolve_limits(arch, gpu, settings, profile)
        layout = self.layout(arch, gpu, settings)
        return VllmPool(
            layout=layout,
            pool_bytes=pool_bytes,
            max_model_len=limits.max_model_len,
            asked_num_seqs=limits.max_num_seqs,
            tokens_line=str(profile.rule("tokens_line")),
            null_block_reserved=bool(profile.rule("null_block_reserved")),
            mamba_block_tokens=settings.mamba_block_tokens,
            graphs=not settings.enforce_eager,
        )

    def requested_bytes(self, gpu: GpuMemory, settings: EngineSettings) -> int:
        """``ceil(total x utilization)``."""
        share = settings.memory_fraction
        if share is None:
            share = float(self.profile(settings).rule("default_utilization"))
        return math.ceil(gpu.total_bytes * share)

    def stack(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, weights: WeightBytes
    ) -> MemoryStack:
        """Weights, runtime, pool and headroom of one rank; the pool carries the spread."""
        profile = self.profile(settings)
        limits = resolve_limits(arch, gpu, settings, profile)
        loaded = loaded_weights(arch, weights, settings, profile)
        runtime = runtime_items(arch, gpu, settings, limits, weights, profile)
        used = loaded.bytes + sum(item.bytes for item in runtime)
        requested = self.requested_bytes(gpu, settings)
        if settings.kv_cache_bytes is not None:
            pool = _pool_item(settings.kv_cache_bytes, 0, "--kv-cache-memory-bytes")
            headroom = gpu.total_bytes - used - settings.kv_cache_bytes
        else:
            spread = _root_sum_square([loaded, *runtime])
            pool = _pool_item(requested - used, spread, "requested - weights - runtime")
            headroom = gpu.total_bytes - requested
        scratch = gdn_scratch(arch, settings, limits, profile)
        items = [loaded, *runtime, pool, *_headroom_items(headroom, scratch, gpu)]
        graphs = graph_bytes(arch, gpu, settings, limits, profile)
        charged = graphs_charged(settings, profile) or settings.kv_cache_bytes is not None
        left = headroom - gpu.baseline_bytes - scratch
        return MemoryStack(
            engine="vllm",
            total_bytes=gpu.total_bytes,
            items=tuple(items),
            findings=given_pool_findings(settings, gpu, items, in_use=gpu.baseline_bytes)
            + tuple(_stack_findings(gpu, settings, limits, requested, scratch, headroom))
            + _capture_findings(graphs, left, charged=charged)
            + profile.findings()
            + _caching_findings(arch, settings, profile),
        )

    def knobs(self, budget: MemoryBudget) -> dict[str, str]:
        """An exact pool in bytes: the fraction would leave it to the engine's estimate."""
        share = (budget.weights_bytes + budget.runtime_bytes + budget.pool_bytes) / (
            budget.gpu.total_bytes
        )
        return {
            "--gpu-memory-utilization": f"{min(0.99, math.ceil(share * 1000) / 1000):.3f}",
            "--kv-cache-memory-bytes": str(budget.pool_bytes),
            "--max-model-len": str(budget.max_model_len),
            "--max-num-seqs": str(budget.max_num_seqs),
        }


LATENT_BLOCK_TOKENS = 64  # FlashMLA's only block size (platforms/cuda.py)


def _latent_block(arch: ModelArch) -> int | None:
    kinds = {layer.mixer.kind for layer in arch.layers}
    return LATENT_BLOCK_TOKENS if kinds == {"latent_attention"} else None


def _pool_item(pool_bytes: int, spread: int, source: str) -> MemoryItem:
    return MemoryItem(
        term=Term.SEQUENCE_STATE,
        name="KV and state pool",
        bytes=pool_bytes,
        source=source,
        exact=spread == 0,
        interval=(pool_bytes - spread, pool_bytes + spread) if spread else None,
    )


def _root_sum_square(items: list[MemoryItem]) -> int:
    """Half-width of the pool's interval: runtime parts move together, the other terms alone."""
    runtime = [i for i in items if i.term is Term.RUNTIME and i.name != "CUDA graph estimate"]
    alone = [i for i in items if i not in runtime]
    together = sum((i.high - i.low) / 2 for i in runtime)
    return round(math.hypot(together, *((i.high - i.low) / 2 for i in alone)))


def _headroom_items(headroom: int, scratch: int, gpu: GpuMemory) -> list[MemoryItem]:
    items = []
    if gpu.baseline_bytes:
        items.append(("in use before start", gpu.baseline_bytes, "driver, display, others"))
    if scratch:
        items.append(("GDN prefill scratch", scratch, "72 KiB a token, not profiled by vLLM"))
    rest = headroom - sum(value for _, value, _ in items)
    items.append(("outside the engine's share", rest, "total - requested - the above"))
    return [
        MemoryItem(term=Term.HEADROOM, name=name, bytes=value, source=source, exact=False)
        for name, value, source in items
    ]


def _stack_findings(
    gpu: GpuMemory,
    settings: EngineSettings,
    limits: Limits,
    requested: int,
    scratch: int,
    headroom: int,
) -> list[Finding]:
    found = []
    free = gpu.total_bytes - gpu.baseline_bytes
    if requested > free and settings.kv_cache_bytes is None:
        found.append(
            Finding(
                code="MEM004",
                severity=Severity.ERROR,
                what="less memory is free than the utilization asks for; vLLM will not start",
                evidence={
                    "requested": f"{requested / GIB:.2f} GiB",
                    "free": f"{free / GIB:.2f} GiB",
                },
                fix=f"--gpu-memory-utilization {math.floor(free / gpu.total_bytes * 1000) / 1000}",
            )
        )
    if scratch > headroom - gpu.baseline_bytes:
        found.append(
            Finding(
                code="MEM005",
                severity=Severity.WARNING,
                what="starts, but may run out of memory on a long prompt",
                why="prefill scratch of the gated delta rule lies outside vLLM's profile",
                evidence={
                    "scratch": f"{scratch / GIB:.2f} GiB",
                    "left": f"{max(0, headroom - gpu.baseline_bytes) / GIB:.2f} GiB",
                },
                fix=f"--max-num-batched-tokens {_safe_chunk(limits, scratch, headroom, gpu)}",
            )
        )
    return found


# Seen to fail at capture although the estimate was charged: 0.98 of 22.4 GiB (vllm #57475).
CAPTURE_MARGIN_BYTES = GIB // 2


def _capture_findings(graphs: int, left: int, *, charged: bool) -> tuple[Finding, ...]:
    needed = CAPTURE_MARGIN_BYTES + (0 if charged else graphs)
    if not graphs or left >= needed:
        return ()
    return (
        Finding(
            code="MEM008",
            severity=Severity.WARNING,
            what="graph capture may run out of memory at start",
            why="graphs are captured after the pool is allocated; raising the utilization makes it "
            "worse",
            evidence={
                "left": f"{max(0, left) / GIB:.2f} GiB",
                "graphs": f"{graphs / GIB:.2f} GiB" + ("" if charged else ", not in the budget"),
            },
            fix="--enforce-eager, a shorter capture list, or a lower --gpu-memory-utilization",
        ),
    )


def _safe_chunk(limits: Limits, scratch: int, headroom: int, gpu: GpuMemory) -> int:
    """The chunk whose scratch fits what is left, in steps of 512, at least 1,024."""
    left = max(0, headroom - gpu.baseline_bytes)
    fits = limits.max_num_batched_tokens * left // max(1, scratch)
    return max(1024, fits // 512 * 512)


def _caching_findings(
    arch: ModelArch, settings: EngineSettings, profile: EngineProfile
) -> tuple[Finding, ...]:
    hybrid = keeps_state(arch)
    caching = state_mode(settings, profile) is not StateMode.NONE
    safe = profile.rule("hybrid_mtp_prefix_caching_safe")
    if not (hybrid and caching and settings.draft_tokens) or safe:
        return ()
    return (
        Finding(
            code="MEM007",
            severity=Severity.ERROR,
            what="speculative decoding with prefix caching corrupts answers on hybrid models",
            why="an unaligned state can be stored as a block boundary's",
            evidence={"source": profile.source("hybrid_mtp_prefix_caching_safe")},
            fix="--no-enable-prefix-caching, or leave speculative decoding off",
        ),
    )
