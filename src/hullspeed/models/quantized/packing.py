"""Codes of 2 to 8 bits out of and into 32-bit words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.cpu.jit import kernel

Codes = NDArray[np.uint8]
Words = NDArray[np.uint32]


def unpack(words: Words, bits: int, n_codes: int) -> Codes:
    """``[rows, n_words]`` to ``[rows, n_codes]``: each row a stream of ``bits``-bit codes, the
    first in the lowest bits; a code may straddle two words.
    """
    words = np.ascontiguousarray(words)
    if bits == 8:
        return words.view(np.uint8)[:, :n_codes]
    codes = np.empty((len(words), n_codes), np.uint8)
    if bits == 4:
        packed = words.view(np.uint8)
        codes[:, 0::2] = packed[:, : (n_codes + 1) // 2] & 15
        codes[:, 1::2] = packed[:, : n_codes // 2] >> 4
    else:
        _unpack(words, bits, codes)
    return codes


def pack(codes: Codes, bits: int) -> NDArray[np.int32]:
    """The inverse of :func:`unpack` for 4 and 8 bits; a last word is filled up with zeros."""
    padded: Codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (32 // bits))))
    if bits == 4:
        padded = padded[:, 0::2] | np.left_shift(padded[:, 1::2], np.uint8(4))
    return np.ascontiguousarray(padded).view(np.int32)


def nibbles(packed: NDArray[np.uint8]) -> Codes:
    """``[..., n]`` bytes to ``[..., 2 n]`` codes of four bits, the low one first."""
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes


@kernel()
def _unpack(words: Words, bits: int, codes: Codes) -> None:
    mask = np.uint64(2**bits - 1)
    for r in range(codes.shape[0]):
        for c in range(codes.shape[1]):
            bit = c * bits
            word = bit // 32
            pair = np.uint64(words[r, word])
            if bit % 32 + bits > 32:
                pair |= np.uint64(words[r, word + 1]) << np.uint64(32)
            codes[r, c] = (pair >> np.uint64(bit % 32)) & mask
