"""Sampler: logits of a step to tokens, each row by its own request's rules.

Order, the same for every row: logit bias, repetition penalty, frequency and presence penalty,
end tokens masked before ``min_tokens``; then temperature, top-k, top-p (of what top-k left),
min-p. Log-probabilities are of the logits before temperature.

A row's outcome depends on its logits, its request and its position and on nothing else in the
batch: its random number is computed from (seed, position).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hullspeed.core.request import Sequence as RunningSequence
from hullspeed.core.step import Sampled, TokenLogprob
from hullspeed.runtime.philox import uniforms
from hullspeed.runtime.token_counts import TokenCounts

# Below this, logits / temperature loses the order of close logits; it is greedy in all but name.
_GREEDY_TEMPERATURE = 1e-5

# Top-k rows are cut to the first of these that is enough; a row's cut depends on it alone.
_CANDIDATES = (64, 1024)

# Rows worked on together: their probabilities stay in a core's cache.
_CHUNK_ROWS = 8

_BLOCK = 1024

_NOT_FINITE = "the model gave logits that are not numbers"
_NOTHING_LEFT = "no token is allowed: every logit is minus infinity"


class Sampler:
    """Chooses tokens; keeps what a request's penalties and random stream need.

    Args:
        vocab: Width of the logits.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._states: dict[int, _State] = {}

    def forget(self, ids: Iterable[int]) -> None:
        """Drop the state of requests that ended; unknown ids are ignored."""
        for i in ids:
            self._states.pop(i, None)

    def sample(self, logits: Tensor, sequences: Sequence[RunningSequence]) -> list[Sampled]:
        """Choose the next token of each sequence.

        Args:
            logits: float32 ``[R, vocab]``; changed in place.
            sequences: R sequences whose ``tokens`` are all known tokens so far.
        """
        states = [self._state(sequence) for sequence in sequences]
        best, tokens = row_max(logits)  # NaN wins a max: one look finds it
        errors = _row_errors(best, _NOT_FINITE)
        changed = [
            i
            for i, (state, sequence) in enumerate(zip(states, sequences, strict=True))
            if state.changes_logits and i not in errors and state.prepare(sequence)
        ]
        if changed:
            self._change(logits, changed, states, sequences)
            best[changed], tokens[changed] = row_max(_rows(logits, changed))
            errors.update(_row_errors(best, _NOTHING_LEFT, changed))
        good = [i for i in range(len(states)) if i not in errors]
        reports = _logprob_rows([i for i in good if states[i].logprobs is not None], logits, states)
        chosen = tokens.tolist()
        random_rows = [i for i in good if not states[i].greedy]
        drawn = _draw(logits, best, random_rows, states, sequences)
        for i, token in zip(random_rows, drawn, strict=True):
            chosen[i] = token
        return [
            Sampled(-1, error=errors[i]) if i in errors else _result(token, i, logits, reports)
            for i, token in enumerate(chosen)
        ]

    def _state(self, sequence: RunningSequence) -> _State:
        state = self._states.get(sequence.id)
        if state is None:
            state = self._states[sequence.id] = _State.of(sequence, self._vocab)
        return state

    def _change(
        self,
        logits: Tensor,
        rows: list[int],
        states: Sequence[_State],
        sequences: Sequence[RunningSequence],
    ) -> None:
        """Bias, penalties and masks of ``rows``, all rows at once over flat indices."""
        flat = logits.view(-1)
        base = [i * self._vocab for i in rows]
        picked = [states[i] for i in rows]
        device = logits.device

        biased = [(b, s) for b, s in zip(base, picked, strict=True) if len(s.bias_ids)]
        if biased:
            at = _flat(((b, s.bias_ids) for b, s in biased), device)
            flat[at] += _concat([s.bias_values for _, s in biased], device)

        repeated = [(b, s) for b, s in zip(base, picked, strict=True) if s.repetition != 1.0]
        if repeated:
            at = _flat(((b, s.seen.ids) for b, s in repeated), device)
            by = _per_token([(s.repetition, len(s.seen.ids)) for _, s in repeated], device)
            value = flat[at]
            flat[at] = torch.where(value > 0, value / by, value * by)

        counted = [
            (b, s) for b, s in zip(base, picked, strict=True) if s.counts_output and len(s.output)
        ]
        if counted:
            at = _flat(((b, s.output.ids) for b, s in counted), device)
            flat[at] -= _concat(
                [(s.frequency * s.output.counts + s.presence).astype(np.float32)
                 for _, s in counted],
                device,
            )  # fmt: skip

        masked = [
            (i * self._vocab, states[i].end_ids)
            for i in rows
            if sequences[i].output_tokens < states[i].min_tokens
        ]
        if masked:
            flat[_flat(masked, device)] = -torch.inf


