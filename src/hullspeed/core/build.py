"""build: a scheduler with its pools and cache, from plain numbers."""

from __future__ import annotations

from collections.abc import Callable

from hullspeed.core.eviction import Density, EvictionPolicy, Lru
from hullspeed.core.hashchain import HashChain
from hullspeed.core.nocache import NoCache
from hullspeed.core.pages import PagePool, StatePool
from hullspeed.core.prefix import PrefixCache
from hullspeed.core.scheduler import Scheduler
from hullspeed.core.segments import SegmentTree
from hullspeed.errors import UsageError


def build_scheduler(
    *,
    n_pages: int,
    page_tokens: int,
    max_running: int,
    step_tokens: int,
    max_context_tokens: int,
    n_state_slots: int = 0,
    page_bytes: int = 1,
    state_bytes: int = 0,
    cache: str = "segment",
    eviction: str = "lru",
    flops: Callable[[int, int], float] | None = None,
) -> Scheduler:
    """A scheduler over fresh pools.

    Args:
        n_pages: Pages of KV, ``page_tokens`` tokens each.
        page_tokens: Tokens of a page.
        max_running: Sequences that may run at once.
        step_tokens: Token budget of a step.
        max_context_tokens: Longest sequence, prompt and output.
        n_state_slots: 0 for models without recurrent state; else at least
            ``2 * max_running + 1``, so that every running sequence can read one slot and write one.
        page_bytes: Bytes of a page over all layers.
        state_bytes: Bytes of a stored state over all layers.
        cache: ``"segment"``, ``"hash"`` or ``"none"``.
        eviction: ``"lru"`` or ``"density"``.
        flops: ``flops(n_tokens, start)`` of the model, for ``"density"``.

    Raises:
        UsageError: for a name or number that cannot be.
    """
    for name, value in (
        ("n_pages", n_pages), ("page_tokens", page_tokens), ("max_running", max_running),
        ("step_tokens", step_tokens), ("max_context_tokens", max_context_tokens),
    ):  # fmt: skip
        if value < 1:
            raise UsageError(f"{name} must be at least 1", seen=value)
    if n_state_slots and n_state_slots < 2 * max_running + 1:
        raise UsageError(
            "too few state slots",
            seen=n_state_slots,
            fix=f"give at least {2 * max_running + 1} for {max_running} running sequences",
        )
    pages, states = PagePool(n_pages, page_tokens), StatePool(n_state_slots)
    policy = _policy(eviction, flops)
    prefix = _cache(cache, pages, states, policy, page_bytes, state_bytes)
    return Scheduler(
        pages,
        states,
        prefix,
        max_running=max_running,
        step_tokens=step_tokens,
        max_context_tokens=max_context_tokens,
    )


def _policy(name: str, flops: Callable[[int, int], float] | None) -> EvictionPolicy:
    if name == "lru":
        return Lru()
    if name == "density" and flops is not None:
        return Density(flops)
    raise UsageError("unknown eviction policy", seen=name, fix="use lru, or density with flops")


def _cache(
    name: str,
    pages: PagePool,
    states: StatePool,
    policy: EvictionPolicy,
    page_bytes: int,
    state_bytes: int,
) -> PrefixCache:
    if name == "segment":
        return SegmentTree(pages, states, policy, page_bytes=page_bytes, state_bytes=state_bytes)
    if name == "hash" and not states.size:
        return HashChain(pages, policy, page_bytes=page_bytes)
    if name == "none":
        return NoCache()
    raise UsageError(
        "unknown prefix cache", seen=name, fix="use segment, none, or hash (models without state)"
    )
