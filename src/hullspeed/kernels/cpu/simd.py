"""Building blocks that numba cannot express: a register-blocked matrix tile and a bit cast.

Written as LLVM IR through numba's intrinsics, so that LLVM picks the instructions of the machine
(AVX-512, AVX2, NEON); nothing is compiled at install.
"""

# numba reads the parameters of an intrinsic by position and name, used or not.
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba.extending
import numpy as np
from llvmlite import ir
from numba.core import cgutils as untyped_cgutils
from numba.core import types

from hullspeed.kernels.cpu.formats import LANES, as_float, load_floats
from hullspeed.kernels.cpu.jit import config, kernel

intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.extending.intrinsic
cgutils: Any = untyped_cgutils

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INT = ir.IntType(64)
_CONTRACT = ("contract",)  # multiply and add may become one instruction


def _avx512() -> bool:
    """Whether the code is for AVX-512: numba's target, which is this machine unless told."""
    if config.CPU_NAME:
        return "+avx512f" in (config.CPU_FEATURES or "")
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))


# A tile of rows x (vectors x LANES) accumulators must stay in registers beside one row of B and
# one broadcast of A: 32 registers of 16 floats with AVX-512, 16 of 8 with AVX2.
TILE_ROWS, TILE_VECTORS = (6, 4) if _avx512() else (6, 1)


def make_tile(rows: int, vectors: int) -> Callable[..., Any]:
    """The intrinsic ``tile(a, a0, lda, b, b0, ldb, c, c0, ldc, depth, keep, soon, soon0)``.

    ``C[rows, vectors * 16] = (C if keep else 0) + A[rows, depth] @ B[depth, vectors * 16]`` from
    flat offsets a0, b0, c0 with row strides lda, ldb, ldc. A and C are float32, B may hold any of
    the formats of :mod:`hullspeed.kernels.cpu.formats`. Sums run over depth in order, so a result
    does not depend on the tile it was computed in. Meanwhile as many bytes as a B of this width
    has are fetched from ``soon`` (of B's format), flat offset soon0, into the cache.
    """

    @intrinsic
    def tile(
        typingctx: Any, a: Any, a0: Any, lda: Any, b: Any, b0: Any, ldb: Any,
        c: Any, c0: Any, ldc: Any, depth: Any, keep: Any, soon: Any, soon0: Any,
    ) -> Any:  # fmt: skip
        i = types.intp
        return types.void(a, i, i, b, i, i, c, i, i, i, i, soon, i), _tile_codegen(rows, vectors)

    return tile


def _tile_codegen(rows: int, vectors: int) -> Callable[..., Any]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pointer(which: int) -> Any:
            array = context.make_array(signature.args[which])(context, builder, args[which])
            return builder.gep(array.data, [args[which + 1]])

        a, b, c, soon = pointer(0), pointer(3), pointer(6), pointer(11)
        lda, ldb, ldc, depth, keep = args[2], args[5], args[8], args[9], args[10]
        element = signature.args[3].dtype
        # Vectors of codes in a cache line, which is fetched once.
        line_vectors = max(1, 64 // (LANES * element.bitwidth // 8))

        def code(base: Any, row: Any, stride: Any, vector: int) -> Any:
            offset = builder.add(builder.mul(row, stride), _INT(vector * LANES))
            return builder.gep(base, [offset])

        def at(base: Any, row: Any, stride: Any, vector: int) -> Any:
            return builder.bitcast(code(base, row, stride, vector), _VECTOR.as_pointer())

        def load(address: Any) -> Any:
            value = builder.load(address)
            value.align = 4
            return value

        cells = [(r, v) for r in range(rows) for v in range(vectors)]
        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in cells]
        with builder.if_else(builder.icmp_signed("!=", keep, _INT(0))) as (kept, fresh):
            with kept:
                for (r, v), total in zip(cells, sums, strict=True):
                    builder.store(load(at(c, _INT(r), ldc, v)), total)
            with fresh:
                for total in sums:
                    builder.store(ir.Constant(_VECTOR, None), total)
        with cgutils.for_range(builder, depth) as loop:
            row = [
                load_floats(builder, code(b, loop.index, ldb, v), element) for v in range(vectors)
            ]
            for v in range(0, vectors if rows < TILE_ROWS else 0, line_vectors):
                prefetch(builder, code(soon, loop.index, _INT(vectors * LANES), v))
            for r in range(rows):
                offset = builder.add(builder.mul(_INT(r), lda), loop.index)
                scalar = _broadcast(builder, builder.load(builder.gep(a, [offset])))
                for v in range(vectors):
                    total = sums[r * vectors + v]
                    product = builder.fmul(scalar, row[v], flags=_CONTRACT)
                    builder.store(
                        builder.fadd(product, builder.load(total), flags=_CONTRACT), total
                    )
        for (r, v), total in zip(cells, sums, strict=True):
            builder.store(builder.load(total), at(c, _INT(r), ldc, v)).align = 4
        return context.get_dummy_value()

    return codegen


