"""Outcome: what a load saw, in the terms of ``bench``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies and totals of one simulated cell; seconds and tokens.

    Attributes:
        ttft_s: Time to first token of each request, in order of completion.
        itl_s: Every gap between tokens of one request (the first token is not a gap).
        tpot_s: Mean gap of each request with more than one token.
        duration_s: From the first request sent to the last token.
    """

    requests: int
    ttft_s: list[float]
    itl_s: list[float]
    tpot_s: list[float]
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    steps: int

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of all requests per second of the whole run."""
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Completed requests per second of the whole run."""
        return self.requests / self.duration_s if self.duration_s else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from the cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def goodput(self, ttft_s: float | None, tpot_s: float | None) -> float:
        """Requests per second that met both limits; ``None`` is no limit."""
        pairs = zip(self.ttft_s, self.tpot_s or [0.0] * len(self.ttft_s), strict=False)
        good = sum(
            (ttft_s is None or ttft <= ttft_s) and (tpot_s is None or tpot <= tpot_s)
            for ttft, tpot in pairs
        )
        return good / self.duration_s if self.duration_s else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99."""
    return {f"p{round(100 * share)}": percentile(values, share) for share in (0.5, 0.9, 0.99)}
