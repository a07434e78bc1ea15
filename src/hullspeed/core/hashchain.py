"""HashChain: prefix cache by chained page hashes, as vLLM keeps it.

Whole pages only: a page is found by the hash of its tokens and of everything before it. Kept beside
the segment tree so that the two can be compared on one trace.
"""

from __future__ import annotations

from collections import Counter

from hullspeed.core.eviction import EvictionPolicy, EvictionQueue
from hullspeed.core.ghost import chain_hash
from hullspeed.core.pages import PagePool
from hullspeed.core.prefix import CacheStats, EndState, Match
from hullspeed.core.request import Sequence
from hullspeed.errors import IntegrityError


class Block:
    """One cached page and its place in the chain."""

    __slots__ = ("digest", "end", "last_used_s", "locks", "n_children", "page", "parent")

    def __init__(self, parent: Block | None, digest: bytes, end: int, page: int, now_s: float):
        self.parent = parent
        self.digest = digest
        self.end = end
        self.page = page
        self.n_children = 0
        self.locks = 0
        self.last_used_s = now_s

    def __repr__(self) -> str:
        return f"Block(end={self.end}, page={self.page})"


class HashChain:
    """Implements :class:`~hullspeed.core.prefix.PrefixCache` for models without state."""

    def __init__(self, pages: PagePool, policy: EvictionPolicy, *, page_bytes: int = 1) -> None:
        self._pages = pages
        self._policy = policy
        self._page_bytes = page_bytes
        self._blocks: dict[bytes, Block] = {}
        self._queue: EvictionQueue[Block] = EvictionQueue(self._key)
        self._inserted = self._evicted = 0
        self.version = 0

    def match(self, tokens: list[int], salt: bytes, *, limit: int, now_s: float) -> Match:
        """The longest cached chain of whole pages."""
        match = Match()
        digest = chain_hash(b"", [*salt])
        size = self._pages.page_tokens
        for end in range(size, limit + 1, size):
            digest = chain_hash(digest, tokens[end - size : end])
            block = self._blocks.get(digest)
            if block is None:
                break
            block.last_used_s = max(block.last_used_s, now_s)
            match.pages.append(block.page)
            match.node, match.n_tokens = block, end
        match.resident_tokens = match.n_tokens
        match.shared_pages = len(match.pages)
        return match

    def junction(self, tokens: list[int], salt: bytes, *, limit: int, match: Match) -> int | None:
        """None: without states there is nothing to place."""
        return None

    def lock(self, node: Block) -> None:
        """Keep ``node`` and all above it."""
        node.locks += 1

    def unlock(self, node: Block) -> None:
        """Undo one ``lock``."""
        if node.locks <= 0:
            raise IntegrityError(f"{node} unlocked more often than locked")
        node.locks -= 1
        self._queue.offer(node)

    def insert(
        self, sequence: Sequence, n_tokens: int, *, now_s: float, state: EndState | None = None
    ) -> Block | None:
        """Remember the whole pages among the first ``n_tokens`` tokens."""
        size = self._pages.page_tokens
        digest = chain_hash(b"", [*sequence.request.salt])
        parent: Block | None = None
        for end in range(size, n_tokens + 1, size):
            digest = chain_hash(digest, sequence.tokens[end - size : end])
            block = self._blocks.get(digest)
            if block is None:
                page = sequence.pages[end // size - 1]
                self._pages.share([page])
                block = self._blocks[digest] = Block(parent, digest, end, page, now_s)
                self._inserted += size
                if parent is not None:
                    parent.n_children += 1
            block.last_used_s = max(block.last_used_s, now_s)
            parent = block
        if parent is not None:
            self.version += 1
            self._queue.offer(parent)
        return parent

    def state_at(self, node: Block) -> EndState | None:
        """None."""
        return None

    def _key(self, block: Block) -> float | None:
        if block.n_children or block.locks or self._blocks.get(block.digest) is not block:
            return None
        size = self._pages.page_tokens
        return self._policy.key(block.end - size, size, self._page_bytes, block.last_used_s)

    def evict(self, n_pages: int) -> int:
        """Free pages at the ends of chains, least valuable first."""
        freed = 0
        while freed < n_pages:
            block = self._queue.pop()
            if block is None:
                break
            del self._blocks[block.digest]
            freed += self._pages.release([block.page])
            self._evicted += self._pages.page_tokens
            if block.parent is not None:
                block.parent.n_children -= 1
                self._queue.offer(block.parent)
        return freed

    def evict_states(self, n_pieces: int) -> int:
        """Nothing: there are no states."""
        return 0

    def clear(self) -> None:
        """Forget everything that is not locked."""
        self.evict(self._pages.size + len(self._blocks))

    def stats(self) -> CacheStats:
        """Counters and residency."""
        resident = len(self._blocks) * self._pages.page_tokens
        return CacheStats(self._inserted, self._evicted, resident, 0)

    def page_owners(self) -> Counter[int]:
        """References held, by page."""
        return Counter(block.page for block in self._blocks.values())

    def state_owners(self) -> Counter[int]:
        """None."""
        return Counter()

    def check_integrity(self) -> None:
        """Parents are present with the right number of children; candidates are queued."""
        children = Counter(id(b.parent) for b in self._blocks.values() if b.parent is not None)
        for block in self._blocks.values():
            if block.n_children != children.get(id(block), 0):
                raise IntegrityError(f"{block} counts {block.n_children} children")
            parent = block.parent
            if parent is not None and self._blocks.get(parent.digest) is not parent:
                raise IntegrityError(f"{block} outlived its parent")
            if self._key(block) is not None and block not in self._queue:
                raise IntegrityError(f"{block} can be evicted but is not in the queue")
