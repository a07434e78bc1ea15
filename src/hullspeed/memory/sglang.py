"""SGLang 0.5.x: ``--mem-fraction-static`` is a share of total memory for weights and pools ONLY;
activations and graphs live in the remainder.

Hybrid models have two pools: state slots and KV tokens. The slots usually bound concurrency.
Source: srt/arg_groups/memory_hook.py, srt/mem_cache/kv_cache_configurator.py and
srt/configs/mamba_utils.py of 0.5.23.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
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
from hullspeed.memory.layers import CacheLayer, cache_layers, kv_dtype_of, state_dtype_of
from hullspeed.memory.profile import EngineProfile, profile_of
from hullspeed.memory.sglang_pool import Cells, SglangPool
from hullspeed.units import GIB, MIB

Z90 = 1.645


@dataclass(frozen=True, slots=True)
class SglangAllocator:
    """Implements :class:`hullspeed.memory.budget.Allocator`."""

    extrapolate: bool = False

    def profile(self, settings: EngineSettings) -> EngineProfile:
        """The rules at ``settings.version``."""
        return profile_of("sglang", settings, extrapolate=self.extrapolate)

    def cells(self, arch: ModelArch, settings: EngineSettings) -> Cells:
        """Bytes of a token and of a state slot on one rank."""
        layers = self._layers(arch, settings)
        windows = [layer for layer in layers if layer.window_tokens]
        full = [layer for layer in layers if layer.keeps_tokens and not layer.window_tokens]
        return Cells(
            token_bytes=_total(full),
            window_bytes=_total(windows),
            window_tokens=max((layer.window_tokens or 0 for layer in windows), default=0),
            slot_bytes=sum(layer.state_bytes for layer in layers),
        )

    def _layers(self, arch: ModelArch, settings: EngineSettings) -> tuple[CacheLayer, ...]:
        kv_dtype = kv_dtype_of(arch, settings.kv_dtype)
        state_dtype = state_dtype_of(arch, settings.state_dtype, default="fp32")
        base = cache_layers(arch, kv_dtype=kv_dtype, state_dtype=state_dtype, tp=settings.tp)
        if not settings.draft_tokens:
            return base
        drafted = cache_layers(
            arch,
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
            tp=settings.tp,
            draft_tokens=settings.draft_tokens,
        )
        # Draft layers keep tokens like the others; slots are not widened, the intermediate
        # states of a draft have a buffer of their own.
        return base + tuple(layer for layer in drafted if layer.index >= len(arch.layers))

    def pool(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, pool_bytes: int
    ) -> SglangPool:
        """Tokens and slots in ``pool_bytes`` (SGLang's ``rest``), per rank."""
        if pool_bytes < 0:
            raise UsageError("a pool cannot be negative", seen=pool_bytes)
        profile = self.profile(settings)
        cells = self.cells(arch, settings)
        per_request = slots_per_request(settings, profile)
        slots = _slots(cells, settings, profile, pool_bytes)
        rest = pool_bytes
        if cells.slot_bytes:
            rest -= (slots + 1) * cells.slot_bytes  # slot 0 is padding
            requests = settings.max_num_seqs or slots // per_request
            rest -= cells.slot_bytes * (requests + 1) * settings.draft_tokens
        ratio = profile.number("swa_full_tokens_ratio") if cells.window_bytes else 0.0
        page = settings.block_tokens or 1
        per_token = cells.token_bytes + ratio * cells.window_bytes
        tokens = max(0, int(rest // per_token)) // page * page if per_token else 0
        return SglangPool(
            pool_bytes=pool_bytes,
            cells=cells,
            slots=slots,
            slots_per_request=per_request,
            tokens=tokens,
            window_pool_tokens=int(tokens * ratio),
            max_model_len=settings.max_model_len or arch.max_context_tokens,
            asked_running=settings.max_num_seqs,
            page_tokens=page,
            track_tokens=int(profile.rule("track_interval_tokens")),
        )

    def chunked_prefill_tokens(self, gpu: GpuMemory, settings: EngineSettings) -> int:
        """``--chunked-prefill-size``: the flag, or the default from the GPU's size."""
        if settings.max_num_batched_tokens is not None:
            return settings.max_num_batched_tokens
        return int(_gpu_class(gpu, self.profile(settings))["chunked_prefill_tokens"])

    def static_fraction(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, *, vision: bool
    ) -> float:
        """``--mem-fraction-static``: the flag, or the default from the GPU's size."""
        if settings.memory_fraction is not None:
            return settings.memory_fraction
        profile = self.profile(settings)
        number = profile.number
        row = _gpu_class(gpu, profile)
        chunk = self.chunked_prefill_tokens(gpu, settings)
        reserved = number("reserved_base_mib") * MIB
        reserved += (
            max(chunk, number("reserved_min_chunk_tokens"))
            * number("reserved_per_chunk_token_mib")
            * MIB
        )
        reserved += settings.tp * settings.pp * number("reserved_per_rank_mib") * MIB
        batch = settings.max_num_seqs or int(row["decode_max_batch"])
        batch = min(batch, int(row["decode_max_batch"]))
        reserved += batch * number("reserved_per_decode_mib") * MIB
        if gpu.total_bytes > number("reserved_floor_above_gib") * GIB:
            reserved = max(reserved, number("reserved_floor_gib") * GIB)
        fraction = (gpu.total_bytes - reserved) / gpu.total_bytes
        if vision:
            fraction *= number("vision_msf_factor") * number("vision_complexity_factor")
        return round(fraction, 3)

    def stack(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, weights: WeightBytes
    ) -> MemoryStack:
        """``rest = free after load - free before load x (1 - msf) - multimodal reserve``."""
        profile = self.profile(settings)
        vision = bool(weights.vision) and not settings.language_model_only
        fraction = self.static_fraction(arch, gpu, settings, vision=vision)
        context = round(profile.number("context_gib") * GIB) + gpu.baseline_bytes
        free_before = gpu.total_bytes - context
        loaded = weights.decoder - weights.replicated + (weights.vision if vision else 0)
        loaded += weights.mtp if settings.draft_tokens else 0
        per_rank = -(-loaded // (settings.tp * settings.pp)) + weights.replicated
        reserve = round(profile.number("multimodal_reserve_mib") * MIB) if vision else 0
        slack = math.ceil(free_before * (1 - fraction))
        rest = free_before - per_rank - slack - reserve
        if settings.kv_cache_bytes is not None:
            rest, slack = settings.kv_cache_bytes, max(0, slack + rest - settings.kv_cache_bytes)
        spread = round(Z90 * profile.number("pool_sigma_gib") * GIB)
        items = (
            _item(Term.WEIGHTS, "weights", per_rank, weights.source),
            _item(Term.RUNTIME, "CUDA context and others", context, "before loading"),
            _item(Term.RUNTIME, "multimodal reserve", reserve, "100 MiB with a vision tower"),
            MemoryItem(
                term=Term.SEQUENCE_STATE,
                name="KV and state pool",
                bytes=rest,
                source=f"msf {fraction:.3f}: free after load - {1 - fraction:.3f} x free before",
                exact=False,
                interval=(rest - spread, rest + spread),
            ),
            _item(Term.HEADROOM, "activations and graphs", slack, "(1 - msf) x free before"),
        )
        return MemoryStack(
            engine="sglang",
            total_bytes=gpu.total_bytes,
            items=tuple(item for item in items if item.bytes),
            findings=given_pool_findings(settings, gpu, items) + profile.findings(),
        )

    def knobs(self, budget: MemoryBudget) -> dict[str, str]:
        """The share of total memory that weights and pool take."""
        share = (budget.weights_bytes + budget.pool_bytes) / budget.gpu.total_bytes
        return {
            "--mem-fraction-static": f"{min(0.98, math.floor(share * 1000) / 1000):.3f}",
            "--context-length": str(budget.max_model_len),
            "--max-running-requests": str(budget.max_num_seqs),
        }


def slots_per_request(settings: EngineSettings, profile: EngineProfile) -> int:
    """State slots that one running request reserves, by radix strategy.

    Raises:
        UsageError: an unknown strategy.
    """
    table: Mapping[str, int] = profile.table["slots_per_request"]
    if settings.prefix_caching is False:
        return int(table["no_radix"])
    strategy = settings.radix_strategy or "auto"
    if strategy == "auto":
        strategy = str(profile.rule("default_strategy"))
    if strategy not in table or strategy == "no_radix":
        raise UsageError(
            "unknown --mamba-radix-cache-strategy",
            seen=strategy,
            fix="auto, no_buffer, extra_buffer or extra_buffer_lazy",
        )
    return int(table[strategy])


def _slots(cells: Cells, settings: EngineSettings, profile: EngineProfile, pool_bytes: int) -> int:
    """``--max-mamba-cache-size``, or the share that the ratio gives to the state pool."""
    slot = cells.slot_bytes
    if not slot:
        return 0
    if settings.mamba_slots is not None:
        return settings.mamba_slots
    ratio = settings.mamba_ratio or float(profile.rule("mamba_ratio"))
    share = Fraction(ratio).limit_denominator(10**6)
    budget = int(pool_bytes * share / (1 + share))
    drafts = settings.draft_tokens
    per_request = slots_per_request(settings, profile)
    each = slot * (1 + Fraction(drafts, per_request))
    return max(0, int((budget - slot * (1 + drafts)) // each))


def _gpu_class(gpu: GpuMemory, profile: EngineProfile) -> Mapping[str, Any]:
    rows = profile.rows("gpu_class")
    return next(row for row in rows if gpu.total_bytes / GIB >= row["min_total_gib"])


def _total(layers: Sequence[CacheLayer]) -> int:
    total = sum((layer.token_bytes for layer in layers), Fraction(0))
    return -(-total.numerator // total.denominator)


def _item(term: Term, name: str, size: int, source: str) -> MemoryItem:
    return MemoryItem(term=term, name=name, bytes=size, source=source, exact=False)
