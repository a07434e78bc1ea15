"""NoCache: a prefix cache that remembers nothing, for measuring what the others bring."""

from __future__ import annotations

from collections import Counter

from hullspeed.core.prefix import CacheNode, CacheStats, EndState, Match
from hullspeed.core.request import Sequence


class NoCache:
    """Implements :class:`~hullspeed.core.prefix.PrefixCache`."""

    version = 0

    def match(self, tokens: list[int], salt: bytes, *, limit: int, now_s: float) -> Match:
        """Nothing."""
        return Match()

    def junction(self, tokens: list[int], salt: bytes, *, limit: int, match: Match) -> int | None:
        """None."""
        return None

    def lock(self, node: CacheNode) -> None:
        """Nothing to keep."""

    def unlock(self, node: CacheNode) -> None:
        """Nothing was kept."""

    def insert(
        self, sequence: Sequence, n_tokens: int, *, now_s: float, state: EndState | None = None
    ) -> CacheNode:
        """Keep nothing; the state stays the caller's."""
        return None

    def state_at(self, node: CacheNode) -> EndState | None:
        """None."""
        return None

    def evict(self, n_pages: int) -> int:
        """0."""
        return 0

    def evict_states(self, n_pieces: int) -> int:
        """0."""
        return 0

    def clear(self) -> None:
        """Nothing to forget."""

    def stats(self) -> CacheStats:
        """All zero."""
        return CacheStats(0, 0, 0, 0)

    def page_owners(self) -> Counter[int]:
        """None."""
        return Counter()

    def state_owners(self) -> Counter[int]:
        """None."""
        return Counter()

    def check_integrity(self) -> None:
        """Always whole."""
