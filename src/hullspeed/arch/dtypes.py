"""Number formats and their size.

Sizes of block formats (GGUF types, NVFP4) include their scales only where a format stores the
scales inside the block; formats with scales in a tensor of their own are handled in ``quant.py``.
"""

from __future__ import annotations

from fractions import Fraction

from hullspeed.errors import UsageError

# bits per element
_BITS: dict[str, int] = {
    "fp64": 64, "fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint8": 8, "bool": 8, "int4": 4, "fp4": 4,
}  # fmt: skip

PER_TOKEN_HEAD = {"int8_per_token_head": "int8", "fp8_per_token_head": "fp8"}
"""Formats of keys and values with a float32 scale for each token and head, and what they scale."""
SCALE_BYTES = 4


def bytes_per_element(dtype: str) -> Fraction:
    """Exact bytes of one element, e.g. ``Fraction(1, 2)`` for ``int4``.

    Raises:
        UsageError: for a name that is not a number format.
    """
    return Fraction(_bits(dtype), 8)


def nbytes(elements: int, dtype: str) -> int:
    """Bytes of ``elements`` values of ``dtype``, rounded up to a whole byte.

    Raises:
        UsageError: for a name that is not a number format.
    """
    return -(-elements * _bits(dtype) // 8)


def _bits(dtype: str) -> int:
    if dtype not in _BITS:
        raise UsageError(
            "unknown number format", seen=dtype, fix=f"use one of {', '.join(sorted(_BITS))}"
        )
    return _BITS[dtype]
