"""draw: tokens at random from logits, by temperature, top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hullspeed.runtime.philox import uniforms
from hullspeed.runtime.rules import Rules

# Top-k rows are cut to the first of these that is enough; a row's cut depends on it alone.
_CANDIDATES = (64, 1024)

CHUNK_ROWS = 8
"""Rows worked on together: their probabilities stay in a core's cache."""

_BLOCK = 1024


def draw(
    logits: Tensor,
    best: Tensor,
    rows: list[int],
    rules: Sequence[Rules],
    positions: Sequence[int],
) -> list[int]:
    """One token for each of ``rows``, by inverse transform of the row's own random numbers."""
    if not rows:
        return []
    stream = _Stream.of([rules[i] for i in rows], [positions[i] for i in rows])
    drawn: dict[int, int] = {}
    for choose, mine in (
        (_draw_nucleus, [at for at, i in enumerate(rows) if not rules[i].top_k]),
        (_draw_top_k, [at for at, i in enumerate(rows) if rules[i].top_k]),
    ):
        for places in batched(mine, CHUNK_ROWS):
            at = [rows[place] for place in places]
            picked = [rules[i] for i in at]
            # Unnormalised log-probabilities with the likeliest at 0: exp cannot overflow.
            scores = logits[at].sub_(best[at, None])
            scores *= column([1 / s.temperature for s in picked], scores)
            tokens = choose(scores, picked, stream.of_rows(places)).tolist()
            drawn.update(zip(places, tokens, strict=True))
    return [drawn[place] for place in range(len(rows))]


@dataclass(slots=True)
class _Stream:
    """The random numbers of some rows: one for each attempt at the row's position."""

    seeds: NDArray[np.uint64]
    positions: NDArray[np.uint64]
    first: NDArray[np.float64]

    @classmethod
    def of(cls, rules: Sequence[Rules], positions: Sequence[int]) -> _Stream:
        seeds = np.asarray([rule.seed for rule in rules], np.uint64)
        at = np.asarray(positions, np.uint64)
        return cls(seeds, at, uniforms(seeds, at))

    def of_rows(self, rows: list[int]) -> _Stream:
        return _Stream(self.seeds[rows], self.positions[rows], self.first[rows])

    def attempt(self, number: int, rows: list[int], device: torch.device) -> Tensor:
        if number == 0:
            draws = self.first[rows]
        else:
            draws = uniforms(self.seeds[rows], self.positions[rows], number)
        return torch.from_numpy(draws).to(device)


def _draw_nucleus(scores: Tensor, rules: Sequence[Rules], stream: _Stream) -> Tensor:
    """Top-p and min-p without sorting, by rejection.

    A token is in the nucleus if the tokens likelier than it have less than ``top_p`` of the mass.
    A token drawn outside it rules out all that are no likelier, and the row draws again; what is
    accepted is distributed as in the nucleus. Tokens as likely as the least likely one in it are
    in too.
    """
    weights = scores.exp_()
    tokens = torch.empty(len(rules), dtype=torch.int64, device=weights.device)
    limits = weights.sum(dim=1) * column([s.top_p for s in rules], weights)[:, 0]
    if any(rule.min_p > 0 for rule in rules):
        weights[weights < column([s.min_p for s in rules], weights)] = 0.0
    left = list(range(len(rules)))
    attempt = 0
    while left:
        sums = weights.cumsum(dim=1)
        picks = _invert(sums, stream.attempt(attempt, left, weights.device))
        tokens[left] = picks
        # Where top_p is 1 every token is in, whatever rounding says.
        cut = [j for j, i in enumerate(left) if rules[i].top_p < 1.0]
        if not cut:
            break
        weights, picks, limits = some_rows(weights, cut), picks[cut], limits[cut]
        drawn = weights.gather(1, picks[:, None])
        likelier = weights * (weights > drawn)
        above = likelier.sum(dim=1)
        # The likeliest token has nothing above it and is in, however small top_p: this ends.
        outside = ((above >= limits) & (above > 0)).tolist()
        again = [j for j, out in enumerate(outside) if out]
        left = [left[cut[j]] for j in again]
        weights, limits = likelier[again], limits[again]
        attempt += 1
    return tokens


def _draw_top_k(scores: Tensor, rules: Sequence[Rules], stream: _Stream) -> Tensor:
    """Exactly k likeliest tokens, top-p of their mass, min-p of the likeliest."""
    vocab = scores.shape[1]
    tokens = torch.empty(len(rules), dtype=torch.int64, device=scores.device)
    left = list(range(len(rules)))
    for size in (*(n for n in _CANDIDATES if n < vocab), vocab):
        rows = [i for i in left if rules[i].top_k <= size]
        left = [i for i in left if rules[i].top_k > size]
        if not rows:
            continue
        picked = [rules[i] for i in rows]
        values, ids = scores[rows].topk(size, dim=1)
        weights = values.exp_()
        ranks = torch.arange(size, device=scores.device)
        weights[ranks >= column([s.top_k for s in picked], ranks)] = 0.0
        before = weights.cumsum(dim=1)
        limits = before[:, -1:] * column([s.top_p for s in picked], weights)
        before -= weights
        weights[(before >= limits) & (ranks > 0)] = 0.0
        weights[weights < column([s.min_p for s in picked], weights)] = 0.0
        picks = _invert(weights.cumsum(dim=1), stream.attempt(0, rows, scores.device))
        tokens[rows] = ids.gather(1, picks[:, None])[:, 0]
    return tokens


def _invert(sums: Tensor, draws: Tensor) -> Tensor:
    """Index at which running sums ``[N, M]`` pass ``draws`` of their end."""
    ends = sums[:, -1]
    # Rounding may lift a target onto the end, where there is no token.
    targets = torch.minimum(
        (draws * ends).to(sums.dtype), torch.nextafter(ends, torch.zeros_like(ends))
    )
    return torch.searchsorted(sums, targets[:, None], right=True)[:, 0]


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value of each row of ``[R, V]`` and where it is; NaN if a row holds one.

    In two levels: the largest of each block, which vectorises, then the place in one block. An
    order of magnitude faster than ``max(dim=1)`` on CPU.
    """
    n_rows, vocab = logits.shape
    whole = vocab // _BLOCK
    blocks = logits[:, : whole * _BLOCK].reshape(n_rows, whole, _BLOCK).amax(dim=2)
    if vocab % _BLOCK:
        tail = logits[:, whole * _BLOCK :].amax(dim=1, keepdim=True)
        blocks = torch.cat([blocks, tail], dim=1)
    best, block = blocks.max(dim=1)
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    columns.clamp_(max=vocab - 1)  # past the end the last value repeats: never first
    inside = logits.gather(1, columns).argmax(dim=1)
    return best, (block * _BLOCK + inside).clamp_(max=vocab - 1)


def some_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Some rows as a copy, or all as they are."""
    return logits if len(rows) == len(logits) else logits[rows]


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """One value a row: ``[N, 1]``."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def batched(items: list[int], size: int) -> Iterator[list[int]]:
    """``items`` in runs of up to ``size``."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