def prefetch(builder: Any, address: Any) -> None:
    """Emit: fetch one cache line for reading into L2 (L1 is full of what is at hand)."""
    word = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), word, word, word])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    line = builder.bitcast(address, ir.IntType(8).as_pointer())
    builder.call(fetch, [line, word(0), word(2), word(1)])


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit: ``a * b + c`` of floats or vectors, rounded once on every machine, so that results do
    not depend on it.
    """
    kind = a.type
    name = "llvm.fma.f32" if kind == _FLOAT else f"llvm.fma.v{kind.count}f32"
    signature = ir.FunctionType(kind, [kind] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), [a, b, c])


def _broadcast(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.IntType(32)(0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), mask)


@intrinsic
def half_as_float(typingctx: Any, bits: Any) -> Any:
    """The float32 equal to the fp16 number whose bit pattern is the uint16 ``bits``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _FLOAT)

    return types.float32(types.uint16), codegen


@intrinsic
def total_of(typingctx: Any, line: Any, n: Any) -> Any:
    """Sum of the first ``n`` of a contiguous float32 array, a multiple of 16, in an order of its
    own: 16 sums of every 16th, then halves onto halves. A loop that LLVM may reorder has another
    last bit wherever it is compiled.
    """
    if line.layout != "C":
        return None  # numba says that no such function is known

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        sums = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None))
        vectors = builder.sdiv(args[1], _INT(LANES))
        with cgutils.for_range(builder, vectors) as loop:
            place = builder.gep(data, [builder.mul(loop.index, _INT(LANES))])
            value = builder.load(builder.bitcast(place, _VECTOR.as_pointer()))
            value.align = 4
            builder.store(builder.fadd(builder.load(sums), value), sums)
        return folded(builder, builder.load(sums))

    return types.float32(line, types.intp), codegen


def folded(builder: Any, vector: Any) -> Any:
    """Emit: the sum of a vector's lanes, halves onto halves."""
    width = LANES
    while width > 1:
        width //= 2
        halves = [_lanes(builder, vector, range(first, first + width)) for first in (0, width)]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, ir.IntType(32)(0))


def _lanes(builder: Any, vector: Any, which: range) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(which)), list(which))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)
_HIGHEST = np.float32(88.0)


@kernel(math="fused")
def exp(x: np.float32) -> np.float32:
    """e^x within 2 ulp for -87 <= x <= 88, clamped outside; a form that loops vectorise.

    Range reduction and polynomial of Cephes ``expf``.
    """
    x = min(max(x, _LOWEST), _HIGHEST)
    n = np.float32(np.int32(x * _LOG2_E + (np.float32(0.5) if x >= 0 else np.float32(-0.5))))
    x = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * x + np.float32(1.3981999507e-3)
    p = p * x + np.float32(8.3334519073e-3)
    p = p * x + np.float32(4.1665795894e-2)
    p = p * x + np.float32(1.6666665459e-1)
    p = p * x + np.float32(5.0000001201e-1)
    p = p * x * x + x + np.float32(1.0)
    return np.float32(p * as_float((np.int32(n) + np.int32(127)) << np.int32(23)))
