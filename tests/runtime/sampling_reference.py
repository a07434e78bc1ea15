"""What sampling must do, row by row, in float64 with sorts and loops."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hullspeed.core.sampling import SamplingParams

Row = NDArray[np.float64]


def changed(
    logits: Row, params: SamplingParams, prompt: list[int], output: list[int], eos: tuple[int, ...]
) -> Row:
    """Logits after bias, penalties and masks."""
    row = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            row[token] = -np.inf
    return row


def distribution(row: Row, params: SamplingParams) -> Row:
    """Probability of each token."""
    if params.temperature == 0 or params.top_k == 1:
        certain: Row = np.eye(len(row))[row.argmax()]
        return certain
    scaled = (row - row.max()) / params.temperature
    p = np.exp(scaled)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        mass = 0.0
        for token in order:
            if mass >= params.top_p:
                p[token] = 0
            mass += p[token]
    p[p < params.min_p * p.max()] = 0
    result: Row = p / p.sum()
    return result


def log_softmax(row: Row) -> Row:
    """Natural log-probabilities."""
    shifted = row - row.max()
    result: Row = shifted - np.log(np.exp(shifted).sum())
    return result
