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
        plan = self.pool(arch, gpu, settings, 0)
        usable = plan.asked_num_seqs * plan.bytes_per_request(plan.max_model_len)
        return min(math.floor(free * share), usable)

    def pool(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, pool_bytes: int
    ) -> PagePool:
        """Pages of 64 tokens in fp32 unless ``kv_dtype`` says otherwise."""
        settings = replace(settings, kv_dtype=kv_format(settings.kv_dtype))
        pool = page_pool(arch, settings, self.profile(settings), pool_bytes)
        # Models without recurrent state are hit at any token: the last page is copied.
        return pool if pool.state_bytes else replace(pool, hit_tokens=1)

    def knobs(self, budget: MemoryBudget) -> dict[str, str]:
        """``hullspeed serve`` takes bytes."""
        return {
            "--kv-budget": str(budget.pool_bytes),
            "--max-running": str(budget.max_num_seqs),
            "--max-context": str(budget.max_model_len),
        }
