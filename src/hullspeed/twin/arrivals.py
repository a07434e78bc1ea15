"""Arrivals: when requests of an open loop are sent."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from hullspeed.errors import UsageError


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """A process of arrivals at ``rate`` requests per second.

    Attributes:
        kind: ``poisson``; ``constant`` gaps; ``gamma`` gaps with a coefficient of variation ``cv``
            (above 1: bursts); ``ramp``: Poisson at a rate that grows evenly from ``rate`` to
            ``end_rate``.
        over_s: How long the ramp takes; the rate stays at ``end_rate`` after it.
    """

    rate: float
    kind: Literal["poisson", "constant", "gamma", "ramp"] = "poisson"
    cv: float = 1.0
    end_rate: float = 0.0
    over_s: float = 60.0

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: naming the value.
        """
        if not 0 < self.rate < 1e6:
            raise UsageError(
                "a rate is above 0 and below a million requests per second",
                seen=self.rate,
                fix="all at once: --rate inf, or a closed loop: --concurrency",
            )
        if self.kind == "gamma" and not 0 < self.cv <= 100:
            raise UsageError("the variation of gaps lies above 0 and at most 100", seen=self.cv)
        if self.kind == "ramp" and (not 0 < self.end_rate < 1e6 or self.over_s <= 0):
            raise UsageError(
                "a ramp needs an end rate and a duration above 0", seen=(self.end_rate, self.over_s)
            )

    def times(self, rng: random.Random) -> Iterator[float]:
        """Send times in seconds, the first at 0, without end."""
        self.check()
        at_s, i = 0.0, 0
        while True:
            yield at_s
            i += 1
            at_s = i / self.rate if self.kind == "constant" else at_s + self._gap(rng, at_s)

    def _gap(self, rng: random.Random, at_s: float) -> float:
        if self.kind == "gamma":
            shape = 1 / self.cv**2
            return rng.gammavariate(shape, 1 / (self.rate * shape))
        if self.kind == "ramp":
            done = min(at_s / self.over_s, 1.0)
            return rng.expovariate(self.rate + (self.end_rate - self.rate) * done)
        return rng.expovariate(self.rate)
