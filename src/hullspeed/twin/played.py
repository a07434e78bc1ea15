"""Played: what a workload saw, request by request, and what the engine held meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Served(NamedTuple):
    """One request that was answered; times in seconds since the simulation's start."""

    sent_s: float
    token_s: Floats
    prompt_tokens: int
    cached_tokens: int
    preemptions: int

    @property
    def ttft_s(self) -> float:
        """Sent to first token."""
        return float(self.token_s[0]) - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Sent to last token."""
        return float(self.token_s[-1]) - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean gap between its tokens; 0 with a single token."""
        n = len(self.token_s)
        return (float(self.token_s[-1]) - float(self.token_s[0])) / (n - 1) if n > 1 else 0.0


class Moment(NamedTuple):
    """The engine at one time.

    Attributes:
        states_share: Share of the pool that recurrent states take, running and cached; where they
            have room of their own, of that.
    """

    at_s: float
    running: int
    waiting: int
    pages_in_use: int
    pages_cached: int
    states_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One simulation.

    Attributes:
        served: Measured requests in the order in which they ended.
        refused: Requests that could never fit.
        duration_s: From the first measured request sent to the last token.
        busy_s: Of that, time spent in steps.
        timeline: At most a few hundred moments.
    """

    served: tuple[Served, ...]
    refused: int
    duration_s: float
    busy_s: float
    steps: int
    preemptions: int
    n_pages: int
    timeline: tuple[Moment, ...]

    @property
    def prompt_tokens(self) -> int:
        """Of all measured requests."""
        return sum(request.prompt_tokens for request in self.served)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache."""
        return sum(request.cached_tokens for request in self.served)

    @property
    def output_tokens(self) -> int:
        """Of all measured requests."""
        return sum(len(request.token_s) for request in self.served)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from the cache."""
        return self.cached_tokens / self.prompt_tokens if self.served else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Over the whole run."""
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Over the whole run."""
        return len(self.served) / self.duration_s if self.duration_s else 0.0

    def ttft_s(self) -> Floats:
        """Of each measured request."""
        return np.array([request.ttft_s for request in self.served])

    def e2e_s(self) -> Floats:
        """Of each measured request."""
        return np.array([request.e2e_s for request in self.served])

    def tpot_s(self) -> Floats:
        """Of each measured request with more than one token."""
        return np.array([r.tpot_s for r in self.served if len(r.token_s) > 1])

    def itl_s(self) -> Floats:
        """Every gap between two tokens of one request."""
        gaps = [np.diff(request.token_s) for request in self.served]
        return np.concatenate(gaps) if gaps else np.array([])

    def good(self, ttft_s: float | None, tpot_s: float | None) -> int:
        """Requests that met both limits; ``None`` is no limit."""
        return sum(
            (ttft_s is None or r.ttft_s <= ttft_s) and (tpot_s is None or r.tpot_s <= tpot_s)
            for r in self.served
        )
