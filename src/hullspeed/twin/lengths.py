"""Lengths: how many tokens prompts and answers have."""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec

from hullspeed.errors import UsageError
from hullspeed.twin.rows import MAX_TOKENS


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of token counts.

    Attributes:
        tokens: The length (``fixed``), the longest (``uniform``) or the median (``lognormal``).
        kind: ``uniform`` is the benchmarks' range ratio: ``range_ratio * tokens`` to ``tokens``.
        range_ratio: Of ``uniform``, above 0 and at most 1.
        sigma: Of ``lognormal``: standard deviation of the logarithm.
        most: Longer draws are cut to this; 0 for no limit.
    """

    tokens: int
    kind: Literal["fixed", "uniform", "lognormal"] = "fixed"
    range_ratio: float = 1.0
    sigma: float = 0.0
    most: int = 0

    def check(self, name: str) -> None:
        """Refuse what cannot be, naming the option.

        Raises:
            UsageError: for lengths below one and shares outside their range.
        """
        if self.tokens < 1:
            raise UsageError(f"{name} must be at least 1 token", seen=self.tokens)
        if self.tokens > MAX_TOKENS:
            raise UsageError(f"{name} is at most {MAX_TOKENS:,} tokens", seen=self.tokens)
        if not 0 < self.range_ratio <= 1:
            raise UsageError(
                f"the range ratio of {name} lies above 0 and at most 1", seen=self.range_ratio
            )
        if not 0 <= self.sigma <= 5:
            raise UsageError(f"the sigma of {name} lies between 0 and 5", seen=self.sigma)

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1."""
        if self.kind == "uniform":
            low = max(1, int(self.tokens * self.range_ratio))
            return rng.randint(low, self.tokens)
        if self.kind == "lognormal":
            n_tokens = max(1, round(math.exp(rng.gauss(math.log(self.tokens), self.sigma))))
            return min(n_tokens, self.most) if self.most else n_tokens
        return self.tokens
