"""build: a scheduler with its pools and cache, from plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hullspeed.core.eviction import Density, EvictionPolicy, Lru
from hullspeed.core.hashchain import HashChain
from hullspeed.core.nocache import NoCache
from hullspeed.core.pages import ByteBudget, PagePool, Pool, StatePool, WindowPool
from hullspeed.core.placement import Aligned, Junctions, Placement, PromptEnd
from hullspeed.core.prefix import PrefixCache
from hullspeed.core.scheduler import Scheduler
from hullspeed.core.segments import SegmentTree
from hullspeed.errors import UsageError

CACHES = ("segment", "align", "prompt_end", "lru", "hash", "none")
STATE_BLOCK_TOKENS = 784  # vLLM's unified block for a 27B hybrid (vllm-project/vllm#47430)


class Pools(NamedTuple):
    """Memory and what finds prefixes in it."""

    pages: PagePool
    states: StatePool
    cache: PrefixCache
    placement: Placement
    stored: StatePool | None = None
    windows: WindowPool | None = None


def build_pools(
    *,
    n_pages: int,
    page_tokens: int,
    max_running: int,
    n_state_slots: int = 0,
    n_stored_slots: int = 0,
    n_window_pages: int = 0,
    window_tokens: int = 0,
    page_bytes: int = 1,
    state_bytes: int = 0,
    window_page_bytes: int = 1,
    shared_bytes: int = 0,
    cache: str = "segment",
    eviction: str = "lru",
    block_tokens: int = STATE_BLOCK_TOKENS,
    flops: Callable[[int, int], float] | None = None,
) -> Pools:
    """Fresh pools and a prefix cache over them; see :func:`build_scheduler` for the arguments.

    Raises:
        UsageError: for a name or number that cannot be.
    """
    for name, value in (
        ("n_pages", n_pages), ("page_tokens", page_tokens), ("max_running", max_running),
    ):  # fmt: skip
        if value < 1:
            raise UsageError(f"{name} must be at least 1", seen=value)
    needed = max_running if n_stored_slots else 2 * max_running + 1
    if n_stored_slots and (shared_bytes or not n_state_slots):
        raise UsageError("stored states need state slots and bytes of their own")
    if n_state_slots and n_state_slots < needed:
        raise UsageError(
            "too few state slots",
            seen=n_state_slots,
            fix=f"give at least {needed} for {max_running} running sequences",
        )
    if n_window_pages and (n_state_slots or shared_bytes):
        raise UsageError("a model with windows has no recurrent states, nor bytes shared with them")
    budget = ByteBudget(shared_bytes) if shared_bytes else None
    pages = PagePool(n_pages, page_tokens, budget, page_bytes)
    states = StatePool(n_state_slots, budget, max(state_bytes, 1))
    policy = _policy("lru" if cache == "lru" else eviction, flops)
    stored = StatePool(n_stored_slots) if n_stored_slots else None
    windows = None
    ends: Pool = stored or states
    if n_window_pages:
        ends = windows = WindowPool(n_window_pages, page_tokens, window_tokens)
        state_bytes = window_page_bytes
    prefix = _cache(cache, pages, ends, policy, page_bytes, state_bytes)
    return Pools(pages, states, prefix, _placement(cache, block_tokens), stored, windows)


def build_scheduler(
    *,
    n_pages: int,
    page_tokens: int,
    max_running: int,
    step_tokens: int,
    max_context_tokens: int,
    n_state_slots: int = 0,
    n_stored_slots: int = 0,
    n_window_pages: int = 0,
    window_tokens: int = 0,
    page_bytes: int = 1,
    state_bytes: int = 0,
    window_page_bytes: int = 1,
    shared_bytes: int = 0,
    cache: str = "segment",
    eviction: str = "lru",
    block_tokens: int = STATE_BLOCK_TOKENS,
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
        n_stored_slots: States that the cache keeps in a form of its own (fewer bits); 0: it takes
            slots of the running ones, of which ``max_running`` are enough then.
        n_window_pages: Pages of the layers with a window; 0: they keep pages as the others do. At
            least :func:`hullspeed.memory.windows.least_pages`.
        window_tokens: Tokens that these layers see, the present one included; of several windows
            the largest.
        page_bytes: Bytes of a page over all layers that have it.
        state_bytes: Bytes of a stored state over all layers.
        window_page_bytes: Bytes of a page over all layers with a window.
        shared_bytes: When not 0, pages and states come out of this one budget, and their numbers
            are only upper bounds.
        cache: One of :data:`CACHES`. ``segment``: the segment tree; ``lru``: the same, evicted by
            recency whatever ``eviction`` says; ``align`` and ``prompt_end``: the same tree, states
            saved at every multiple of a block or at the last one of a prompt; ``hash``: chained
            page hashes (models without state or pages of windows); ``none``.
        eviction: ``lru`` or ``density``.
        block_tokens: Of ``align`` and ``prompt_end``.
        flops: ``flops(n_tokens, start)`` of the model, for ``"density"``.

    Raises:
        UsageError: for a name or number that cannot be.
    """
    for name, value in (("step_tokens", step_tokens), ("max_context_tokens", max_context_tokens)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1", seen=value)
    pools = build_pools(
        n_pages=n_pages,
        page_tokens=page_tokens,
        max_running=max_running,
        n_state_slots=n_state_slots,
        n_stored_slots=n_stored_slots,
        n_window_pages=n_window_pages,
        window_tokens=window_tokens,
        page_bytes=page_bytes,
        state_bytes=state_bytes,
        window_page_bytes=window_page_bytes,
        shared_bytes=shared_bytes,
        cache=cache,
        eviction=eviction,
        block_tokens=block_tokens,
        flops=flops,
    )
    return Scheduler(
        pools.pages,
        pools.states,
        pools.cache,
        max_running=max_running,
        step_tokens=step_tokens,
        max_context_tokens=max_context_tokens,
        placement=pools.placement,
        stored=pools.stored,
        windows=pools.windows,
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
    states: Pool,
    policy: EvictionPolicy,
    page_bytes: int,
    state_bytes: int,
) -> PrefixCache:
    if name in ("segment", "align", "prompt_end", "lru"):
        return SegmentTree(pages, states, policy, page_bytes=page_bytes, state_bytes=state_bytes)
    if name == "hash" and not states.size:
        return HashChain(pages, policy, page_bytes=page_bytes)
    if name == "none":
        return NoCache()
    raise UsageError(
        "unknown prefix cache",
        seen=name,
        fix=f"use one of {', '.join(CACHES)} (hash: for models without state or windows)",
    )


def _placement(name: str, block_tokens: int) -> Placement:
    if name == "align":
        return Aligned(block_tokens)
    if name == "prompt_end":
        return PromptEnd(block_tokens)
    return Junctions()
