"""``x @ weight.T + bias`` with block-quantised weights, panel by panel.

Activations become int16 with a scale for each token and block: their relative error, 2^-16 of the
block's largest, is below that of weights rounded to fp16. All else is exact in integers within a
block and float32 across blocks.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.blocks import BLOCK
from hullspeed.kernels.cpu.int_tile import BYTES_4, BYTES_8, PANEL, make_tile, quantize_block
from hullspeed.kernels.cpu.jit import kernel

Floats = NDArray[np.float32]
Shorts = NDArray[np.int16]
Bytes = NDArray[np.uint8]

# Eight rows x two vectors of sums leave room for codes and activations in 32 registers.
_ROWS = 8
_4x8, _4x4, _4x2, _4x1 = (make_tile(rows, 4) for rows in (_ROWS, 4, 2, 1))
_8x8, _8x4, _8x2, _8x1 = (make_tile(rows, 8) for rows in (_ROWS, 4, 2, 1))

_CACHE_BYTES = 400_000  # of activations read again for each panel: they stay in L2
_PARALLEL_QUANTIZE = 32  # rows


@kernel()
def _quantize(
    x: Floats, codes: Shorts, scale: Floats, total: Floats, first: int, last: int
) -> None:
    """Rows ``first .. last``."""
    blocks = scale.shape[1]
    for b in range(first * blocks, last * blocks):
        quantize_block(x, b * BLOCK, codes, scale, total, b)


@kernel()
def _multiply(
    x: Shorts, scale: Floats, total: Floats, weight: Bytes, bits: int, bias: Floats, out: Floats,
    first: int, last: int,
) -> None:  # fmt: skip
    """Panels ``first .. last`` of the outputs."""
    rows, depth = x.shape
    blocks, ldc = depth // BLOCK, out.shape[1]
    panel_bytes = blocks * (BYTES_4 if bits == 4 else BYTES_8)
    chunk = max(_ROWS, _CACHE_BYTES // (2 * depth) // _ROWS * _ROWS)
    for start in range(0, rows, chunk):
        end = min(rows, start + chunk)
        for panel in range(first, last):
            w0, b0 = panel * panel_bytes, panel * PANEL
            r = start
            while r < end:
                r += _tile(
                    end - r, bits, x, r * depth, scale, total, r * blocks, blocks,
                    weight, w0, bias, b0, out, r * ldc + b0, ldc,
                )  # fmt: skip


@kernel()
def _tile(
    left: int, bits: int, x: Shorts, x0: int, scale: Floats, total: Floats, s0: int, blocks: int,
    w: Bytes, w0: int, bias: Floats, b0: int, c: Floats, c0: int, ldc: int,
) -> int:  # fmt: skip
    """The widest tile within the rows ``left``; returns its rows."""
    if bits == 4:
        if left >= _ROWS:
            _4x8(x, x0, scale, total, s0, blocks, w, w0, bias, b0, c, c0, ldc)
        elif left >= 4:
            _4x4(x, x0, scale, total, s0, blocks, w, w0, bias, b0, c, c0, ldc)
        elif left >= 2:
            _4x2(x, x0, scale, total, s0, blocks, w, w0, bias, b0, c, c0, ldc)
        else:
            _4x1(x, x0, scale, total, s0, blocks, w, w0, bias, b0, c, c0, ldc)
    elif left >= _ROWS:
        _8x8(x, x0, scale, total, s0, blocks, w, w0, bias, b0, c, c0, ldc)
    elif left >= 4:
        _8x4(x, x0, scale, total, s0, blocks, w, w0, bias, b0, c, c0, ldc)
    elif left >= 2:
        _8x2(x, x0, scale, total, s0, blocks, w, w0, bias, b0, c, c0, ldc)
    else:
        _8x1(x, x0, scale, total, s0, blocks, w, w0, bias, b0, c, c0, ldc)
    return _ROWS if left >= _ROWS else 4 if left >= 4 else 2 if left >= 2 else 1


@kernel()
def linear(x: Floats, weight: Bytes, bits: int, bias: Floats, out: Floats) -> None:
    """``out[T, N] = x[T, K] @ weight.T + bias`` for a packed weight with codes of ``bits`` bits."""
    rows, blocks = len(x), x.shape[1] // BLOCK
    codes = np.empty(x.shape, np.int16)
    scale, total = np.empty((rows, blocks), np.float32), np.empty((rows, blocks), np.float32)
    _quantize(x, codes, scale, total, 0, rows)
    _multiply(codes, scale, total, weight, bits, bias, out, 0, out.shape[1] // PANEL)


@kernel(parallel=True)
def linear_parallel(
    x: Floats, weight: Bytes, bits: int, bias: Floats, out: Floats, n_parts: int
) -> None:
    """:func:`linear` by ``n_parts`` threads."""
    rows, blocks = len(x), x.shape[1] // BLOCK
    codes = np.empty(x.shape, np.int16)
    scale, total = np.empty((rows, blocks), np.float32), np.empty((rows, blocks), np.float32)
    if rows < _PARALLEL_QUANTIZE:
        _quantize(x, codes, scale, total, 0, rows)
    else:
        for p in numba.prange(n_parts):
            first, last = rows * p // n_parts, rows * (p + 1) // n_parts
            _quantize(x, codes, scale, total, first, last)
    n = out.shape[1] // PANEL
    for p in numba.prange(n_parts):
        first, last = n * p // n_parts, n * (p + 1) // n_parts
        _multiply(codes, scale, total, weight, bits, bias, out, first, last)
