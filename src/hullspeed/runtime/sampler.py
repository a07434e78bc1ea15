"""Sampler: logits of a step to tokens, each row by its own request's rules.

Order, the same for every row: logit bias, repetition penalty, frequency and presence penalty,
end tokens masked before ``min_tokens``; then temperature, top-k, top-p (of what top-k left),
min-p. Log-probabilities are of the logits before temperature.

A row's outcome depends on its logits, its request and its position and on nothing else in the
batch: its random number is computed from (seed, position).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hullspeed.core.request import Sequence as RunningSequence
from hullspeed.core.step import Sampled, TokenLogprob
from hullspeed.runtime.draw import CHUNK_ROWS, batched, draw, row_max, some_rows
from hullspeed.runtime.logit_changes import change_logits
from hullspeed.runtime.rules import Rules

_NOT_FINITE = "the model gave logits that are not numbers"
_NOTHING_LEFT = "no token is allowed: every logit is minus infinity"


class Sampler:
    """Chooses tokens; keeps what a request's penalties and random stream need.

    Args:
        vocab: Width of the logits.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._rules: dict[int, Rules] = {}

    def forget(self, ids: Iterable[int]) -> None:
        """Drop the state of requests that ended; unknown ids are ignored."""
        for i in ids:
            self._rules.pop(i, None)

    def sample(self, logits: Tensor, sequences: Sequence[RunningSequence]) -> list[Sampled]:
        """Choose the next token of each sequence.

        Args:
            logits: float32 ``[R, vocab]``; changed in place.
            sequences: R sequences whose ``tokens`` are all known tokens so far.
        """
        rules = [self._rules_of(sequence) for sequence in sequences]
        positions = [sequence.output_tokens for sequence in sequences]
        best, tokens = row_max(logits)  # NaN wins a max: one look finds it
        errors = _row_errors(best, _NOT_FINITE)
        changed = [
            i
            for i, (rule, sequence) in enumerate(zip(rules, sequences, strict=True))
            if rule.changes_logits and i not in errors and rule.prepare(sequence)
        ]
        if changed:
            change_logits(logits, changed, rules, positions)
            best[changed], tokens[changed] = row_max(some_rows(logits, changed))
            errors.update(_row_errors(best, _NOTHING_LEFT, changed))
        good = [i for i in range(len(rules)) if i not in errors]
        reports = _logprob_rows([i for i in good if rules[i].logprobs is not None], logits, rules)
        chosen = tokens.tolist()
        random_rows = [i for i in good if not rules[i].greedy]
        drawn = draw(logits, best, random_rows, rules, positions)
        for i, token in zip(random_rows, drawn, strict=True):
            chosen[i] = token
        return [
            Sampled(-1, error=errors[i]) if i in errors else _result(token, i, logits, reports)
            for i, token in enumerate(chosen)
        ]

    def _rules_of(self, sequence: RunningSequence) -> Rules:
        rule = self._rules.get(sequence.id)
        if rule is None:
            rule = self._rules[sequence.id] = Rules.of(sequence, self._vocab)
        return rule


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


def _logprob_rows(rows: list[int], logits: Tensor, rules: Sequence[Rules]) -> dict[int, _Report]:
    if not rows:
        return {}
    reports = {}
    for part in batched(rows, CHUNK_ROWS):
        wanted = logits[part]
        sums: list[float] = torch.logsumexp(wanted, dim=1).tolist()
        most = max(rules[i].logprobs or 0 for i in part)
        values, ids = (t.tolist() for t in wanted.topk(most, dim=1))
        for row, log_sum, row_values, row_ids in zip(part, sums, values, ids, strict=True):
            n = rules[row].logprobs or 0
            top = zip(row_ids[:n], row_values[:n], strict=True)
            reports[row] = _Report(log_sum, tuple(TokenLogprob(t, v - log_sum) for t, v in top))
    return reports


def _row_errors(best: Tensor, what: str, rows: list[int] | None = None) -> dict[int, str]:
    finite = torch.isfinite(best)
    if bool(finite.all()):
        return {}
    bad = (~finite).nonzero()[:, 0].tolist()
    return {i: what for i in bad if rows is None or i in rows}
