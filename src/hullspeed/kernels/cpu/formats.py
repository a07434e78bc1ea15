"""Number formats of keys and values inside kernels.

NumPy has no type for bf16 or e4m3, so a type of the same width stands for each: numba compiles a
kernel once for every format, and in machine code nothing is left of the choice. A load makes 16
floats of 16 codes: for int8 an integer conversion, for bf16 a shift; an e4m3 number has the bits of
an fp16 one, seven places lower, whose exponent means 2^8 times less.
"""

# numba reads the parameters of an intrinsic by position and name, used or not.
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.extending
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numpy.typing import NDArray

from hullspeed.kernels.cpu.jit import kernel

intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.extending.intrinsic

FP32, FP16, BF16, INT8, FP8 = range(5)

STAND_INS: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.float32,
    torch.float16: torch.uint16,
    torch.bfloat16: torch.int16,
    torch.int8: torch.int8,
    torch.float8_e4m3fn: torch.uint8,
}
_KINDS = {
    types.float32: FP32, types.uint16: FP16, types.int16: BF16, types.int8: INT8, types.uint8: FP8,
}  # fmt: skip

LANES = 16  # floats of a column vector: one AVX-512 register, two of AVX2, four of NEON
LOADED_FP8 = np.float32(2.0**8)  # what a loaded e4m3 number must be multiplied by

_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)


def load_floats(builder: Any, address: Any, element: Any) -> Any:
    """16 codes of the numba type ``element`` from ``address`` on, as float32; e4m3 numbers come
    divided by :data:`LOADED_FP8`, exactly.
    """
    kind = _KINDS[element]
    width = {FP32: 4, FP16: 2, BF16: 2}.get(kind, 1)
    stored = _FLOAT if kind == FP32 else ir.IntType(8 * width)
    vector = ir.VectorType(stored, LANES)
    codes = builder.load(builder.bitcast(address, vector.as_pointer()))
    codes.align = width
    return _floats(builder, codes, kind)


def _floats(builder: Any, codes: Any, kind: int) -> Any:
    shorts, words = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.IntType(32), LANES)
    halves = ir.VectorType(ir.HalfType(), LANES)
    if kind == FP16:
        return builder.fpext(builder.bitcast(codes, halves), _FLOATS)
    if kind == BF16:
        sixteen = ir.Constant(words, [16] * LANES)
        return builder.bitcast(builder.shl(builder.zext(codes, words), sixteen), _FLOATS)
    if kind == INT8:
        return builder.sitofp(builder.sext(codes, words), _FLOATS)
    if kind == FP8:
        seven = ir.Constant(shorts, [7] * LANES)
        # The sign comes along twice; once is enough.
        mask = ir.Constant(shorts, [0xBFFF] * LANES)
        moved = builder.and_(builder.shl(builder.sext(codes, shorts), seven), mask)
        return builder.fpext(builder.bitcast(moved, halves), _FLOATS)
    return codes


@intrinsic
def kind_of(typingctx: Any, array: Any) -> Any:
    """Which format the elements of ``array`` stand for, known when a kernel is compiled."""
    kind = _KINDS[array.dtype]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(64), kind)

    return types.int64(array), codegen


@intrinsic
def _bits(typingctx: Any, x: Any) -> Any:
    """The bit pattern of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def as_float(typingctx: Any, bits: Any) -> Any:
    """The float32 whose bit pattern is the int32 ``bits``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), codegen


@intrinsic
def _half_bits(typingctx: Any, x: Any) -> Any:
    """The bit pattern of a float32 rounded to fp16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        return builder.zext(half, ir.IntType(32))

    return types.int32(types.float32), codegen


_LARGEST_INT8 = np.float32(127)
_LARGEST_FP8 = np.float32(448)
_LARGEST_FP16 = np.float32(65504)
_INFINITY = np.float32(np.inf)
_TINY = np.finfo(np.float32).tiny
_MAGNITUDE = np.int32(0x7FFFFFFF)
_NAN_BF16 = np.int32(0x7FC0)
_LEAST_NORMAL_FP8 = np.float32(2.0**-6)
_FP8_SUBNORMALS = np.float32(2.0**9)  # of them in 1
_FP8_BIAS = np.int32((127 - 7) << 3)


@kernel()
def encode(x: NDArray[np.float32], kind: int, codes: NDArray[np.int32]) -> np.float32:
    """Codes of a vector ``[D]`` in format ``kind``, and its scale (1 for formats without), as
    :func:`hullspeed.kernels.kv_codes.encode` rounds.
    """
    if kind == FP16:
        for i in range(len(x)):
            value = x[i]
            if value > _LARGEST_FP16 and value < _INFINITY:
                value = _LARGEST_FP16
            if value < -_LARGEST_FP16 and value > -_INFINITY:
                value = -_LARGEST_FP16
            codes[i] = _half_bits(value)
        return np.float32(1)
    if kind == BF16:
        for i in range(len(x)):
            bits = _bits(x[i])
            even = bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))
            codes[i] = even >> np.int32(16) if x[i] == x[i] else _NAN_BF16
        return np.float32(1)
    # As integers a NaN is above infinity and that above all numbers: a maximum keeps them.
    top = np.int32(0)
    for i in range(len(x)):
        top = max(top, _bits(x[i]) & _MAGNITUDE)
    scale: np.float32 = as_float(top) / (_LARGEST_INT8 if kind == INT8 else _LARGEST_FP8)
    divisor = max(scale, _TINY)
    if kind == INT8:
        for i in range(len(x)):
            codes[i] = np.int32(np.rint(x[i] / divisor))
        return scale
    for i in range(len(x)):
        codes[i] = _to_fp8(x[i] / divisor)
    return scale


@kernel()
def _to_fp8(x: np.float32) -> np.int32:
    """The e4m3 code of a finite ``x``, to nearest, ties to even, at most 448."""
    bits = _bits(x)
    size = min(as_float(bits & _MAGNITUDE), _LARGEST_FP8)
    # Below 2^-6 codes count in steps of 2^-9; the eighth is the least normal number.
    small = np.int32(np.rint(size * _FP8_SUBNORMALS))
    whole = _bits(size)
    even = whole + np.int32(0x7FFFF) + ((whole >> np.int32(20)) & np.int32(1))
    normal = (even >> np.int32(20)) - _FP8_BIAS
    sign = (bits >> np.int32(24)) & np.int32(0x80)
    code: np.int32 = sign | (small if size < _LEAST_NORMAL_FP8 else normal)
    return code


@kernel()
def times(scores: NDArray[np.float32], rows: int, scales: NDArray[np.float32], factor: np.float32
) -> None:  # fmt: skip
    """Multiply column j of the first ``rows`` rows by ``scales[j] * factor``."""
    for row in range(rows):
        line = scores[row]
        for j in range(len(line)):
            line[j] *= scales[j] * factor
