"""Findings of a plan: what does not fit, and what the engine's own defaults would meet."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from hullspeed.findings import Finding, Severity
from hullspeed.memory.allocators import allocator, of_default_seqs
from hullspeed.memory.budget import MemoryStack, Term
from hullspeed.plan.capacity import Capacity
from hullspeed.plan.case import Case
from hullspeed.plan.speed import Speed
from hullspeed.plan.workload import Workload
from hullspeed.units import format_bytes, format_tokens


def of_defaults(asked: Case, known: list[Finding]) -> list[Finding]:
    """What the engine's own max_num_seqs would meet, as a warning: the usual first crash. Judged
    at the lower end of the pool's interval, for a start that may fail is not one to rely on.
    """
    settings = asked.settings
    if settings.max_num_seqs is not None or settings.engine == "hullspeed":
        return []
    settings = replace(
        settings, max_model_len=settings.max_model_len or asked.workload.context_tokens
    )
    engine, memory, model = allocator(settings.engine), asked.memory(), asked.model
    stack = engine.stack(model.arch, memory, settings, model.weights)
    pool = engine.pool(model.arch, memory, settings, stack.pool_interval[0])
    codes = {finding.code for finding in known}
    return [
        msgspec.structs.replace(
            of_default_seqs(finding), fix="start it with the flags of this plan"
        )
        for finding in (*stack.findings, *pool.findings)
        if finding.severity is Severity.ERROR and finding.code not in codes
    ]


def of_capacity(workload: Workload, stack: MemoryStack, capacity: Capacity) -> list[Finding]:
    """What of the workload does not fit, or only perhaps."""
    found = []
    if capacity.longest_served < 1:
        found.append(
            Finding(
                code="PLAN001",
                severity=Severity.ERROR,
                what=f"not one request of {format_tokens(workload.context_tokens)} tokens fits",
                why="the engine refuses to start, or the first long request never runs",
                evidence={
                    "pool": format_bytes(capacity.pool_bytes),
                    "weights": format_bytes(stack.bytes_of(Term.WEIGHTS)),
                },
                fix=longest_context(capacity),
            )
        )
    elif capacity.served < workload.concurrency:
        found.append(
            Finding(
                code="PLAN002",
                severity=Severity.ERROR,
                what=f"{capacity.served} of {workload.concurrency} requests of "
                f"{format_tokens(workload.request_tokens)} tokens run at once; the others queue",
                why="queued requests wait for whole answers of others: TTFT grows by orders",
                evidence={"pool": format_bytes(capacity.pool_bytes)},
                fix="see the remedies, or admit fewer at a time",
            )
        )
    elif capacity.served_low < workload.concurrency:
        found.append(
            Finding(
                code="PLAN003",
                severity=Severity.WARNING,
                what=f"at the lower end of the pool's interval only {capacity.served_low} of "
                f"{workload.concurrency} requests run at once",
                why="activations and graphs are measured elsewhere, not derived",
                evidence={"pool": f"{format_bytes(capacity.pool_low_bytes)} to "
                          f"{format_bytes(capacity.pool_high_bytes)}"},
                fix="read the pool in the start-up log; leave a margin",
            )
        )  # fmt: skip
    return found


def longest_context(capacity: Capacity) -> str:
    """The longest context that fits, as a sentence."""
    if not capacity.by_concurrency:  # a sweep without tables
        return "a shorter context or a larger pool is needed"
    longest = next((row.max_context_tokens for row in capacity.by_concurrency), 0)
    if longest:
        return f"the longest context that fits is {format_tokens(longest)} tokens"
    return "no context fits: smaller weights, more GPUs or a larger one"


def rate_too_high(workload: Workload, speed: Speed, most_in_flight: int | None) -> Finding:
    """The rate is more than is completed: with what memory runs at once, or, where
    ``most_in_flight`` were tried, with any number.
    """
    why = (
        f"the {speed.running} requests that run at once complete {speed.requests_per_s:.3g} of them"
    )
    if most_in_flight is not None:
        why += f"; even {most_in_flight:,} would not, memory left aside"
    return Finding(
        code="PLAN004",
        severity=Severity.ERROR,
        what=f"{workload.rate:g} requests a second are more than this target completes: the queue "
        "grows for as long as they come, and TTFT with it",
        why=why,
        evidence={"completed": f"{speed.requests_per_s:.3g}/s"},
        fix="more replicas, or see the remedies",
    )
