"""Small matrix products inside a kernel, tile by tile."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.cpu.formats import LANES
from hullspeed.kernels.cpu.jit import kernel
from hullspeed.kernels.cpu.simd import TILE_ROWS, TILE_VECTORS, make_tile

_tile_full = make_tile(TILE_ROWS, TILE_VECTORS)
_tile_3 = make_tile(3, TILE_VECTORS)
_tile_2 = make_tile(2, TILE_VECTORS)
_tile_1 = make_tile(1, TILE_VECTORS)
_tile_full_narrow = make_tile(TILE_ROWS, 1)
_tile_1_narrow = make_tile(1, 1)

_WIDE = TILE_VECTORS * LANES


@kernel()
def matmul(
    rows: int, columns: int, depth: int,
    a: NDArray[np.float32], a0: int,
    b: NDArray[Any], b0: int,
    c: NDArray[np.float32], c0: int,
    keep: int,
    soon: NDArray[Any], soon0: int,
) -> None:  # fmt: skip
    """``C[rows, columns] = (C if keep else 0) + A[rows, depth] @ B[depth, columns]``.

    A starts at flat offset a0 of ``a`` and has rows as long as those of ``a``; B and C likewise.
    ``columns`` is a multiple of 16. B and ``soon`` may hold codes of one format. With few rows
    (decoding) the time is that of reading B, so what is needed next, ``soon`` from flat offset
    soon0, is fetched meanwhile.
    """
    lda, ldb, ldc = a.shape[-1], b.shape[-1], c.shape[-1]
    column = 0
    while column + _WIDE <= columns:
        row = 0
        while row < rows:
            left = rows - row
            ar, bc, cr = a0 + row * lda, b0 + column, c0 + row * ldc + column
            if left >= TILE_ROWS:
                _tile_full(a, ar, lda, b, bc, ldb, c, cr, ldc, depth, keep, soon, soon0)
                row += TILE_ROWS
            elif left >= 3:
                _tile_3(a, ar, lda, b, bc, ldb, c, cr, ldc, depth, keep, soon, soon0)
                row += 3
            elif left == 2:
                _tile_2(a, ar, lda, b, bc, ldb, c, cr, ldc, depth, keep, soon, soon0)
                row += 2
            else:
                _tile_1(a, ar, lda, b, bc, ldb, c, cr, ldc, depth, keep, soon, soon0)
                row += 1
        column += _WIDE
    while column < columns:
        row = 0
        while row < rows:
            ar, bc, cr = a0 + row * lda, b0 + column, c0 + row * ldc + column
            if rows - row >= TILE_ROWS:
                _tile_full_narrow(a, ar, lda, b, bc, ldb, c, cr, ldc, depth, keep, soon, soon0)
                row += TILE_ROWS
            else:
                _tile_1_narrow(a, ar, lda, b, bc, ldb, c, cr, ldc, depth, keep, soon, soon0)
                row += 1
        column += LANES
