"""Products of few rows with a float32 weight: decoding, where the time is that of reading it.

MKL reads a weight at a third of the memory's speed when it meets few rows; dot products along its
rows, fetched some way ahead, read it as fast as it comes. A row's result does not depend on the
others nor on the number of threads.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.cpu.dots import make_dots
from hullspeed.kernels.cpu.jit import kernel
from hullspeed.kernels.cpu.simd import TILE_VECTORS

Floats = NDArray[np.float32]

# From here on several rows of the weight share each load of x; below, reading is all the time.
_SHARED_LOADS = 9
_SHARERS = TILE_VECTORS  # as many as registers hold
MAX_ROWS = 32
"""With more, MKL is as fast."""

_fetch, _dot, _shared = make_dots(1, ahead=True), make_dots(1), make_dots(_SHARERS)


@kernel()
def linear(x: Floats, weight: Floats, out: Floats, first: int, last: int) -> None:
    """Columns ``first .. last`` of ``out = x @ weight.T``: ``[T, K]``, ``[N, K]``, ``[T, N]``."""
    n, width = weight.shape
    row = first
    if len(x) >= _SHARED_LOADS:
        while row + _SHARERS <= last:
            for t in range(len(x)):
                _shared(x, t * width, weight, row * width, width, out, t * n + row, width)
            row += _SHARERS
    while row < last:
        for t in range(len(x)):
            if t == 0:
                _fetch(x, 0, weight, row * width, width, out, row, width)
            else:
                _dot(x, t * width, weight, row * width, width, out, t * n + row, width)
        row += 1


@kernel(parallel=True)
def linear_parallel(x: Floats, weight: Floats, out: Floats, n_parts: int) -> None:
    """:func:`linear` by ``n_parts`` threads, by columns."""
    n = len(weight)
    for p in numba.prange(n_parts):
        linear(x, weight, out, n * p // n_parts, n * (p + 1) // n_parts)
