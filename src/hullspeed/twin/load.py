"""Load: what requests come when; the protocol of ``bench``, so that the two can be compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from hullspeed.errors import UsageError


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement cell.

    Attributes:
        isl_tokens: Prompt length (of the first turn), shared prefix included.
        osl_tokens: Output length, exact.
        requests: How many; with ``conversations``, ignored.
        concurrency: Closed loop: requests (or conversations) in flight. 0 for an open loop.
        rate: Open loop: requests per second.
        arrival: Gaps of the open loop.
        shared_prefix_tokens: First tokens that all prompts share.
        cache: ``cold``: prompts are new after the shared prefix; ``cached``: one prompt, sent once
            before the measurement and repeated.
        conversations: Agent load of so many conversations of ``turns`` turns, each turn carrying
            all before it and ``turn_tokens`` new ones.
    """

    isl_tokens: int
    osl_tokens: int
    requests: int = 16
    concurrency: int = 1
    rate: float = 0.0
    arrival: Literal["poisson", "constant"] = "poisson"
    shared_prefix_tokens: int = 0
    cache: Literal["cold", "cached"] = "cold"
    conversations: int = 0
    turns: int = 1
    turn_tokens: int = 128
    seed: int = 0

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: naming the field.
        """
        for name in ("isl_tokens", "osl_tokens", "requests", "turns", "turn_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1", seen=getattr(self, name))
        if (self.concurrency > 0) == (self.rate > 0):
            raise UsageError(
                "a load is closed (concurrency) or open (rate)", seen=(self.concurrency, self.rate)
            )
        if not 0 <= self.shared_prefix_tokens <= self.isl_tokens:
            raise UsageError(
                "the shared prefix cannot be longer than the prompt", seen=self.shared_prefix_tokens
            )
        if self.conversations and (self.rate or self.cache == "cached"):
            raise UsageError("conversations run closed loop and cold", seen=(self.rate, self.cache))


class Prompts:
    """Prompts of a load as token ids, the same for the same seed."""

    def __init__(self, load: Load, vocab: int) -> None:
        self._load = load
        self._vocab = vocab
        self._rng = random.Random(load.seed)  # noqa: S311 - a workload, not a secret
        self._shared = self.draw(load.shared_prefix_tokens)
        self._repeated = self._new() if load.cache == "cached" else []

    def draw(self, n_tokens: int) -> list[int]:
        """``n_tokens`` random ids."""
        return self._rng.choices(range(self._vocab), k=n_tokens)

    def first(self) -> list[int]:
        """The next prompt of a request, or the opening of a conversation."""
        return list(self._repeated) if self._repeated else self._new()

    def _new(self) -> list[int]:
        return self._shared + self.draw(self._load.isl_tokens - len(self._shared))

    def arrivals(self) -> Iterator[float]:
        """Send times of an open loop in seconds, the first at 0."""
        load, at_s = self._load, 0.0
        for i in range(load.requests):
            if i:
                gap = self._rng.expovariate(load.rate) if load.arrival == "poisson" else 0.0
                at_s = at_s + gap if load.arrival == "poisson" else i / load.rate
            yield at_s
