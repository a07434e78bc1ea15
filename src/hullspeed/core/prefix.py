"""PrefixCache: which prefixes are in memory; the contract of segment tree and hash chain."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from hullspeed.core.request import Sequence

EndState = tuple[int, ...]
"""Pieces of a pool from which a sequence can go on at some place; each has an owner for it."""

CacheNode = Any
"""A cache's own handle on a place in it; opaque to everybody else."""


@dataclass(slots=True)
class Match:
    """The longest usable prefix found.

    Attributes:
        n_tokens: Tokens that need not be computed.
        pages: Pages that hold them, one for each started page.
        shared_pages: How many of ``pages`` are full and can be used as they are. If the match
            ends inside a page, that last page must be copied before anyone writes to it.
        state: What goes on at exactly ``n_tokens``, for models that need it: the slot of a
            recurrent state, which ``node`` keeps, or the pages before ``n_tokens`` that a window
            sees, which several nodes may own: hold them yourself.
        node: Where the match ends; hold it with ``lock`` while its pages are in use.
        resident_tokens: Tokens whose KV is resident: more than ``n_tokens`` where a state
            is missing.
    """

    n_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    shared_pages: int = 0
    state: EndState | None = None
    node: CacheNode = None
    resident_tokens: int = 0


class CacheStats(NamedTuple):
    """Counters since start, in tokens, and what is resident now."""

    inserted_tokens: int
    evicted_tokens: int
    resident_tokens: int
    resident_states: int


class PrefixCache(Protocol):
    """Prefixes of finished and running sequences, found again by content.

    The cache owns one reference on each page it holds; sequences own their own. ``evict`` frees
    only what nobody has locked.

    Attributes:
        version: Changes whenever something was inserted: a match made before may be too short.
    """

    version: int

    def match(self, tokens: list[int], salt: bytes, *, limit: int, now_s: float) -> Match:
        """The longest cached prefix of ``tokens[:limit]`` under ``salt``; marks it used.

        Takes no references; the match is valid until the next ``insert`` or ``evict``.
        """
        ...

    def junction(self, tokens: list[int], salt: bytes, *, limit: int, match: Match) -> int | None:
        """A place beyond ``match`` where an earlier prompt parted from this one and where no state
        was saved: worth a checkpoint. Call it once a request: it remembers the prompt as seen.
        """
        ...

    def lock(self, node: CacheNode) -> None:
        """Keep ``node`` and everything above it from eviction until ``unlock``."""
        ...

    def unlock(self, node: CacheNode) -> None:
        """Undo one ``lock``."""
        ...

    def insert(
        self, sequence: Sequence, n_tokens: int, *, now_s: float, state: EndState | None = None
    ) -> CacheNode:
        """Remember ``sequence.tokens[:n_tokens]`` and its pages; returns the node where it ends.

        The cache takes its own references on pages it did not have. ``state`` is donated:
        the cache owns it from now on (or frees it, if the place already has a state). ``None``
        says that nothing was kept and nothing donated.
        """
        ...

    def state_at(self, node: CacheNode) -> EndState | None:
        """The state at ``node``, which the cache owns."""
        ...

    def evict(self, n_pages: int) -> int:
        """Free at least ``n_pages`` pages if unlocked content allows; returns how many it freed."""
        ...

    def evict_states(self, n_pieces: int) -> int:
        """Free at least ``n_pieces`` pieces of the pool of end states if unlocked content allows;
        returns how many.
        """
        ...

    def clear(self) -> None:
        """Forget everything that is not locked."""
        ...

    def stats(self) -> CacheStats:
        """Counters and residency."""
        ...

    def page_owners(self) -> Counter[int]:
        """References the cache holds, by page: what ``Pool.check_integrity`` compares."""
        ...

    def state_owners(self) -> Counter[int]:
        """References the cache holds, by piece of the pool of end states."""
        ...

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` unless every invariant of the structure holds."""
        ...
