"""cache_rows: prefix-cache policies on one workload with one byte budget, side by side."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.memory.layers import keeps_state
from hullspeed.perf.work import StepSeconds, Work
from hullspeed.twin.engine import EngineModel
from hullspeed.twin.player import play
from hullspeed.twin.setup import pair_flops
from hullspeed.twin.workload import Workload
from hullspeed.units import GIB

PAGE_TOKENS = 64


class CachePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One row: where states are saved, what goes first, and how states are stored.

    Attributes:
        cache: As :data:`hullspeed.core.build.CACHES`.
        eviction: ``lru`` or ``density``.
        state_dtype: Of stored states; ``""`` for the model without its recurrent layers: what a
            dense model with the same KV would reach.
    """

    name: str
    cache: str
    eviction: str
    state_dtype: str


HYBRID_POLICIES = (
    CachePolicy(name="KV only (no state needed), lru", cache="segment", eviction="lru",
                state_dtype=""),
    CachePolicy(name="KV only, hash", cache="hash", eviction="lru", state_dtype=""),
    CachePolicy(name="align", cache="align", eviction="lru", state_dtype="fp32"),
    CachePolicy(name="prompt_end", cache="prompt_end", eviction="lru", state_dtype="fp32"),
    CachePolicy(name="lru", cache="lru", eviction="lru", state_dtype="fp32"),
    CachePolicy(name="segment", cache="segment", eviction="density", state_dtype="fp32"),
    CachePolicy(name="align", cache="align", eviction="lru", state_dtype="int8"),
    CachePolicy(name="prompt_end", cache="prompt_end", eviction="lru", state_dtype="int8"),
    CachePolicy(name="lru", cache="lru", eviction="lru", state_dtype="int8"),
    CachePolicy(name="segment", cache="segment", eviction="density", state_dtype="bf16"),
    CachePolicy(name="segment", cache="segment", eviction="density", state_dtype="int8"),
)  # fmt: skip
DENSE_POLICIES = (
    CachePolicy(name="none", cache="none", eviction="lru", state_dtype=""),
    CachePolicy(name="hash", cache="hash", eviction="lru", state_dtype=""),
    CachePolicy(name="lru", cache="lru", eviction="lru", state_dtype=""),
    CachePolicy(name="segment", cache="segment", eviction="density", state_dtype=""),
)


class CacheRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy reached at one budget.

    Attributes:
        hit_rate: Share of prompt tokens that were not computed.
        ttft_p50_s: Of all requests.
        preemptions: Running sequences that had to give their memory back.
        refused: Requests that the budget could never hold.
    """

    policy: str
    state_dtype: str
    state_mib: float
    budget_gib: float
    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    preemptions: int
    refused: int


def policies(arch: ModelArch) -> tuple[CachePolicy, ...]:
    """The rows that make sense for ``arch``."""
    return HYBRID_POLICIES if keeps_state(arch) else DENSE_POLICIES


def cache_engine(
    arch: ModelArch,
    policy: CachePolicy,
    budget_bytes: int,
    *,
    max_running: int = 8,
    step_tokens: int = 8192,
    block_tokens: int = 784,
    kv_dtype: str = "bf16",
) -> EngineModel:
    """An engine whose KV, states and live sequences all come out of ``budget_bytes``.

    Slots are of one size, that of a stored state; a live fp32 state costs more than that when
    states are stored in fewer bits, for as many sequences as run.

    Raises:
        UsageError: if the budget does not hold a page and three states.
    """
    work = Work(arch, kv_dtype=kv_dtype)
    page_bytes = round(arch.kv_bytes(PAGE_TOKENS * 64, kv_dtype) / 64)
    state_bytes = (
        round(arch.state_bytes(policy.state_dtype, arch.dtype)) if policy.state_dtype else 0
    )
    n_pages = (budget_bytes - 3 * state_bytes) // page_bytes
    slots = budget_bytes // state_bytes if state_bytes else 0
    running = max_running if not state_bytes else min(max_running, (slots - 1) // 2)
    if n_pages < 1 or running < 1:
        raise UsageError(
            "the budget holds not even one sequence",
            seen=f"{budget_bytes / GIB:.2f} GiB",
            fix="raise it",
        )
    return EngineModel(
        n_pages=n_pages,
        page_tokens=PAGE_TOKENS,
        page_bytes=page_bytes,
        state_slots=slots,
        state_bytes=state_bytes,
        shared_bytes=budget_bytes if state_bytes else 0,
        max_running=running,
        step_tokens=step_tokens,
        max_context_tokens=arch.max_context_tokens,
        cache=policy.cache,
        eviction=policy.eviction,
        block_tokens=block_tokens,
        flops_per_token=work.body_flops(1),
        flops_per_token_pair=pair_flops(work),
    )


def cache_row(
    arch: ModelArch,
    cost: StepSeconds,
    workload: Workload,
    policy: CachePolicy,
    budget_gib: float,
    *,
    max_running: int = 8,
    block_tokens: int = 784,
) -> CacheRow:
    """Play ``workload`` under one policy and budget."""
    engine = cache_engine(
        arch,
        policy,
        round(budget_gib * GIB),
        max_running=max_running,
        block_tokens=block_tokens,
    )
    played = play(engine, cost, workload)
    ttft = played.ttft_s()
    return CacheRow(
        policy=policy.name,
        state_dtype=policy.state_dtype or "-",
        state_mib=engine.state_bytes / 2**20,
        budget_gib=budget_gib,
        hit_rate=played.hit_rate,
        ttft_p50_s=float(np.percentile(ttft, 50)) if ttft.size else 0.0,
        ttft_p99_s=float(np.percentile(ttft, 99)) if ttft.size else 0.0,
        preemptions=played.preemptions,
        refused=played.refused,
    )


def by_name(arch: ModelArch, names: Iterable[str]) -> tuple[CachePolicy, ...]:
    """The rows of some policies.

    Raises:
        UsageError: for a name that is none of them.
    """
    rows = policies(arch)
    known = {row.name for row in rows} | {row.cache for row in rows}
    for name in names:
        if name not in known:
            raise UsageError(
                "no such cache policy", seen=name, fix=f"use {', '.join(sorted(known))}"
            )
    wanted = set(names)
    return tuple(row for row in rows if not wanted or row.name in wanted or row.cache in wanted)
