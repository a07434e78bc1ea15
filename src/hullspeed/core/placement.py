"""Placement: at which places of a prompt the recurrent state is saved for others to start from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hullspeed.core.prefix import Match, PrefixCache
from hullspeed.core.request import Sequence
from hullspeed.errors import UsageError


class Placement(Protocol):
    """Chooses checkpoints of a prompt when its sequence is admitted."""

    def places(self, sequence: Sequence, match: Match, cache: PrefixCache) -> Iterable[int]:
        """Positions at which a chunk ends and the state goes to the cache; those up to
        ``match.n_tokens`` are ignored.
        """
        ...


class Junctions:
    """What the request asks for (end of the system block, end of the prompt before the generation
    tail), and the place where an earlier prompt parted from this one.
    """

    def places(self, sequence: Sequence, match: Match, cache: PrefixCache) -> Iterable[int]:
        """Requested checkpoints and the junction."""
        junction = cache.junction(
            sequence.tokens, sequence.request.salt, limit=sequence.prompt_tokens, match=match
        )
        return (*sequence.request.checkpoints, *([junction] if junction else []))


class Aligned:
    """Every multiple of ``block_tokens``, as vLLM's ``align`` mode: its attention block is grown
    until it is as large as a state (784 tokens for a 27B hybrid).
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = _checked(block_tokens)

    def places(self, sequence: Sequence, match: Match, cache: PrefixCache) -> Iterable[int]:
        """The multiples within the prompt."""
        return range(self._block_tokens, sequence.prompt_tokens, self._block_tokens)


class PromptEnd:
    """The last multiple of ``block_tokens`` before the prompt's end, and no other."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = _checked(block_tokens)

    def places(self, sequence: Sequence, match: Match, cache: PrefixCache) -> Iterable[int]:
        """One place, or none in a prompt shorter than a block."""
        end = (sequence.prompt_tokens - 1) // self._block_tokens * self._block_tokens
        return (end,) if end else ()


def _checked(block_tokens: int) -> int:
    if block_tokens < 1:
        raise UsageError("a block has at least one token", seen=block_tokens)
    return block_tokens
