"""What the deployment of a log will really serve, and which settings would serve more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.memory.drafters import with_dflash
from hullspeed.memory.layers import cache_layers
from hullspeed.memory.vllm_groups import StateMode, plan_layout
from hullspeed.memory.vllm_pool import LARGE_MAMBA_BLOCK_TOKENS, VllmPool
from hullspeed.plan.explain_log.facts import Facts
from hullspeed.plan.explain_log.infer import Candidate
from hullspeed.units import GIB

LENGTHS = (8_192, 32_768, 131_072, 262_144)
SAFE_UTILIZATION = 0.95
VISION_GIB = 1.75  # 0.86 GiB of weights and 0.9 GiB of profile peak (27-layer tower)
WORTHWHILE_GIB = 0.1


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one length.

    Attributes:
        by_the_log: What the engine's own formula says.
        really: Whole requests at once without preemption.
        bytes_per_request: Blocks that one of them holds, per rank.
    """

    context_tokens: int
    by_the_log: float
    really: int
    bytes_per_request: int


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that would serve more, with its effect.

    Attributes:
        really: Whole requests at once, by length, after the change.
        caveat: What it costs.
    """

    change: str
    flag: str
    really: dict[int, int]
    gain: float
    caveat: str


def lengths_for(facts: Facts) -> list[int]:
    """Lengths to report: the usual ones below the longest request, and that."""
    longest = facts.max_model_len or facts.concurrency_tokens
    if longest is None:
        return list(LENGTHS[:2])
    return sorted({length for length in LENGTHS if length < longest} | {longest})


def served(pool: VllmPool, lengths: list[int]) -> list[Served]:
    """The table for one pool."""
    return [
        Served(
            context_tokens=length,
            by_the_log=round(pool.concurrency(length), 2),
            really=pool.served_concurrency(length),
            bytes_per_request=pool.bytes_per_request(length),
        )
        for length in lengths
    ]


def remedies(arch: ModelArch, facts: Facts, candidate: Candidate) -> list[Remedy]:
    """Changes that serve more, best first."""
    lengths = lengths_for(facts)
    before = {n: candidate.pool.served_concurrency(n) for n in lengths}
    found = []
    for change, flag, caveat, pool in _changes(arch, facts, candidate):
        after = {n: pool.served_concurrency(n) for n in lengths}
        ratios = [pool.concurrency(n) / max(candidate.pool.concurrency(n), 1e-9) for n in lengths]
        better = [after[n] > before[n] for n in lengths]
        if any(better) or max(ratios) > 1.02:
            gain = (
                max(ratios)
                if not any(better)
                else max(after[n] / max(before[n], 1) for n in lengths)
            )
            found.append(
                Remedy(change=change, flag=flag, really=after, gain=round(gain, 2), caveat=caveat)
            )
    return sorted(found, key=lambda remedy: -remedy.gain)


def _with(
    arch: ModelArch,
    facts: Facts,
    candidate: Candidate,
    *,
    kv_dtype: str | None = None,
    state_dtype: str | None = None,
    draft_tokens: int | None = None,
    mode: str | None = None,
    extra_gib: float = 0.0,
) -> VllmPool:
    """The candidate's pool re-planned with a change."""
    drafts = candidate.draft_tokens if draft_tokens is None else draft_tokens
    if facts.draft_model and drafts:
        arch = with_dflash(arch)
    layout = plan_layout(
        cache_layers(
            arch,
            kv_dtype=kv_dtype or candidate.kv_dtype,
            state_dtype=state_dtype or candidate.state_dtype or "fp32",
            tp=candidate.tp,
            draft_tokens=drafts,
        ),
        state_mode=StateMode(mode or candidate.state_mode or "none"),
        draft_tokens=drafts,
        batched_tokens=candidate.pool.layout.batched_tokens,
        gdn_prefill=candidate.gdn_prefill,
        block_tokens=facts.block_size_flag,
    )
    size = candidate.pool.pool_bytes if facts.kv_gib is None else round(facts.kv_gib * GIB)
    return replace(candidate.pool, layout=layout, pool_bytes=size + round(extra_gib * GIB))


_Change = tuple[str, str, str, VllmPool]


def _changes(arch: ModelArch, facts: Facts, candidate: Candidate) -> Iterator[_Change]:
    has_state = candidate.pool.layout.has_state
    if not candidate.kv_dtype.startswith("fp8"):
        yield (
            "FP8 keys and values",
            "--kv-cache-dtype fp8",
            "measure quality and speed at depth; helps long requests, not short ones",
            _with(arch, facts, candidate, kv_dtype="fp8"),
        )
    if has_state and candidate.state_dtype == "fp32":
        yield (
            "16-bit recurrent state",
            "--mamba-ssm-cache-dtype bfloat16",
            "the checkpoint asks for fp32: verify answers",
            _with(arch, facts, candidate, state_dtype="bf16"),
        )
    if candidate.draft_tokens:
        yield (
            "no speculative decoding",
            "drop --speculative-config",
            "fewer tokens a second for each request at low load",
            _with(arch, facts, candidate, draft_tokens=0),
        )
    if has_state and candidate.state_mode == "align":
        yield (
            "no prefix caching",
            "--no-enable-prefix-caching",
            "shared prefixes are computed again",
            _with(arch, facts, candidate, mode="none"),
        )
        if not facts.mamba_block_flag:
            pool = replace(candidate.pool, mamba_block_tokens=LARGE_MAMBA_BLOCK_TOKENS)
            yield (
                "a larger block of recurrent state",
                f"--mamba-block-size {LARGE_MAMBA_BLOCK_TOKENS}",
                "prefix hits become coarser",
                pool,
            )
    yield from _memory_changes(arch, facts, candidate)


def _memory_changes(arch: ModelArch, facts: Facts, candidate: Candidate) -> Iterator[_Change]:
    if facts.graph_gib is not None and facts.graph_estimate_gib is not None:
        lost = facts.graph_estimate_gib - facts.graph_gib
        if lost > WORTHWHILE_GIB and facts.kv_gib is not None:
            target = round((facts.kv_gib + lost) * GIB)
            yield (
                "graphs charged as they are",
                f"--kv-cache-memory-bytes {target}",
                "the size is then fixed for this GPU and these settings",
                _with(arch, facts, candidate, extra_gib=lost),
            )
    if facts.total_gib and facts.utilization and facts.utilization < SAFE_UTILIZATION:
        more = (SAFE_UTILIZATION - facts.utilization) * facts.total_gib
        hybrid = candidate.pool.layout.has_state
        yield (
            f"{SAFE_UTILIZATION:.0%} of the GPU",
            f"--gpu-memory-utilization {SAFE_UTILIZATION}",
            "less room outside for prefill scratch: lower --max-num-batched-tokens with it"
            if hybrid
            else "less room for spikes outside the profile",
            _with(arch, facts, candidate, extra_gib=more),
        )
    vision = any(extra.name == "vision" for extra in arch.extras)
    if vision and not facts.text_only:
        yield (
            "text only",
            "--language-model-only",
            "images are refused",
            _with(arch, facts, candidate, extra_gib=VISION_GIB / candidate.tp),
        )
