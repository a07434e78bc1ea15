"""The embedded engine on a CPU: weights, KV pages and Python in one address space."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hullspeed.arch.model import ModelArch
from hullspeed.arch.tensors import TensorSpec
from hullspeed.errors import UsageError
from hullspeed.memory.after_load import page_pool
from hullspeed.memory.budget import (
    EngineSettings,
    GpuMemory,
    MemoryBudget,
    MemoryItem,
    MemoryStack,
    Term,
    WeightBytes,
)
from hullspeed.memory.held import held_bytes
from hullspeed.memory.pages import PagePool
from hullspeed.memory.profile import EngineProfile, engine_profile
from hullspeed.memory.windows import PageSplit, split_pages, window_apart
from hullspeed.units import MIB

Z90 = 1.645


_KV_FORMATS = {
    "fp32": "fp32", "fp16": "fp16", "bf16": "bf16",
    "int8": "int8_per_token_head", "fp8": "fp8_per_token_head",
}  # fmt: skip


def kv_format(kv_dtype: str | None) -> str:
    """The number format of the engine's ``kv_dtype`` (fp32 unless given), as sizes know it: int8
    and fp8 have a scale for each token and head.

    Raises:
        UsageError: for a type that the engine does not have.
    """
    name = "fp32" if kv_dtype in (None, "auto") else str(kv_dtype)
    if name not in _KV_FORMATS:
        raise UsageError(
            "the embedded engine has no such KV cache type",
            seen=name,
            fix=f"use one of {', '.join(_KV_FORMATS)}",
        )
    return _KV_FORMATS[name]


def held_weights(arch: ModelArch, weight_dtype: str = "fp16") -> WeightBytes:
    """Bytes of the weights as the engine holds them, whatever the file's format: matrices in
    ``weight_dtype`` (as :func:`hullspeed.memory.held.held_dtype` gives it), vectors in fp32; a tied
    output head is a second, packed copy. Vision parts are not loaded, the MTP layer for drafts.

    Raises:
        UsageError: for a type in which no weights are held.
    """

    def total(tensors: Iterable[TensorSpec]) -> int:
        return sum(held_bytes(arch, tensor, weight_dtype) for tensor in tensors)

    return WeightBytes(
        decoder=total(arch.tensors(extras=False)),
        mtp=sum(total(extra.tensors) for extra in arch.extras if extra.name == "mtp"),
        source=f"parameters held as {weight_dtype}",
    )


@dataclass(frozen=True, slots=True)
class HullspeedAllocator:
    """Implements :class:`hullspeed.memory.budget.Allocator`; the "GPU" is the machine's memory."""

    def profile(self, settings: EngineSettings) -> EngineProfile:
        """The engine's own constants."""
        return engine_profile("hullspeed", settings.version)

    def stack(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, weights: WeightBytes
    ) -> MemoryStack:
        """Weights, process, activations, then half of what is free, at most what the running
        sequences can use.
        """
        if settings.tp != 1 or settings.pp != 1:
            raise UsageError("the embedded engine runs on one machine", seen=settings.tp)
        number = self.profile(settings).number
        chunk = settings.max_num_batched_tokens or int(number("default_batched_tokens"))
        width = max(getattr(layer.mlp, "intermediate", 0) for layer in arch.layers)
        work = round(number("activation_bytes_per_width") * width * chunk) + 4 * arch.vocab * (
            settings.max_num_seqs or int(number("default_num_seqs"))
        )
        process = round(number("process_mib") * MIB)
        spread = round(Z90 * number("runtime_sigma_mib") * MIB)
        loaded = weights.decoder + (weights.mtp if settings.draft_tokens else 0)
        free = gpu.total_bytes - gpu.baseline_bytes - loaded - work - process
        pool = self._pool_bytes(arch, gpu, settings, free)
        items = (
            MemoryItem(term=Term.WEIGHTS, name="weights", bytes=loaded, source=weights.source),
            MemoryItem(
                term=Term.RUNTIME,
                name="process",
                bytes=process,
                source="Python, torch, numba and the API process, resident",
                exact=False,
                interval=(process - spread, process + spread),
            ),
            MemoryItem(
                term=Term.RUNTIME,
                name="activations and logits",
                bytes=work,
                source=f"{chunk} tokens x widest MLP {width} in fp32, logits of running sequences",
                exact=False,
            ),
            MemoryItem(
                term=Term.SEQUENCE_STATE,
                name="KV pages and states",
                bytes=pool,
                source="half of what is free, at most what the running sequences can use",
                exact=settings.kv_cache_bytes is not None,
            ),
            MemoryItem(
                term=Term.HEADROOM,
                name="left to the system",
                bytes=free - pool,
                source="the rest",
                exact=False,
            ),
        )
        return MemoryStack(engine="hullspeed", total_bytes=gpu.total_bytes, items=items)

    def _pool_bytes(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, free: int
    ) -> int:
        if settings.kv_cache_bytes is not None:
            return settings.kv_cache_bytes
        if free <= 0:
            return free
        share = settings.memory_fraction or float(self.profile(settings).rule("default_fraction"))
        pool = self.pool(arch, gpu, settings, math.floor(free * share))
        split = self.window_split(arch, settings, pool)
        if split is not None:
            windows = split.n_window_pages * pool.bytes_per_window_page
            return split.n_pages * pool.bytes_per_block + windows
        usable = pool.asked_num_seqs * pool.bytes_per_request(pool.max_model_len)
        return min(pool.pool_bytes, usable)

    def window_split(
        self, arch: ModelArch, settings: EngineSettings, pool: PagePool
    ) -> PageSplit | None:
        """Pages that the engine makes of the pool, of a model whose windows have pages of their
        own; ``None`` of others.
        """
        step_tokens = settings.max_num_batched_tokens or int(
            self.profile(settings).number("default_batched_tokens")
        )
        step_tokens = max(step_tokens, pool.asked_num_seqs)
        context_tokens = pool.max_model_len
        window = window_apart(
            arch,
            page_tokens=pool.page_tokens,
            step_tokens=step_tokens,
            context_tokens=context_tokens,
        )
        if not window:
            return None
        return split_pages(
            pool.pool_bytes,
            page_bytes=pool.bytes_per_block,
            window_page_bytes=pool.bytes_per_window_page,
            window_tokens=window,
            page_tokens=pool.page_tokens,
            step_tokens=step_tokens,
            context_tokens=context_tokens,
            max_running=pool.asked_num_seqs,
            given=settings.kv_cache_bytes is not None,
        )

    def pool(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, pool_bytes: int
    ) -> PagePool:
        """Pages of 64 tokens in fp32 unless ``kv_dtype`` says otherwise."""
        settings = replace(settings, kv_dtype=kv_format(settings.kv_dtype))
        pool = page_pool(arch, settings, self.profile(settings), pool_bytes)
        # Hits are exact to the token, where a state is or anywhere: a page that is cut is copied.
        return replace(pool, slides=True, hit_tokens=pool.hit_tokens if pool.state_bytes else 1)

    def knobs(self, budget: MemoryBudget) -> dict[str, str]:
        """``hullspeed serve`` takes bytes."""
        return {
            "--kv-budget": str(budget.pool_bytes),
            "--max-running": str(budget.max_num_seqs),
            "--max-context": str(budget.max_model_len),
        }
