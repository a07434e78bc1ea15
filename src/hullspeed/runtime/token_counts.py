"""TokenCounts: which tokens a request has seen and how often, kept up step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Distinct tokens and their counts; a new token costs constant time."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.empty(16, np.int64)
        self._counts = np.empty(16, np.int64)
        self._counted = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens, in the order of their first appearance."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of ``ids`` appeared."""
        return self._counts[: len(self._index)]

    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Count ``tokens[start:]``, those not counted yet; ``tokens`` only ever grows."""
        for token in tokens[max(start, self._counted) :]:
            at = self._index.get(token)
            if at is None:
                at = self._add(token)
            self._counts[at] += 1
        self._counted = len(tokens)

    def _add(self, token: int) -> int:
        at = self._index[token] = len(self._index)
        if at == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._ids[at], self._counts[at] = token, 0
        return at
