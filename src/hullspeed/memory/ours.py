"""The embedded engine on a CPU: weights, KV pages and Python in one address space."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hullspeed.arch.model import ModelArch
from hullspeed.arch.tensors import TensorSpec
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
from hullspeed.memory.held import held_bytes
from hullspeed.memory.layers import normal_dtype
from hullspeed.memory.ours_pool import RoomPool
from hullspeed.memory.ours_room import RoomRules, sizes_of
from hullspeed.memory.profile import EngineProfile, engine_profile
from hullspeed.memory.windows import STATE_SHARE
from hullspeed.units import MIB

Z90 = 1.645


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
        offered = self._offered_bytes(settings, free)
        pool = self.pool(arch, gpu, settings, offered).pool_bytes
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
        return MemoryStack(
            engine="hullspeed",
            total_bytes=gpu.total_bytes,
            items=items,
            findings=given_pool_findings(settings, gpu, items, in_use=gpu.baseline_bytes)
            + self.profile(settings).findings(),
            offered_bytes=offered,
        )

    def _offered_bytes(self, settings: EngineSettings, free: int) -> int:
        if settings.kv_cache_bytes is not None:
            return settings.kv_cache_bytes
        share = settings.memory_fraction or float(self.profile(settings).rule("default_fraction"))
        return math.floor(free * share) if free > 0 else free

    def rules(self, settings: EngineSettings) -> RoomRules:
        """The engine's configuration, as far as memory goes."""
        profile = self.profile(settings)
        own_states = settings.state_dtype in (None, "auto")
        return RoomRules(
            page_tokens=settings.block_tokens or int(profile.rule("page_tokens")),
            max_running=settings.max_num_seqs or int(profile.number("default_num_seqs")),
            step_tokens=settings.max_num_batched_tokens
            or int(profile.number("default_batched_tokens")),
            kv_dtype=settings.kv_dtype or "fp32",
            state_store="fp32" if own_states else normal_dtype(str(settings.state_dtype)),
            state_share=settings.state_share or STATE_SHARE,
            given=settings.kv_cache_bytes is not None,
            windows_apart=settings.cache != "hash",
            draft=settings.draft_tokens > 0,
        )

    def pool(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, pool_bytes: int
    ) -> RoomPool:
        """Pages of 64 tokens in fp32 unless ``kv_dtype`` says otherwise."""
        rules = self.rules(settings)
        sizes, context_tokens = sizes_of(arch, rules), settings.max_model_len
        return RoomPool.of(sizes, rules, context_tokens or arch.max_context_tokens, pool_bytes)

    def knobs(self, budget: MemoryBudget) -> dict[str, str]:
        """``hullspeed serve`` takes bytes."""
        return {
            "--kv-budget": str(budget.pool_bytes),
            "--max-running": str(budget.max_num_seqs),
            "--max-context": str(budget.max_model_len),
        }
