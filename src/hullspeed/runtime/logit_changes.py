"""change_logits: bias, penalties and masks, for all rows at once over flat indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hullspeed.runtime.rules import Rules

_Row = tuple[int, Rules]
"""Where a row begins in the flat logits, and its rules."""


def change_logits(
    logits: Tensor, rows: Sequence[int], rules: Sequence[Rules], positions: Sequence[int]
) -> None:
    """Change ``rows`` of ``logits`` ``[R, vocab]`` in place, each by its rules.

    ``positions`` are the numbers of output tokens so far, for ``min_tokens``.
    """
    vocab, flat = logits.shape[1], logits.view(-1)
    all_rows = [(i * vocab, rules[i]) for i in rows]
    _add_bias(flat, [(b, r) for b, r in all_rows if len(r.bias_ids)])
    _divide_repeated(flat, [(b, r) for b, r in all_rows if r.repetition != 1.0])
    _subtract_counted(flat, [(b, r) for b, r in all_rows if r.counts_output and len(r.output)])
    _mask_ends(flat, [(i * vocab, rules[i]) for i in rows if positions[i] < rules[i].min_tokens])


def _add_bias(flat: Tensor, rows: Sequence[_Row]) -> None:
    if rows:
        at = _flat(((base, rule.bias_ids) for base, rule in rows), flat.device)
        flat[at] += _concat([rule.bias_values for _, rule in rows], flat.device)


def _divide_repeated(flat: Tensor, rows: Sequence[_Row]) -> None:
    """CTRL's penalty (Keskar et al., 2019) in the form of transformers' processor."""
    if rows:
        at = _flat(((base, rule.seen.ids) for base, rule in rows), flat.device)
        factors = [np.full(len(rule.seen), rule.repetition, np.float32) for _, rule in rows]
        value, by = flat[at], _concat(factors, flat.device)
        flat[at] = torch.where(value > 0, value / by, value * by)


def _subtract_counted(flat: Tensor, rows: Sequence[_Row]) -> None:
    """OpenAI's penalties: ``frequency`` an occurrence and ``presence`` once."""
    if rows:
        at = _flat(((base, rule.output.ids) for base, rule in rows), flat.device)
        amounts = [rule.frequency * rule.output.counts + rule.presence for _, rule in rows]
        flat[at] -= _concat([a.astype(np.float32) for a in amounts], flat.device)


def _mask_ends(flat: Tensor, rows: Sequence[_Row]) -> None:
    if rows:
        flat[_flat(((base, rule.end_ids) for base, rule in rows), flat.device)] = -torch.inf


def _flat(rows: Iterable[tuple[int, NDArray[np.int64]]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([base + ids for base, ids in rows])).to(device)


def _concat(parts: Sequence[NDArray[np.float32]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)
