"""Gated delta rule over state slots: one scan serves prefill, decode, verification and checkpoints.

Source of the recurrence: Yang et al., "Gated Delta Networks", arXiv 2412.06464, eq. 10, with
normalised keys and queries as in Qwen3-Next. Every span starts from the state in its read slot (-1:
zeros) and leaves its last state in its write slot; the two may be the same.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.cpu.delta_tile import NARROW, WIDE, make_read, make_step
from hullspeed.kernels.cpu.dots import dot_of
from hullspeed.kernels.cpu.formats import LANES
from hullspeed.kernels.cpu.jit import kernel
from hullspeed.kernels.cpu.simd import exp

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

# Channels at a time: their inputs and outputs of a few tokens stay in L1.
_CHANNELS = 512
_NORM_EPS = np.float32(1e-6)  # of keys and queries; fixed in the reference

_read_wide, _step_wide = make_read(WIDE), make_step(WIDE, ahead=False)
_read_narrow, _step_narrow = make_read(NARROW), make_step(NARROW, ahead=False)
_ahead_narrow = make_step(NARROW, ahead=True)
_read_1, _step_1, _ahead_1 = make_read(1), make_step(1, ahead=False), make_step(1, ahead=True)

_WIDE_COLUMNS, _NARROW_COLUMNS = WIDE * LANES, NARROW * LANES


@kernel()
def convolve(
    x: Floats, weight: Floats, span_starts: Ints, read_slots: Ints, write_slots: Ints,
    history: Floats, out: Floats, first: int, last: int,
) -> None:  # fmt: skip
    """Channels ``first .. last`` of a causal convolution over each span, through SiLU.

    ``x`` is ``[T, >= C]``, ``weight`` ``[K, C]`` (oldest tap first), ``out`` ``[T, C]``;
    ``history`` ``[slots, K - 1, C]`` holds the inputs before a span, oldest first.
    """
    taps = len(weight)
    before = np.empty((taps - 1, _CHANNELS), np.float32)
    for s in range(len(span_starts) - 1):
        begin, end = span_starts[s], span_starts[s + 1]
        for start in range(first, last, _CHANNELS):
            width = min(_CHANNELS, last - start)
            for j in range(taps - 1):
                if read_slots[s] < 0:
                    before[j] = 0
                else:
                    _copy(history[read_slots[s], j, start : start + width], before[j])
            for t in range(begin, end):
                line = out[t, start : start + width]
                line[:] = 0
                for j in range(taps):
                    back = t - (taps - 1) + j  # the token that tap j sees
                    tap = weight[j, start : start + width]
                    if back >= begin:
                        _add_product(x[back, start : start + width], tap, line)
                    else:
                        _add_product(before[back - begin + taps - 1], tap, line)
                _silu(line)
            for j in range(taps - 1):
                back = end - (taps - 1) + j
                target = history[write_slots[s], j, start : start + width]
                if back >= begin:
                    _copy(x[back, start : start + width], target)
                else:
                    _copy(before[back - begin + taps - 1, :width], target)


@kernel()
def _copy(source: Floats, target: Floats) -> None:
    for c in range(len(source)):
        target[c] = source[c]


@kernel(math="fused")
def _add_product(a: Floats, b: Floats, total: Floats) -> None:
    for c in range(len(total)):
        total[c] += a[c] * b[c]


@kernel()
def _silu(line: Floats) -> None:
    one = np.float32(1.0)
    for c in range(len(line)):
        line[c] = line[c] / (one + exp(-line[c]))


@kernel()
def prepare(
    qkv: Floats, gates: Floats, decay_rate: Floats, dt_bias: Floats, k_heads: int, k_dim: int,
    decay: Floats, beta: Floats, first: int, last: int,
) -> None:  # fmt: skip
    """Norm queries (scaled by k_dim^-0.5) and keys of ``qkv`` in place, compute the gates.

    ``gates`` is ``[T, 2 * v_heads]``: b, then a. ``decay`` = exp(-decay_rate * softplus(a + bias)),
    ``beta`` = sigmoid(b), both ``[T, v_heads]``.
    """
    v_heads = decay.shape[1]
    one = np.float32(1.0)
    scale = one / np.sqrt(np.float32(k_dim))
    for t in range(first, last):
        for head in range(2 * k_heads):
            row = qkv[t, head * k_dim : (head + 1) * k_dim]
            factor = one / np.sqrt(dot_of(row, row, k_dim) + _NORM_EPS)
            if head < k_heads:
                factor *= scale
            for d in range(k_dim):
                row[d] *= factor
        for head in range(v_heads):
            beta[t, head] = one / (one + np.exp(-gates[t, head]))
            a = gates[t, v_heads + head] + dt_bias[head]
            # softplus, as torch: the identity beyond 20
            soft = a if a > 20 else np.log1p(np.exp(a))
            decay[t, head] = np.exp(-decay_rate[head] * soft)


@kernel()
def scan(
    qkv: Floats, decay: Floats, beta: Floats, span_starts: Ints, read_slots: Ints,
    write_slots: Ints, states: Floats, k_heads: int, out: Floats, first: int, last: int,
) -> None:  # fmt: skip
    """Value heads ``first .. last`` of every span.

    ``qkv`` ``[T, C]`` is prepared; ``states`` is ``[slots, v_heads, k_dim, v_dim]``, ``out``
    ``[T, v_heads * v_dim]``.
    """
    v_heads, k_dim, v_dim = states.shape[1], states.shape[2], states.shape[3]
    per_key = v_heads // k_heads
    for s in range(len(span_starts) - 1):
        begin, end = span_starts[s], span_starts[s + 1]
        read, write = read_slots[s], write_slots[s]
        for head in range(first, last):
            target = (write * v_heads + head) * k_dim * v_dim
            source = target
            if read < 0:
                states[write, head] = 0
            else:
                source = (read * v_heads + head) * k_dim * v_dim
            q0 = head // per_key * k_dim
            k0 = q0 + k_heads * k_dim
            v0 = 2 * k_heads * k_dim + head * v_dim
            _scan_head(
                qkv, decay, beta, begin, end, head, states, source, target, v_dim, q0, k0, v0, out
            )  # fmt: skip


@kernel()
def _scan_head(
    qkv: Floats, decay: Floats, beta: Floats, begin: int, end: int, head: int, states: Floats,
    source: int, target: int, v_dim: int, q0: int, k0: int, v0: int, out: Floats,
) -> None:  # fmt: skip
    """One head of one span, strip by strip."""
    k_dim = states.shape[2]
    ldq, ldo = qkv.shape[1], out.shape[1]
    kv = np.empty(_WIDE_COLUMNS, np.float32)
    column = 0
    if end - begin == 1:
        q, k, v, o = begin * ldq + q0, begin * ldq + k0, begin * ldq + v0, begin * ldo
        while column + _WIDE_COLUMNS <= v_dim:
            _read_wide(states, source + column, v_dim, qkv, k, kv, 0, k_dim)
            _step_wide(
                states, source + column, states, target + column, v_dim, qkv, q, k, k,
                qkv, v + column, kv, 0, out, o + head * v_dim + column,
                decay[begin, head], beta[begin, head], k_dim,
            )  # fmt: skip
            column += _WIDE_COLUMNS
    while column < v_dim:
        narrow = column + _NARROW_COLUMNS <= v_dim
        at = source + column
        if narrow:
            _read_narrow(states, at, v_dim, qkv, begin * ldq + k0, kv, 0, k_dim)
        else:
            _read_1(states, at, v_dim, qkv, begin * ldq + k0, kv, 0, k_dim)
        for t in range(begin, end):
            q, k, v = t * ldq + q0, t * ldq + k0, t * ldq + v0 + column
            o = t * ldo + head * v_dim + column
            g, b = decay[t, head], beta[t, head]
            to = target + column
            if narrow and t + 1 < end:
                _ahead_narrow(
                    states, at, states, to, v_dim, qkv, q, k, k + ldq, qkv, v, kv, 0, out, o,
                    g, b, k_dim,
                )  # fmt: skip
            elif narrow:
                _step_narrow(
                    states, at, states, to, v_dim, qkv, q, k, k, qkv, v, kv, 0, out, o,
                    g, b, k_dim,
                )  # fmt: skip
            elif t + 1 < end:
                _ahead_1(
                    states, at, states, to, v_dim, qkv, q, k, k + ldq, qkv, v, kv, 0, out, o,
                    g, b, k_dim,
                )  # fmt: skip
            else:
                _step_1(
                    states, at, states, to, v_dim, qkv, q, k, k, qkv, v, kv, 0, out, o,
                    g, b, k_dim,
                )  # fmt: skip
            at = to
        column += _NARROW_COLUMNS if narrow else LANES


@kernel(parallel=True)
def convolve_parallel(
    x: Floats, weight: Floats, span_starts: Ints, read_slots: Ints, write_slots: Ints,
    history: Floats, out: Floats, n_parts: int,
) -> None:  # fmt: skip
    """:func:`convolve` by ``n_parts`` threads, by channels."""
    n = out.shape[1]
    for p in numba.prange(n_parts):
        convolve(
            x, weight, span_starts, read_slots, write_slots, history, out,
            n * p // n_parts, n * (p + 1) // n_parts,
        )  # fmt: skip


@kernel(parallel=True)
def prepare_parallel(
    qkv: Floats, gates: Floats, decay_rate: Floats, dt_bias: Floats, k_heads: int, k_dim: int,
    decay: Floats, beta: Floats, n_parts: int,
) -> None:  # fmt: skip
    """:func:`prepare` by ``n_parts`` threads, by tokens."""
    n = len(qkv)
    for p in numba.prange(n_parts):
        prepare(
            qkv, gates, decay_rate, dt_bias, k_heads, k_dim, decay, beta,
            n * p // n_parts, n * (p + 1) // n_parts,
        )  # fmt: skip


@kernel(parallel=True)
def scan_parallel(
    qkv: Floats, decay: Floats, beta: Floats, span_starts: Ints, read_slots: Ints,
    write_slots: Ints, states: Floats, k_heads: int, out: Floats, n_parts: int,
) -> None:  # fmt: skip
    """:func:`scan` by ``n_parts`` threads, by heads."""
    n = states.shape[1]
    for p in numba.prange(n_parts):
        scan(
            qkv, decay, beta, span_starts, read_slots, write_slots, states, k_heads, out,
            n * p // n_parts, n * (p + 1) // n_parts,
        )  # fmt: skip
