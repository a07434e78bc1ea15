"""Number formats of eight bits and fewer: the number that each code stands for."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Levels = NDArray[np.float32]

E4M3_MAX = 448.0

# OCP Microscaling Formats, table of E2M1: sign in bit 3.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def e4m3() -> Levels:
    """float8_e4m3fn: 256 codes; two are NaN, none is infinite.

    Bias 7, three bits of mantissa. Source: "FP8 Formats for Deep Learning" (arXiv 2209.05433).
    """
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[code & 127 == 127] = np.nan
    return _fixed(np.where(code < 128, size, -size))


@cache
def e2m1() -> Levels:
    """FP4: 16 codes."""
    return _fixed(np.array([*_E2M1, *(-level for level in _E2M1)]))


@cache
def e8m0() -> Levels:
    """Powers of two of microscaling: 2^(code - 127); 255 is NaN."""
    power = 2.0 ** (np.arange(256) - 127.0)
    power[255] = np.nan
    return _fixed(power)


@cache
def integers(bits: int, offset: int) -> Levels:
    """Code minus ``offset``: unsigned integers as they are stored in words."""
    return _fixed(np.arange(2**bits) - float(offset))


@cache
def int8() -> Levels:
    """Two's complement."""
    return _fixed(np.arange(256, dtype=np.uint8).view(np.int8))


def _fixed(values: NDArray[np.generic]) -> Levels:
    levels: Levels = values.astype(np.float32)
    levels.flags.writeable = False
    return levels
