"""Moves whole pages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.cpu.jit import kernel


@kernel()
def copy_pages(
    pool: NDArray[np.float32], sources: NDArray[np.int64], targets: NDArray[np.int64]
) -> None:
    """``pool[targets[i]] = pool[sources[i]]`` for ``[n_pages, ...]``, in order."""
    for i in range(len(sources)):
        pool[targets[i]] = pool[sources[i]]
