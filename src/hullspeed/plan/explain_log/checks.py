"""Do the numbers of a log agree with each other?"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hullspeed.plan.explain_log.facts import Facts

ROUNDING_GIB = 0.02


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One identity between printed numbers.

    Attributes:
        holds: Whether it does, within the rounding of the printed figures.
        says: What follows from it.
    """

    name: str
    holds: bool
    evidence: str
    says: str


def consistency(facts: Facts) -> list[Check]:
    """All identities that the log gives numbers for."""
    return [*_budget(facts), *_requested(facts), *_ratio(facts), *_graphs(facts)]


def _budget(facts: Facts) -> Iterator[Check]:
    needed = (facts.requested_gib, facts.consumed_gib, facts.peak_gib, facts.kv_gib)
    if None in needed:
        return
    requested, consumed, peak, pool = (float(value or 0) for value in needed)
    left = requested - consumed - peak
    estimate = facts.graph_estimate_gib or 0.0
    # From 0.28 on some builds print the peak without the graph estimate.
    with_estimate = abs(left - pool) <= ROUNDING_GIB
    without = abs(left - estimate - pool) <= ROUNDING_GIB
    yield Check(
        name="pool = requested - consumed - peak",
        holds=with_estimate or without,
        evidence=f"{requested:.2f} - {consumed:.2f} - {peak:.2f} = {left:.2f} GiB, pool {pool:.2f}",
        says="the pool is the rest of the budget"
        if with_estimate or without
        else "the pool was set by hand or by another run: --kv-cache-memory, or several starts "
        "in one log",
    )


def _requested(facts: Facts) -> Iterator[Check]:
    if None in (facts.utilization, facts.total_gib, facts.requested_gib):
        return
    product = (facts.utilization or 0) * (facts.total_gib or 0)
    requested = facts.requested_gib or 0
    yield Check(
        name="requested = utilization x total",
        holds=abs(product - requested) <= 0.05,
        evidence=f"{facts.utilization} x {facts.total_gib} = {product:.2f} GiB, "
        f"printed {requested:.2f}",
        says="utilization is a share of the whole GPU, weights included",
    )


def _ratio(facts: Facts) -> Iterator[Check]:
    if not (facts.tokens and facts.concurrency and facts.concurrency_tokens):
        return
    ratio = facts.tokens / facts.concurrency_tokens
    agrees = abs(ratio - facts.concurrency) <= 0.0051
    yield Check(
        name="tokens = concurrency x length",
        holds=agrees,
        evidence=f"{facts.tokens:,} / {facts.concurrency_tokens:,} = {ratio:.2f}, "
        f"printed {facts.concurrency:.2f}x",
        says="tokens are derived from the concurrency"
        if agrees
        else "the token count is that of one layer group (vLLM before 0.21): on a hybrid model "
        "trust the concurrency, not the tokens",
    )


def _graphs(facts: Facts) -> Iterator[Check]:
    if facts.graph_gib is None or facts.graph_estimate_gib is None:
        return
    over = facts.graph_estimate_gib - facts.graph_gib
    close = over <= max(0.3, 0.5 * facts.graph_gib)
    yield Check(
        name="graph estimate is near the actual pool",
        holds=close,
        evidence=f"{facts.graph_estimate_gib:.2f} GiB estimated, {facts.graph_gib:.2f} actual",
        says="nothing to gain here"
        if close
        else f"{over:.2f} GiB of pool are lost to the estimate: set --kv-cache-memory-bytes, or "
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0",
    )