@dataclass(slots=True)
class _State:
    """A request's rules in the form that the sampler uses, and its counts."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence: float
    frequency: float
    repetition: float
    min_tokens: int
    logprobs: int | None
    seed: int
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    end_ids: NDArray[np.int64]
    output: TokenCounts
    seen: TokenCounts
    prompt_tokens: int

    @classmethod
    def of(cls, sequence: RunningSequence, vocab: int) -> _State:
        params = sequence.request.sampling
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends.update(sequence.request.eos_token_ids)
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        return cls(
            temperature=params.temperature,
            top_k=params.top_k if params.top_k < vocab else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            min_tokens=params.min_tokens,
            logprobs=params.logprobs,
            seed=seed,
            bias_ids=np.fromiter(params.logit_bias, np.int64),
            bias_values=np.fromiter(params.logit_bias.values(), np.float32),
            end_ids=np.asarray(sorted(t for t in ends if 0 <= t < vocab), np.int64),
            output=TokenCounts(),
            seen=TokenCounts(),
            prompt_tokens=sequence.prompt_tokens,
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def counts_output(self) -> bool:
        return self.presence != 0.0 or self.frequency != 0.0

    @property
    def changes_logits(self) -> bool:
        return (
            self.counts_output
            or self.repetition != 1.0
            or len(self.bias_ids) > 0
            or (self.min_tokens > 0 and len(self.end_ids) > 0)
        )

    def prepare(self, sequence: RunningSequence) -> bool:
        """Count the tokens that are new; whether anything changes in this step."""
        if self.counts_output:
            self.output.extend(sequence.tokens, self.prompt_tokens)
        if self.repetition != 1.0:
            self.seen.extend(sequence.tokens, 0)
        return (
            self.counts_output
            or self.repetition != 1.0
            or len(self.bias_ids) > 0
            or sequence.output_tokens < self.min_tokens
        )


@dataclass(slots=True)
class _Report:
    """What log-probabilities of one row need."""

    log_sum: float
    top: tuple[TokenLogprob, ...]


def _result(token: int, row: int, logits: Tensor, reports: dict[int, _Report]) -> Sampled:
    report = reports.get(row)
    if report is None:
        return Sampled(token)
    return Sampled(token, float(logits[row, token]) - report.log_sum, report.top)


def _logprob_rows(rows: list[int], logits: Tensor, states: Sequence[_State]) -> dict[int, _Report]:
    if not rows:
        return {}
    reports = {}
    for part in _batched(rows, _CHUNK_ROWS):
        wanted = logits[part]
        sums: list[float] = torch.logsumexp(wanted, dim=1).tolist()
        most = max(states[i].logprobs or 0 for i in part)
        values, ids = (t.tolist() for t in wanted.topk(most, dim=1))
        for row, log_sum, row_values, row_ids in zip(part, sums, values, ids, strict=True):
            n = states[row].logprobs or 0
            top = zip(row_ids[:n], row_values[:n], strict=True)
            reports[row] = _Report(log_sum, tuple(TokenLogprob(t, v - log_sum) for t, v in top))
    return reports


def _draw(
    logits: Tensor,
    best: Tensor,
    rows: list[int],
    states: Sequence[_State],
    sequences: Sequence[RunningSequence],
) -> list[int]:
    """One token for each of ``rows``, by inverse transform of the row's own random numbers."""
    if not rows:
        return []
    stream = _Stream.of([states[i] for i in rows], [sequences[i].output_tokens for i in rows])
    drawn: dict[int, int] = {}
    for choose, mine in (
        (_draw_nucleus, [at for at, i in enumerate(rows) if not states[i].top_k]),
        (_draw_top_k, [at for at, i in enumerate(rows) if states[i].top_k]),
    ):
        for places in _batched(mine, _CHUNK_ROWS):
            at = [rows[place] for place in places]
            picked = [states[i] for i in at]
            # Unnormalised log-probabilities with the likeliest at 0: exp cannot overflow.
            scores = logits[at].sub_(best[at, None])
            scores *= _column([1 / s.temperature for s in picked], scores)
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
    def of(cls, states: Sequence[_State], positions: Sequence[int]) -> _Stream:
        seeds = np.asarray([state.seed for state in states], np.uint64)
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


