"""A histogram cheap enough for every token, exposed by prometheus-client under several names."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts of observed values by bucket; ``bounds`` are inclusive upper bounds, ascending."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` as seen ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus buckets: (upper bound, how many values are not above it)."""
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(seen)))
        return buckets


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to and including ``most``: the buckets of token counts."""
    series: list[float] = []
    step = 1
    while step <= most:
        series += [float(step * k) for k in (1, 2, 5) if step * k < most]
        step *= 10
    return (*series, float(most))
