"""StepTimer: seconds of a step whose decoding sequences are known by number and total context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hullspeed.perf.work import Shape, StepSeconds

_GRID = [0, *(round(64 * 2 ** (i / 2)) for i in range(46))]  # up to 2^28 tokens


@runtime_checkable
class BatchSeconds(Protocol):
    """A cost model that takes its decoding sequences as a number and the sum of their contexts."""

    def batch_seconds(self, n_decode: int, context_tokens: int, chunks: Sequence[Shape]) -> float:
        """Seconds of the step."""
        ...


class StepTimer:
    """Asks the cost model about steps, and remembers what decode steps cost.

    The sequences that decode in a step are taken to have their mean context. For full attention
    and recurrent state that is exact, because their time is a sum over sequences that grows
    linearly with each context; for sliding windows it is an approximation where some contexts are
    within the window and some beyond.

    Steps with nothing but decodes are interpolated between contexts a factor of sqrt(2) apart, for
    each number of sequences.

    Args:
        stream_token_s: Added for each token that a step puts out.
    """

    def __init__(self, cost: StepSeconds, stream_token_s: float = 0.0) -> None:
        self._cost = cost
        self._batch = cost.batch_seconds if isinstance(cost, BatchSeconds) else None
        self._stream_s = stream_token_s
        self._knots: dict[tuple[int, int], float] = {}

    def seconds(self, n_decodes: int, context_tokens: int, chunks: Sequence[Shape]) -> float:
        """Seconds of a step of ``n_decodes`` single tokens after ``context_tokens`` in all, and
        prompt ``chunks``.
        """
        if not chunks:
            return self._decode_s(n_decodes, context_tokens) + self._stream_s * n_decodes
        sampled = n_decodes + sum(chunk.sample for chunk in chunks)
        if self._batch is not None:
            seconds = self._batch(n_decodes, context_tokens, chunks)
        else:
            seconds = self._cost.seconds([*alike(n_decodes, context_tokens), *chunks])
        return seconds + self._stream_s * sampled

    def _decode_s(self, n_decodes: int, context_tokens: int) -> float:
        mean = context_tokens / n_decodes
        place = _place(mean)
        low, high = _GRID[place], _GRID[place + 1]
        below, above = self._knot(n_decodes, place), self._knot(n_decodes, place + 1)
        return below + (above - below) * (mean - low) / (high - low)

    def _knot(self, n_decodes: int, place: int) -> float:
        key = (n_decodes, place)
        seconds = self._knots.get(key)
        if seconds is None:
            seconds = self._cost.seconds([Shape(1, _GRID[place])] * n_decodes)
            self._knots[key] = seconds
        return seconds


def alike(n_decodes: int, context_tokens: int) -> list[Shape]:
    """``n_decodes`` single tokens whose contexts sum to ``context_tokens``, as even as can be."""
    if not n_decodes:
        return []
    short, longer = divmod(context_tokens, n_decodes)
    return [Shape(1, short + 1)] * longer + [Shape(1, short)] * (n_decodes - longer)


def _place(mean_tokens: float) -> int:
    """The interval of the grid that holds ``mean_tokens``."""
    if mean_tokens < 64:
        return 0
    place = 2 * (int(mean_tokens) // 64).bit_length() - 1
    place = min(place, len(_GRID) - 2)
    while _GRID[place] > mean_tokens:
        place -= 1
    while place < len(_GRID) - 2 and _GRID[place + 1] <= mean_tokens:
        place += 1
    return place
