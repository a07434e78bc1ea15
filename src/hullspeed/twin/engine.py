"""EngineModel: the numbers and policies of an engine that scheduling depends on."""

from __future__ import annotations

import math

import msgspec

from hullspeed.core.build import build_pools
from hullspeed.twin.scheduler import Policy, TwinScheduler


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """One engine on one model and machine, ready to be simulated.

    Attributes:
        n_pages: Pages of KV that sequences and cache share.
        page_tokens: Tokens of a page.
        page_bytes: Of a page over all layers and ranks.
        state_slots: Slots of recurrent state; 0 for a model without.
        state_bytes: Of a stored state over all layers and ranks.
        stored_slots: States that the cache keeps in a form of its own (fewer bits); 0: it takes
            slots of the running ones.
        n_window_pages: Pages of layers with a window; 0: they keep pages as the others do.
        window_tokens: What these layers see.
        window_page_bytes: Of such a page over all layers and ranks.
        shared_bytes: When not 0, pages and states come out of this one budget, and ``n_pages`` and
            ``state_slots`` only bound their numbers.
        max_running: Sequences at once.
        step_tokens: Token budget of a step.
        cache: Name of a prefix cache; see :func:`hullspeed.core.build.build_pools`.
        eviction: ``lru`` or ``density``.
        block_tokens: Of the cache policies that save states at multiples of a block.
        flops_per_token: Of the model's linear layers, for ``density``.
        flops_per_token_pair: Of its attention, for each earlier token.
        request_s: From a request's bytes to its arrival at the scheduler.
        request_work_s: Of that, how long it keeps a core from the next one and from the steps.
        own_core: The API process has a core that no step uses.
        stream_token_s: Per token, work of the API process beside the engine.
        interrupted_every_s, interrupted_s: In so much time of computing, other processes take so
            much.
    """

    n_pages: int
    page_tokens: int
    max_running: int
    step_tokens: int
    max_context_tokens: int
    page_bytes: int = 1
    state_slots: int = 0
    state_bytes: int = 0
    stored_slots: int = 0
    n_window_pages: int = 0
    window_tokens: int = 0
    window_page_bytes: int = 1
    shared_bytes: int = 0
    cache: str = "segment"
    eviction: str = "lru"
    block_tokens: int = 784
    flops_per_token: float = 1.0
    flops_per_token_pair: float = 0.0
    policy: Policy = Policy()
    request_s: float = 0.0
    request_work_s: float = 0.0
    own_core: bool = False
    stream_token_s: float = 0.0
    interrupted_every_s: float = math.inf
    interrupted_s: float = 0.0

    def scheduler(self) -> TwinScheduler:
        """A fresh scheduler with empty memory.

        Raises:
            UsageError: for a name or number that cannot be.
        """
        pools = build_pools(
            n_pages=self.n_pages,
            page_tokens=self.page_tokens,
            max_running=self.max_running,
            n_state_slots=self.state_slots,
            n_stored_slots=self.stored_slots,
            n_window_pages=self.n_window_pages,
            window_tokens=self.window_tokens,
            page_bytes=self.page_bytes,
            state_bytes=self.state_bytes,
            window_page_bytes=self.window_page_bytes,
            shared_bytes=self.shared_bytes,
            cache=self.cache,
            eviction=self.eviction,
            block_tokens=self.block_tokens,
            flops=self.flops,
        )
        return TwinScheduler(
            pools.pages,
            pools.states,
            pools.cache,
            max_running=self.max_running,
            step_tokens=self.step_tokens,
            max_context_tokens=self.max_context_tokens,
            placement=pools.placement,
            stored=pools.stored,
            windows=pools.windows,
            policy=self.policy,
        )

    def flops(self, n_tokens: int, start: int) -> float:
        """FLOPs of computing ``n_tokens`` tokens after ``start``."""
        pairs = n_tokens * (start + (n_tokens + 1) / 2)
        return self.flops_per_token * n_tokens + self.flops_per_token_pair * pairs
