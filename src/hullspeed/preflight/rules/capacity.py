"""Weights, pool and blocks against the GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator

from hullspeed.findings import Finding
from hullspeed.preflight.case import Case, below
from hullspeed.preflight.codes import found
from hullspeed.units import GIB, format_bytes, format_tokens


def weights(case: Case) -> Iterator[Finding]:
    """PF050: weights above the engine's share of the GPU."""
    if not case.used_gpus:
        return
    need = case.ask.weight_bytes_per_gpu or case.stack.model.size_bytes // case.ask.gpus
    smallest = min(case.used_gpus, key=lambda gpu: usable_bytes(case, gpu.total_bytes))
    usable = usable_bytes(case, smallest.total_bytes)
    if need > usable:
        yield found(
            "PF050", weights=format_bytes(need), usable=format_bytes(usable), gpu=smallest.name,
            model=case.ask.model,
        )  # fmt: skip


def blocks(case: Case) -> Iterator[Finding]:
    """PF051: more sequences than a hybrid's pool has blocks."""
    pool = case.ask.pool_blocks
    if pool is None or case.ask.engine != "vllm" or not case.stack.model.hybrid:
        return
    asked = case.ask.max_num_seqs or default_max_num_seqs(case)
    if asked > pool:
        yield found("PF051", max_num_seqs=asked, blocks=pool)


def one_request(case: Case) -> Iterator[Finding]:
    """PF052: a pool that cannot hold the longest request."""
    pool = case.ask.pool_tokens
    asked = case.ask.context_tokens or case.stack.model.max_context_tokens
    if pool is not None and asked and asked > pool:
        yield found("PF052", context=format_tokens(asked), pool=pool)


def free_at_start(case: Case) -> Iterator[Finding]:
    """PF053: vLLM asks for its share of the total before it loads."""
    if case.ask.engine != "vllm":
        return
    share = memory_share(case)
    for gpu in case.used_gpus:
        requested = int(gpu.total_bytes * share)
        if gpu.free_bytes < requested:
            possible = int(gpu.free_bytes / gpu.total_bytes * 100) / 100
            yield found(
                "PF053", share=share, total=format_bytes(gpu.total_bytes), index=gpu.index,
                requested=format_bytes(requested), free=format_bytes(gpu.free_bytes),
                possible=f"{possible:.2f}", **case.named,
            )  # fmt: skip
            return


def planned(case: Case) -> Iterator[Finding]:
    """PF067 and PF068: what starts by the rules and may still run out of memory.

    Only the memory plan's warnings that no other rule here covers.
    """
    for finding in case.ask.plan_findings:
        code = {"MEM005": "PF067", "MEM008": "PF068"}.get(finding.code)
        if code is not None:
            yield found(code, remedy=finding.fix, **finding.evidence)


def memory_share(case: Case) -> float:
    """The share of a GPU that the engine takes: as asked, or its default.

    Source: vLLM 0.92 from 0.20, 0.90 before; TensorRT-LLM 0.9 (of what is free).
    """
    if case.ask.memory_share is not None:
        return case.ask.memory_share
    if case.ask.engine == "vllm":
        version = case.engine_version
        return 0.90 if version and below(version, "0.20.0") else 0.92
    return 0.9


def usable_bytes(case: Case, total_bytes: int) -> int:
    """Memory of a GPU that the engine may take; a MIG instance is as large as its slice."""
    slices = [size for gpu in case.used_gpus for size in gpu.mig_slices if gpu.mig]
    return int(min([total_bytes, *slices]) * memory_share(case))


def default_max_num_seqs(case: Case) -> int:
    """The default of vLLM for this GPU: 1024 from 70 GiB on except A100, else 256.

    Source: engine/arg_utils.py of 0.33.0.
    """
    large = all(gpu.total_bytes >= 70 * GIB and "A100" not in gpu.name for gpu in case.used_gpus)
    return 1024 if case.used_gpus and large else 256


RULES = (weights, blocks, one_request, free_at_start, planned)
