"""Sampler: logits of a step to tokens, each row by its own request's rules.

Order, the same for every row: logit bias, repetition penalty, frequency and presence penalty,
end tokens masked before ``min_tokens``; then temperature, top-k, top-p (of what top-k left),
min-p. Log-probabilities are of the logits before temperature.

A row's outcome depends on its logits, its request and its position and on nothing else in the
batch: its random number is computed from (seed, position).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
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

# Rows are first looked at through this many likeliest tokens; a row's level depends on it alone.
_CANDIDATES = (64, 1024)

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
        best, tokens = logits.max(dim=1)  # NaN wins a max: one look finds it
        errors = _row_errors(best, _NOT_FINITE)
        changed = [
            i
            for i, (state, sequence) in enumerate(zip(states, sequences, strict=True))
            if state.changes_logits and i not in errors and state.prepare(sequence)
        ]
        if changed:
            self._change(logits, changed, states, sequences)
            best[changed], tokens[changed] = logits[changed].max(dim=1)
            errors.update(_row_errors(best, _NOTHING_LEFT, changed))
        good = [i for i in range(len(states)) if i not in errors]
        reports = _logprob_rows([i for i in good if states[i].logprobs is not None], logits, states)
        chosen = tokens.tolist()
        random_rows = [i for i in good if not states[i].greedy]
        if random_rows:
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
        return self.temperature < _GREEDY_TEMPERATURE

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0

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
    wanted = logits[rows]
    sums: list[float] = torch.logsumexp(wanted, dim=1).tolist()
    most = max(states[i].logprobs or 0 for i in rows)
    values, ids = (t.tolist() for t in wanted.topk(most, dim=1)) if most else ([], [])
    reports = {}
    for at, row in enumerate(rows):
        n = states[row].logprobs or 0
        top = zip(ids[at][:n], values[at][:n], strict=True) if n else ()
        reports[row] = _Report(sums[at], tuple(TokenLogprob(t, v - sums[at]) for t, v in top))
    return reports


def _draw(
    logits: Tensor,
    best: Tensor,
    rows: list[int],
    states: Sequence[_State],
    sequences: Sequence[RunningSequence],
) -> list[int]:
    """One token for each of ``rows``, by inverse transform of the row's own random number."""
    picked = [states[i] for i in rows]
    seeds = np.asarray([state.seed for state in picked], np.uint64)
    positions = np.asarray([sequences[i].output_tokens for i in rows], np.uint64)
    draws = torch.from_numpy(uniforms(seeds, positions)).to(logits.device)
    # Unnormalised log-probabilities with the likeliest at 0: exp cannot overflow.
    scores = logits[rows]
    scores -= best[rows, None]
    scores /= torch.tensor([s.temperature for s in picked], device=logits.device)[:, None]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    whole = [i for i, state in enumerate(picked) if not state.filters]
    if whole:
        weights = scores[whole].exp_() if len(whole) < len(rows) else scores.exp_()
        _cut_min_p(weights, [picked[i] for i in whole])
        tokens[whole] = _invert(weights, draws[whole])
    cut = [i for i, state in enumerate(picked) if state.filters]
    if cut:
        tokens[cut] = _draw_filtered(scores[cut], [picked[i] for i in cut], draws[cut])
    drawn: list[int] = tokens.tolist()
    return drawn


def _draw_filtered(scores: Tensor, states: list[_State], draws: Tensor) -> Tensor:
    """Rows with top-k or top-p, through their likeliest tokens first."""
    vocab = scores.shape[1]
    tokens = torch.empty(len(states), dtype=torch.int64, device=scores.device)
    totals = torch.exp(scores).sum(dim=1, dtype=torch.float64)
    top_p = torch.tensor([s.top_p for s in states], dtype=torch.float64, device=scores.device)
    left = list(range(len(states)))
    for size in (*(n for n in _CANDIDATES if n < vocab), vocab):
        fits = [i for i in left if states[i].top_k <= size]
        if not fits:
            continue
        values, ids = scores[fits].topk(size, dim=1)
        weights = values.double().exp_()
        top_k = torch.tensor([states[i].top_k or vocab for i in fits], device=scores.device)
        weights[torch.arange(size, device=scores.device) >= top_k[:, None]] = 0.0
        reached = weights.cumsum(dim=1)
        # The mass that top-p is a share of: what top-k keeps, or everything.
        mass = torch.where(top_k <= size, reached[:, -1], totals[fits])
        limit = top_p[fits] * mass
        enough = ((top_k <= size) | (reached[:, -1] >= limit) | (size == vocab)).tolist()
        weights[(reached - weights) >= limit[:, None]] = 0.0
        _cut_min_p(weights, [states[i] for i in fits])
        at = [j for j, done in enumerate(enough) if done]
        if at:
            rows = [fits[j] for j in at]
            picks = _invert(weights[at], draws[rows])
            tokens[rows] = ids[at].gather(1, picks[:, None])[:, 0]
            done_rows = set(rows)
            left = [i for i in left if i not in done_rows]
        if not left:
            break
    return tokens


def _cut_min_p(weights: Tensor, states: Sequence[_State]) -> None:
    """Zero what is less likely than ``min_p`` of the likeliest, whose weight is 1."""
    if any(state.min_p > 0 for state in states):
        floor = torch.tensor([s.min_p for s in states], dtype=weights.dtype, device=weights.device)
        weights[weights < floor[:, None]] = 0.0


def _invert(weights: Tensor, draws: Tensor) -> Tensor:
    """Index at which the running sum of ``weights`` ``[N, M]`` passes ``draws`` of its end."""
    sums = weights.cumsum(dim=1)
    ends = sums[:, -1]
    targets = (draws * ends).to(sums.dtype)
    # Rounding may lift a target onto the end, where there is no token.
    targets = torch.minimum(targets, torch.nextafter(ends, torch.zeros_like(ends)))
    return torch.searchsorted(sums, targets[:, None], right=True)[:, 0]


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
