"""Philox: random numbers computed from a key and a counter, so that no stream has a state.

Philox4x32 with 10 rounds: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC'11. Constants from its section 5.3; checked against the known answers of the Random123
library.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

Words = NDArray[np.uint64]


def philox4x32(counter: Words, key: Words) -> Words:
    """Four random 32-bit words for each row.

    Args:
        counter: ``[N, 4]``, 32-bit words.
        key: ``[N, 2]``, 32-bit words.

    Returns:
        ``[N, 4]``, 32-bit words.
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(_ROUNDS):
        product0, product1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _32) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(
    seeds: NDArray[np.uint64], positions: NDArray[np.uint64], attempt: int = 0
) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position, attempt)."""
    zeros = np.zeros_like(positions)
    counter = np.stack(
        [positions & _LOW, positions >> _32, np.full_like(positions, attempt), zeros], axis=1
    )
    words = philox4x32(counter, np.stack([seeds & _LOW, seeds >> _32], axis=1))
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
