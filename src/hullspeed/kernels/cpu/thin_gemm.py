"""Products of few rows with a float32 weight: decoding, where the time is that of reading it.

MKL reads a weight at a third of the memory's speed when it meets few rows; plain dot products,
which LLVM vectorises, read it as fast as it comes.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.cpu.jit import kernel

Floats = NDArray[np.float32]

# From here on four rows of the weight share each load of x; below, reading is all the time.
_SHARED_LOADS = 9
MAX_ROWS = 32
"""With more, MKL is as fast."""


@kernel()
def linear(x: Floats, weight: Floats, out: Floats, first: int, last: int) -> None:
    """Columns ``first .. last`` of ``out = x @ weight.T``: ``[T, K]``, ``[N, K]``, ``[T, N]``."""
    row = first
    if len(x) >= _SHARED_LOADS:
        while row + 4 <= last:
            for t in range(len(x)):
                _four_dots(x[t], weight, row, out[t])
            row += 4
    while row < last:
        for t in range(len(x)):
            out[t, row] = _dot(x[t], weight[row])
        row += 1


@kernel()
def _dot(a: Floats, b: Floats) -> np.float32:
    total = np.float32(0)
    for k in range(len(b)):
        total += a[k] * b[k]
    return total


@kernel()
def _four_dots(x: Floats, weight: Floats, row: int, out: Floats) -> None:
    a, b, c, d = weight[row], weight[row + 1], weight[row + 2], weight[row + 3]
    of_a = of_b = of_c = of_d = np.float32(0)
    for k in range(len(a)):
        value = x[k]
        of_a += value * a[k]
        of_b += value * b[k]
        of_c += value * c[k]
        of_d += value * d[k]
    out[row], out[row + 1], out[row + 2], out[row + 3] = of_a, of_b, of_c, of_d


@kernel(parallel=True)
def linear_parallel(x: Floats, weight: Floats, out: Floats, n_parts: int) -> None:
    """:func:`linear` by ``n_parts`` threads, by columns."""
    n = len(weight)
    for p in numba.prange(n_parts):
        linear(x, weight, out, n * p // n_parts, n * (p + 1) // n_parts)
