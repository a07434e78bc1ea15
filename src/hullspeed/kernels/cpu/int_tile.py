"""Register tiles of products with block-quantised weights, exact in integers within a block.

AVX-512 VNNI's ``vpdpwssd`` adds 32 products of int16 to 16 int32 sums, twice as many as a float32
instruction. Codes are widened to int16 in registers, so weights are read as packed. Written as LLVM
IR, as in :mod:`hullspeed.kernels.cpu.simd`.
"""

# numba reads the parameters of an intrinsic by position and name, used or not.
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import types

from hullspeed.kernels.blocks import BLOCK
from hullspeed.kernels.cpu.jit import config
from hullspeed.kernels.cpu.simd import cgutils, intrinsic

PANEL = 32  # outputs packed together: two vectors
VECTORS = PANEL // 16
BYTES_4 = 16 * PANEL + 2 * 2 * PANEL  # a block of a panel: codes, then scales and mins in fp16
BYTES_8 = 32 * PANEL + 2 * PANEL  # codes, then scales

_FLOAT = ir.FloatType()
_WORD = ir.IntType(32)
_INT = ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, 16)
_HALVES = ir.VectorType(ir.HalfType(), 16)
_WORDS = ir.VectorType(_WORD, 16)
_SHORTS = ir.VectorType(ir.IntType(16), 32)
_HALF_BLOCK = ir.VectorType(ir.IntType(16), 16)
_BYTES = ir.VectorType(ir.IntType(8), 32)
_LARGEST = 32767.0  # of an int16 code: 32 * 32767 * 128 < 2^31, so sums of a block never overflow


def has_vnni() -> bool:
    """Whether the code is for a CPU with AVX-512 VNNI: numba's target, or this machine."""
    if config.CPU_NAME:
        return "+avx512vnni" in (config.CPU_FEATURES or "")
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))


def make_tile(rows: int, bits: int) -> Callable[..., Any]:
    """The intrinsic ``tile(x, x0, scale, total, s0, blocks, w, w0, bias, b0, c, c0, ldc)``.

    ``C[rows, 32] = bias[32] + X @ W.T`` for one panel W (uint8, from flat offset w0) of codes of
    ``bits`` bits, and int16 rows X of ``blocks`` blocks from x0, with each block's scale, and scale
    times sum, from s0. C is float32 with row stride ldc. Every row adds up its blocks in order, so
    a result does not depend on the tile it was computed in.
    """

    @intrinsic
    def tile(
        typingctx: Any, x: Any, x0: Any, scale: Any, total: Any, s0: Any, blocks: Any,
        w: Any, w0: Any, bias: Any, b0: Any, c: Any, c0: Any, ldc: Any,
    ) -> Any:  # fmt: skip
        i = types.intp
        signature = types.void(x, i, scale, total, i, i, w, i, bias, i, c, i, i)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def pointer(which: int, offset: int) -> Any:
                array = context.make_array(signature.args[which])(context, builder, args[which])
                return builder.gep(array.data, [args[offset]])

            tile = _Tile(builder, rows, bits)
            tile.x, tile.scale, tile.total = pointer(0, 1), pointer(2, 4), pointer(3, 4)
            tile.blocks, tile.weights = args[5], pointer(6, 7)
            tile.compute(pointer(8, 9), pointer(10, 11), args[12])
            return context.get_dummy_value()

        return signature, codegen

    return tile