def _draw_nucleus(scores: Tensor, states: Sequence[_State], stream: _Stream) -> Tensor:
    """Top-p and min-p without sorting, by rejection.

    A token is in the nucleus if the tokens likelier than it have less than ``top_p`` of the mass.
    A token drawn outside it rules out all that are no likelier, and the row draws again; what is
    accepted is distributed as in the nucleus. Tokens as likely as the least likely one in it are
    in too.
    """
    weights = scores.exp_()
    tokens = torch.empty(len(states), dtype=torch.int64, device=weights.device)
    limits = weights.sum(dim=1) * _column([s.top_p for s in states], weights)[:, 0]
    if any(state.min_p > 0 for state in states):
        weights[weights < _column([s.min_p for s in states], weights)] = 0.0
    left = list(range(len(states)))
    attempt = 0
    while left:
        sums = weights.cumsum(dim=1)
        picks = _invert(sums, stream.attempt(attempt, left, weights.device))
        tokens[left] = picks
        # Where top_p is 1 every token is in, whatever rounding says.
        cut = [j for j, i in enumerate(left) if states[i].top_p < 1.0]
        if not cut:
            break
        weights, picks, limits = _rows(weights, cut), picks[cut], limits[cut]
        drawn = weights.gather(1, picks[:, None])
        likelier = weights * (weights > drawn)
        outside = (likelier.sum(dim=1) >= limits).tolist()
        # The likeliest token has nothing above it and is always in: this ends.
        again = [j for j, out in enumerate(outside) if out]
        left = [left[cut[j]] for j in again]
        weights, limits = likelier[again], limits[again]
        attempt += 1
    return tokens


def _draw_top_k(scores: Tensor, states: Sequence[_State], stream: _Stream) -> Tensor:
    """Exactly k likeliest tokens, top-p of their mass, min-p of the likeliest."""
    vocab = scores.shape[1]
    tokens = torch.empty(len(states), dtype=torch.int64, device=scores.device)
    left = list(range(len(states)))
    for size in (*(n for n in _CANDIDATES if n < vocab), vocab):
        rows = [i for i in left if states[i].top_k <= size]
        left = [i for i in left if states[i].top_k > size]
        if not rows:
            continue
        picked = [states[i] for i in rows]
        values, ids = scores[rows].topk(size, dim=1)
        weights = values.exp_()
        ranks = torch.arange(size, device=scores.device)
        weights[ranks >= _column([s.top_k for s in picked], ranks)] = 0.0
        before = weights.cumsum(dim=1)
        limits = before[:, -1:] * _column([s.top_p for s in picked], weights)
        before -= weights
        weights[(before >= limits) & (ranks > 0)] = 0.0
        weights[weights < _column([s.min_p for s in picked], weights)] = 0.0
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


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Some rows as a copy, or all as they are."""
    return logits if len(rows) == len(logits) else logits[rows]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """One value a row: ``[N, 1]``."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _batched(items: list[int], size: int) -> Iterator[list[int]]:
    """``items`` in runs of up to ``size``."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _row_errors(best: Tensor, what: str, rows: list[int] | None = None) -> dict[int, str]:
    finite = torch.isfinite(best)
    if bool(finite.all()):
        return {}
    bad = (~finite).nonzero()[:, 0].tolist()
    return {i: what for i in bad if rows is None or i in rows}


def _flat(rows: Iterable[tuple[int, NDArray[np.int64]]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([base + ids for base, ids in rows])).to(device)


def _concat(parts: Sequence[NDArray[np.float32]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)


def _per_token(rows: Sequence[tuple[float, int]], device: torch.device) -> Tensor:
    values, lengths = zip(*rows, strict=True)
    return torch.from_numpy(np.repeat(np.asarray(values, np.float32), lengths)).to(device)
