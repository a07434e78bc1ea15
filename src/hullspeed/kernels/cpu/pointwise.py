"""Norms, rotation and activation, fused so that each reads its input once.

Every kernel works on rows ``first .. last``, so that one function serves one thread and many.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.cpu.dots import dot_of
from hullspeed.kernels.cpu.formats import FP32, encode, kind_of
from hullspeed.kernels.cpu.jit import kernel
from hullspeed.kernels.cpu.simd import exp

Floats = NDArray[np.float32]


@kernel()
def rms_norm(
    x: Floats, weight: Floats, eps: np.float32, out: Floats, first: int, last: int
) -> None:
    """``out = weight * x / sqrt(mean(x^2) + eps)`` for rows ``[H]``."""
    width = x.shape[1]
    for t in range(first, last):
        square = dot_of(x[t], x[t], width)
        scale = np.float32(1.0) / np.sqrt(square / np.float32(width) + eps)
        for i in range(width):
            out[t, i] = weight[i] * (x[t, i] * scale)


@kernel()
def add_rms_norm(
    x: Floats, delta: Floats, weight: Floats, eps: np.float32, out: Floats, first: int, last: int
) -> None:
    """``x += delta``, then as :func:`rms_norm`."""
    width = x.shape[1]
    for t in range(first, last):
        for i in range(width):
            x[t, i] += delta[t, i]
        square = dot_of(x[t], x[t], width)
        scale = np.float32(1.0) / np.sqrt(square / np.float32(width) + eps)
        for i in range(width):
            out[t, i] = weight[i] * (x[t, i] * scale)


@kernel()
def silu_mul(gate_up: Floats, out: Floats, first: int, last: int) -> None:
    """``silu(gate) * up`` of rows ``[2I]``."""
    width = out.shape[1]
    one = np.float32(1.0)
    for t in range(first, last):
        for i in range(width):
            gate = gate_up[t, i]
            out[t, i] = gate / (one + exp(-gate)) * gate_up[t, width + i]


@kernel()
def rotate_and_store(
    qkv: Floats, q: Floats,
    keys: NDArray[Any], values: NDArray[Any], key_scales: Floats, value_scales: Floats,
    positions: NDArray[np.int32], slots: NDArray[np.int64],
    cos: Floats, sin: Floats,
    q_norm: Floats, k_norm: Floats, eps: np.float32,
    first: int, last: int,
) -> None:  # fmt: skip
    """Split rows of ``qkv`` ``[(Q + 2G) * D]``; norm (unless the weights are empty) and rotate.

    Writes queries to ``q`` ``[T, Q, D]``, keys and values to the token's slot in the format of the
    pages.
    """
    n_heads, dim = q.shape[1], q.shape[2]
    kv_heads, page_tokens = keys.shape[1], keys.shape[3]
    key = np.empty(dim, np.float32)
    codes = np.empty(dim, np.int32)
    for t in range(first, last):
        page, offset = slots[t] // page_tokens, slots[t] % page_tokens
        turn_cos, turn_sin = cos[positions[t]], sin[positions[t]]
        row = qkv[t]
        for h in range(n_heads):
            _rotate(row, h * dim, q_norm, eps, turn_cos, turn_sin, q[t, h])
        for g in range(kv_heads):
            _rotate(row, (n_heads + g) * dim, k_norm, eps, turn_cos, turn_sin, key)
            start = (n_heads + kv_heads + g) * dim
            value = row[start : start + dim]
            if kind_of(keys) == FP32:
                for d in range(dim):
                    keys[page, g, d, offset] = key[d]
                    values[page, g, offset, d] = value[d]
                continue
            scale = encode(key, kind_of(keys), codes)
            for d in range(dim):
                keys[page, g, d, offset] = codes[d]
            if len(key_scales):
                key_scales[page, g, offset] = scale
            scale = encode(value, kind_of(keys), codes)
            for d in range(dim):
                values[page, g, offset, d] = codes[d]
            if len(value_scales):
                value_scales[page, g, offset] = scale


@kernel()
def _rotate(
    row: Floats, start: int, norm: Floats, eps: np.float32, cos: Floats, sin: Floats, out: Floats
) -> None:
    """One head: ``row[start : start + D]`` normed and rotated into ``out`` ``[D]``."""
    dim, half = len(out), len(cos)
    if len(norm):
        head = row[start : start + dim]
        square = dot_of(head, head, dim)
        scale = np.float32(1.0) / np.sqrt(square / np.float32(dim) + eps)
        for d in range(dim):
            out[d] = norm[d] * (head[d] * scale)
    else:
        for d in range(dim):
            out[d] = row[start + d]
    for d in range(half):
        low, high = out[d], out[half + d]
        out[d] = low * cos[d] - high * sin[d]
        out[half + d] = high * cos[d] + low * sin[d]


@kernel(parallel=True)
def rms_norm_parallel(
    x: Floats, weight: Floats, eps: np.float32, out: Floats, n_parts: int
) -> None:
    """:func:`rms_norm` by ``n_parts`` threads."""
    n = len(x)
    for p in numba.prange(n_parts):
        rms_norm(x, weight, eps, out, n * p // n_parts, n * (p + 1) // n_parts)


@kernel(parallel=True)
def add_rms_norm_parallel(
    x: Floats, delta: Floats, weight: Floats, eps: np.float32, out: Floats, n_parts: int
) -> None:
    """:func:`add_rms_norm` by ``n_parts`` threads."""
    n = len(x)
    for p in numba.prange(n_parts):
        add_rms_norm(x, delta, weight, eps, out, n * p // n_parts, n * (p + 1) // n_parts)


@kernel(parallel=True)
def silu_mul_parallel(gate_up: Floats, out: Floats, n_parts: int) -> None:
    """:func:`silu_mul` by ``n_parts`` threads."""
    n = len(out)
    for p in numba.prange(n_parts):
        silu_mul(gate_up, out, n * p // n_parts, n * (p + 1) // n_parts)


@kernel(parallel=True)
def rotate_and_store_parallel(
    qkv: Floats, q: Floats,
    keys: NDArray[Any], values: NDArray[Any], key_scales: Floats, value_scales: Floats,
    positions: NDArray[np.int32], slots: NDArray[np.int64],
    cos: Floats, sin: Floats,
    q_norm: Floats, k_norm: Floats, eps: np.float32,
    n_parts: int,
) -> None:  # fmt: skip
    """:func:`rotate_and_store` by ``n_parts`` threads."""
    n = len(qkv)
    for p in numba.prange(n_parts):
        rotate_and_store(
            qkv, q, keys, values, key_scales, value_scales, positions, slots, cos, sin,
            q_norm, k_norm, eps, n * p // n_parts, n * (p + 1) // n_parts,
        )  # fmt: skip