class _Tile:
    """Emits the code of one tile."""

    x: Any
    scale: Any
    total: Any
    blocks: Any
    weights: Any

    def __init__(self, builder: Any, rows: int, bits: int) -> None:
        self.builder, self.rows, self.bits = builder, rows, bits
        self.cells = [(r, v) for r in range(rows) for v in range(VECTORS)]

    def compute(self, bias: Any, c: Any, ldc: Any) -> None:
        """All blocks, from the bias to C."""
        builder = self.builder
        sums = {cell: cgutils.alloca_once(builder, _FLOATS) for cell in self.cells}
        for (_, v), total in zip(self.cells, sums.values(), strict=True):
            builder.store(self._load(bias, _INT(16 * v), _FLOATS, 4), total)
        with cgutils.for_range(builder, self.blocks) as loop:
            size = _INT(BYTES_4 if self.bits == 4 else BYTES_8)
            panel = builder.gep(self.weights, [builder.mul(loop.index, size)])
            dots = self._dots(panel, loop.index)
            self._add_scaled(sums, dots, panel, loop.index)
        for (r, v), total in sums.items():
            offset = builder.add(builder.mul(_INT(r), ldc), _INT(16 * v))
            target = builder.bitcast(builder.gep(c, [offset]), _FLOATS.as_pointer())
            builder.store(builder.load(total), target).align = 4

    def _dots(self, panel: Any, block: Any) -> dict[tuple[int, int], Any]:
        """Integer products of one block: 16 int32 a cell."""
        # Four instructions must be under way at once; with few rows that takes two sums a cell.
        chains = 2 if len(self.cells) <= 4 else 1
        zero = ir.Constant(_WORDS, None)
        sums = [dict.fromkeys(self.cells, zero) for _ in range(chains)]
        for p in range(16 // (8 // self.bits)):
            for pair, vectors in self._codes(panel, p):
                chain = sums[pair // 8 % chains]
                for r in range(self.rows):
                    x = self._pair(r, pair, block)
                    for v, codes in enumerate(vectors):
                        chain[r, v] = self._call(
                            "llvm.x86.avx512.vpdpwssd.512", _WORDS, chain[r, v], x, codes
                        )
        if chains == 1:
            return sums[0]
        return {cell: self.builder.add(sums[0][cell], sums[1][cell]) for cell in self.cells}

    def _codes(self, panel: Any, p: int) -> list[tuple[int, list[Any]]]:
        """Codes of the pairs of inputs that lie together at p: the pair's number and, for each
        vector, 16 outputs x 2 inputs of int16.
        """
        builder = self.builder
        raw = [self._load(panel, _INT(64 * p + 32 * v), _BYTES, 1) for v in range(VECTORS)]
        if self.bits == 8:
            wide = [builder.sext(codes, _SHORTS) for codes in raw]
            return [(p, [builder.bitcast(codes, _WORDS) for codes in wide])]
        wide = [builder.zext(codes, _SHORTS) for codes in raw]
        low = [builder.and_(codes, ir.Constant(_SHORTS, [15] * 32)) for codes in wide]
        high = [builder.lshr(codes, ir.Constant(_SHORTS, [4] * 32)) for codes in wide]
        return [
            (pair, [builder.bitcast(codes, _WORDS) for codes in half])
            for pair, half in ((p, low), (p + 8, high))
        ]

    def _pair(self, r: int, pair: int, block: Any) -> Any:
        """Two neighbouring activations of a row, 16 times."""
        builder = self.builder
        row = builder.mul(builder.mul(_INT(r), self.blocks), _INT(BLOCK))
        offset = builder.add(builder.add(row, builder.mul(block, _INT(BLOCK))), _INT(2 * pair))
        return _broadcast(builder, self._load(self.x, offset, _WORD, 2), _WORDS)

    def _add_scaled(self, sums: Any, dots: Any, panel: Any, block: Any) -> None:
        """``sum += dot * (d * scale) + m * total`` of one block."""
        builder = self.builder
        start = BLOCK * PANEL * self.bits // 8

        def halves(v: int, start: int) -> Any:
            stored = self._load(panel, _INT(start + 32 * v), _HALVES, 2)
            return builder.fpext(stored, _FLOATS)

        d = [halves(v, start) for v in range(VECTORS)]
        m = [halves(v, start + 2 * PANEL) for v in range(VECTORS)] if self.bits == 4 else None
        for r, v in self.cells:
            at = builder.add(builder.mul(_INT(r), self.blocks), block)
            scale = _broadcast(builder, self._load(self.scale, at, _FLOAT, 4), _FLOATS)
            value = builder.load(sums[r, v])
            dot = builder.sitofp(dots[r, v], _FLOATS)
            value = self._fma(dot, builder.fmul(d[v], scale), value)
            if m is not None:
                total = _broadcast(builder, self._load(self.total, at, _FLOAT, 4), _FLOATS)
                value = self._fma(m[v], total, value)
            builder.store(value, sums[r, v])

    def _load(self, base: Any, offset: Any, kind: Any, align: int) -> Any:
        address = self.builder.gep(base, [offset])
        value = self.builder.load(self.builder.bitcast(address, kind.as_pointer()))
        value.align = align
        return value

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._call("llvm.fma.v16f32", _FLOATS, a, b, c)

    def _call(self, name: str, result: Any, *operands: Any) -> Any:
        return _call(self.builder, name, result, *operands)


def _call(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


def _broadcast(builder: Any, scalar: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _WORD(0))
    mask = ir.Constant(_WORDS, None)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)


@intrinsic
def quantize_block(
    typingctx: Any, x: Any, x0: Any, codes: Any, scale: Any, total: Any, s0: Any
) -> Any:
    """32 float32 from flat offset x0 to int16 at x0 of ``codes``, with their scale, and scale times
    sum, at s0. The scale is the largest magnitude / 32767; a NaN or an infinity becomes the scale.
    """
    i = types.intp
    return types.void(x, i, codes, scale, total, i), _quantize


def _quantize(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    def address(which: int, offset: Any, kind: Any) -> Any:
        array = context.make_array(signature.args[which])(context, builder, args[which])
        return builder.bitcast(builder.gep(array.data, [offset]), kind.as_pointer())

    starts = [builder.add(args[1], _INT(16 * h)) for h in range(2)]
    halves = [builder.load(address(0, start, _FLOATS)) for start in starts]
    for half in halves:
        half.align = 4
    # As integers magnitudes are in order, with NaN above all.
    mask = ir.Constant(_WORDS, [0x7FFFFFFF] * 16)
    bits = [builder.and_(builder.bitcast(half, _WORDS), mask) for half in halves]
    more = builder.select(builder.icmp_unsigned(">", *bits), *bits)
    largest = builder.bitcast(_call(builder, "llvm.vector.reduce.umax.v16i32", _WORD, more), _FLOAT)
    scale = builder.fdiv(largest, ir.Constant(_FLOAT, _LARGEST))
    # Below the smallest normal number the factor would overflow: such a block counts as zeros.
    some = builder.fcmp_ordered(">", largest, ir.Constant(_FLOAT, 2.0**-110))
    factor = builder.fdiv(ir.Constant(_FLOAT, _LARGEST), largest)
    factor = builder.select(some, factor, ir.Constant(_FLOAT, 0.0))
    words = []
    for start, half in zip(starts, halves, strict=True):
        scaled = builder.fmul(half, _broadcast(builder, factor, _FLOATS))
        words.append(builder.fptosi(_call(builder, "llvm.rint.v16f32", _FLOATS, scaled), _WORDS))
        target = address(2, start, _HALF_BLOCK)
        builder.store(builder.trunc(words[-1], _HALF_BLOCK), target).align = 2
    summed = _call(builder, "llvm.vector.reduce.add.v16i32", _WORD, builder.add(*words))
    builder.store(scale, address(3, args[5], _FLOAT))
    product = builder.fmul(scale, builder.sitofp(summed, _FLOAT))
    builder.store(product, address(4, args[5], _FLOAT))
    return context.get_dummy_value()
