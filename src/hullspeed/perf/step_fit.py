"""fit_steps: what whole steps take beyond their kernels, by least squares and as factors."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from hullspeed.arch.model import ModelArch
from hullspeed.hardware.ceilings import NEAR_TOKENS, Ceilings, Curve
from hullspeed.perf.step import StepCost, kv_heads_of
from hullspeed.perf.work import Shape, Work

Spans = list[tuple[int, int]]
"""Of a step: new tokens of each sequence, and the tokens before them."""

Timed = tuple[Spans, float]
"""A step and its seconds."""

SHORT_TOKENS, LONG_TOKENS, FAR_TOKENS = 63, NEAR_TOKENS - 1, 4 * NEAR_TOKENS - 1
"""Tokens before a decoded one: what lies between is read at the near and at the far rate."""

MIXED_TOKENS = 256
"""Of a step in which some sequences decode beside a chunk."""

_LEAST_FASTER, _MOST_FASTER = 0.5, 8.0  # attention in steps over its kernel alone
_MOST_APART = 1.4  # of it, one number of sequences and the others
_DECODE_RATES = (
    "decode_bytes_per_s", "shared_bytes_per_s", "far_decode_bytes_per_s", "far_shared_bytes_per_s",
)  # fmt: skip
_LEAST_FACTOR, _MOST_FACTOR = 0.7, 1.5  # beyond it the parts were timed wrongly


def fit_steps(
    bare: Ceilings,
    arch: ModelArch,
    weight_dtype: str,
    steps: Sequence[Timed],
    shared_steps: Sequence[Timed] = (),
) -> Ceilings:
    """``bare`` with what whole ``steps`` take beyond the kernels timed alone: a share per layer and
    per token, and as factors what these leave. Decode attention is as fast as steps with long and
    with short contexts differ, those with one past for all (``shared_steps``) for themselves.

    Least squares on relative residuals, so that short decode steps weigh as much as long chunks.
    """
    bare = _attention_in_steps(bare, arch, steps, shared_steps)
    cost = StepCost(arch, bare, weight_dtype)
    rows, rest = [], []
    n_layers = len(arch.layers)
    for spans, took in steps:
        known = cost.seconds([Shape(n, start) for n, start in spans])
        n_tokens = sum(n for n, _ in spans)
        rows.append([n_layers / took, n_layers * n_tokens * arch.hidden / 1024 / took])
        rest.append((took - known) / took)
    layer_s, layer_token_s = np.linalg.lstsq(np.array(rows), np.array(rest), rcond=None)[0]
    overheads = msgspec.structs.replace(
        bare.overheads, layer_s=max(float(layer_s), 0.0), layer_token_s=max(float(layer_token_s), 0)
    )
    fitted = msgspec.structs.replace(bare, overheads=overheads)
    cost = StepCost(arch, fitted, weight_dtype)
    decodes: dict[int, list[float]] = {}
    chunks: dict[int, list[float]] = {}
    mixed: dict[int, list[float]] = {1: [1.0]}
    for spans, took in steps:
        n_tokens, n_decode = sum(n for n, _ in spans), sum(n == 1 for n, _ in spans)
        factor = took / cost.seconds([Shape(n, start) for n, start in spans])
        factor = min(max(factor, _LEAST_FACTOR), _MOST_FACTOR)
        if n_decode == len(spans):
            if spans[0][1] == min(s[0][1] for s, _ in steps if s == [(1, s[0][1])] * n_decode):
                decodes[n_decode] = [factor]
        elif not n_decode:
            chunks.setdefault(n_tokens, []).append(factor)
        else:
            mixed.setdefault(n_decode + 1, []).append(factor)
    chunk_factor, decode_factor = _curve_of(chunks), _curve_of(decodes)
    heads = max(kv_heads_of(arch), 1)
    scaled = {  # the factor is on attention too, whose rate was seen with it
        name: Curve(curve.sizes, tuple(
            rate * decode_factor.at(size / heads)
            for size, rate in zip(curve.sizes, curve.values, strict=True)
        ))
        for name in _DECODE_RATES
        if (curve := getattr(fitted, name)) is not None
    }  # fmt: skip
    mixed = {
        n: [f / chunk_factor.at(MIXED_TOKENS) for f in fs] if n > 1 else fs
        for n, fs in mixed.items()
    }
    return msgspec.structs.replace(
        fitted,
        **(scaled if _slopes(steps, SHORT_TOKENS, LONG_TOKENS) else {}),
        decode_factor=decode_factor,
        chunk_factor=chunk_factor,
        mixed_factor=_curve_of(mixed),
    )


def _slopes(steps: Sequence[Timed], low: int, high: int) -> dict[int, float]:
    """What steps take longer after ``high`` tokens than after ``low``, by sequences."""
    took = {(len(spans), spans[0][1]): s for spans, s in steps if spans[0][0] == spans[-1][0] == 1}
    return {
        n: max(seconds - took[n, low], 0.0)
        for (n, start), seconds in sorted(took.items())
        if start == high and (n, low) in took
    }


def _attention_in_steps(
    bare: Ceilings, arch: ModelArch, steps: Sequence[Timed], shared_steps: Sequence[Timed]
) -> Ceilings:
    """Rates of decode attention from steps that differ in their past alone, within bounds of those
    of the kernel by itself; unchanged where there are none.
    """
    work, heads = Work(arch, kv_dtype="fp32"), max(kv_heads_of(arch), 1)
    near_bytes = work.kv_bytes(LONG_TOKENS + 1) - work.kv_bytes(SHORT_TOKENS + 1)
    far_bytes = work.kv_bytes(FAR_TOKENS + 1) - work.kv_bytes(LONG_TOKENS + 1)
    alone, alone_shared = bare.decode_bytes_per_s, bare.shared_bytes_per_s
    near = _rates(_slopes(steps, SHORT_TOKENS, LONG_TOKENS), near_bytes, alone, heads)
    if near is None:
        return bare
    far = _rates(_slopes(steps, LONG_TOKENS, FAR_TOKENS), far_bytes, alone, heads)
    # One past is read as their own are, and there is none of the short ones.
    short_s = {len(spans): s for spans, s in steps if spans == [(1, SHORT_TOKENS)] * len(spans)}
    shared_s = {len(spans): s for spans, s in shared_steps if spans[0][1] == LONG_TOKENS}
    short_bytes, long_bytes = work.kv_bytes(SHORT_TOKENS + 1), work.kv_bytes(LONG_TOKENS + 1)
    rest_s = {
        n: took - short_s[n] - (long_bytes - n * short_bytes) / near.at(n * heads)
        for n, took in shared_s.items()
        if n in short_s
    }
    shared = _rates(rest_s, long_bytes, alone_shared or alone, heads, readers_less=1)
    rest_s = {
        n: more_s - far_bytes / (far or near).at(n * heads)
        for n, more_s in _slopes(shared_steps, LONG_TOKENS, FAR_TOKENS).items()
    }
    far_shared = _rates(rest_s, far_bytes, alone_shared or alone, heads, readers_less=1)
    return msgspec.structs.replace(
        bare,
        decode_bytes_per_s=near,
        shared_bytes_per_s=shared or alone_shared,
        far_decode_bytes_per_s=far,
        far_shared_bytes_per_s=far_shared,
    )


def _rates(
    took_s: dict[int, float], n_bytes: float, alone: Curve, heads: int, readers_less: int = 0
) -> Curve | None:
    """Bytes a second against sequences x KV heads, where so many sequences (but ``readers_less``)
    take so long over ``n_bytes`` each.

    Differences of two steps are noisy, and the more so the fewer sequences there are. So the ratio
    to the kernel's rate alone is taken over all of them first, within bounds (a cache that still
    holds what was read last makes it several times faster), and each may differ from that a little.
    """
    if not took_s:
        return None
    alone_s = {n: (n - readers_less) * n_bytes / alone.at(n * heads) for n in took_s}
    together = sum(alone_s.values()) / max(sum(took_s.values()), 1e-9)
    together = min(max(together, _LEAST_FASTER), _MOST_FASTER)
    rates = {}
    for n, seconds in took_s.items():
        ratio = alone_s[n] / max(seconds, 1e-9) / together
        ratio = min(max(ratio, 1 / _MOST_APART), _MOST_APART)
        rates[n * heads] = [alone.at(n * heads) * together * ratio]
    return _curve_of(rates)


def _curve_of(factors: dict[int, list[float]]) -> Curve:
    sizes = sorted(factors)
    if not sizes:
        return Curve((1.0,), (1.0,))
    return Curve(tuple(map(float, sizes)), tuple(float(np.mean(factors[n])) for n in sizes))
