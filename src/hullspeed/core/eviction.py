"""Eviction: which cached content goes first.

A policy gives each candidate a key; the smallest goes first. A key may only grow when the
candidate is used again, which lets the queue refresh keys lazily when they come up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class EvictionPolicy(Protocol):
    """Orders cached content by how little it is worth."""

    def key(self, start: int, n_tokens: int, n_bytes: int, last_used_s: float) -> float:
        """Worth of keeping tokens ``[start, start + n_tokens)``, held in ``n_bytes``."""
        ...


class Lru:
    """Least recently used first."""

    def key(self, start: int, n_tokens: int, n_bytes: int, last_used_s: float) -> float:
        """The time of last use."""
        return last_used_s


class Density:
    """Saved FLOPs per byte, halved for every ``half_life_s`` of disuse.

    ``value * 0.5 ** (age / half_life)`` orders candidates as ``log2(value) + last_used /
    half_life`` does, and the latter stays the same while time passes.

    Args:
        flops: FLOPs of computing ``n_tokens`` tokens after ``start``: ``flops(n_tokens, start)``.
        half_life_s: Of the order of a session's think time; on agent sessions that think for 20 s
            (median) the hit rate was the same for 30 to 120 s to within 0.02, and lower for 300 s
            and 1,000 s (``docs/simulate.md``).
    """

    def __init__(self, flops: Callable[[int, int], float], half_life_s: float = 60.0) -> None:
        self._flops = flops
        self._half_life_s = half_life_s

    def key(self, start: int, n_tokens: int, n_bytes: int, last_used_s: float) -> float:
        """log2 of the value at the time of last use."""
        value = max(self._flops(n_tokens, start), 1.0) / max(n_bytes, 1)
        return math.log2(value) + last_used_s / self._half_life_s


class EvictionQueue(Generic[T]):
    """Candidates by key, smallest first, with keys that grow while they wait.

    Args:
        key: A candidate's present key; ``None`` when it is no candidate any more (it drops out
            and has to be offered again when that changes).
    """

    def __init__(self, key: Callable[[T], float | None]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, T]] = []
        self._queued: set[int] = set()
        self._order = count()

    def offer(self, candidate: T) -> None:
        """Make sure that ``candidate`` is in the queue if it is a candidate at all."""
        if id(candidate) in self._queued:
            return
        key = self._key(candidate)
        if key is not None:
            self._queued.add(id(candidate))
            heapq.heappush(self._heap, (key, next(self._order), candidate))

    def pop(self) -> T | None:
        """Take out the candidate with the smallest present key."""
        while self._heap:
            key, order, candidate = heapq.heappop(self._heap)
            self._queued.discard(id(candidate))
            now: float | None = self._key(candidate)
            if now is None:
                continue
            if now > key:
                self._queued.add(id(candidate))
                heapq.heappush(self._heap, (now, order, candidate))
                continue
            return candidate
        return None

    def __contains__(self, candidate: Any) -> bool:
        return id(candidate) in self._queued
