"""GhostIndex: remembers which prefixes were seen, without keeping anything of them."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict


class GhostIndex:
    """A bounded set of chained page hashes.

    Two prompts with a common prefix meet here even after its KV is gone, or where no state was
    saved: the deepest page they share is the junction worth a checkpoint.

    Args:
        page_tokens: Granularity.
        capacity: Hashes remembered (about 100 bytes each); the least recently seen go first.
    """

    def __init__(self, page_tokens: int, capacity: int = 1_000_000) -> None:
        self._page_tokens = page_tokens
        self._capacity = capacity
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def see(self, tokens: list[int], salt: bytes, limit: int) -> int:
        """Tokens of ``tokens[:limit]``, in whole pages, seen before; remembers them all."""
        deepest = 0
        digest = chain_hash(b"", [*salt])
        for end in range(self._page_tokens, limit + 1, self._page_tokens):
            digest = chain_hash(digest, tokens[end - self._page_tokens : end])
            if digest in self._seen:
                deepest = end
                self._seen.move_to_end(digest)
            else:
                self._seen[digest] = None
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return deepest


def chain_hash(parent: bytes, tokens: list[int]) -> bytes:
    """Hash of a page's tokens and everything before them.

    128 bits of BLAKE2b: collisions cannot be found on purpose, so a hit needs no token compare.
    """
    return hashlib.blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()
