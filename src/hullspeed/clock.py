"""Clock: the only source of time for the scheduler, so that a simulation can turn it by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start; never goes back."""

    def now(self) -> float:
        """The current time in seconds."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """The current time in seconds."""
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The current time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (not negative)."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now_s += seconds

    def advance_to(self, when_s: float) -> None:
        """Move forward to ``when_s``; a time in the past leaves the clock as it is."""
        self._now_s = max(self._now_s, when_s)
