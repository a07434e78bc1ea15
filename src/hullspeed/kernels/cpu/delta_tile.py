"""The inner loop of the gated delta rule over a strip of a head's state, in LLVM IR.

A state is ``[k_dim, v_dim]``; its columns do not depend on each other, so a strip of a few vectors'
width stays in L1 over all tokens of a span. One pass over a strip does three things at once: it
applies a token (``S = decay * S + k d^T``), reads out (``S^T q``), and prepares the next token
(``S^T k_next``). Sums run over the rows in order and lanes never mix, so a result depends neither
on the width of the strip nor on how a prompt was cut into chunks.
"""

# numba reads the parameters of an intrinsic by position and name, used or not.
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils as untyped_cgutils
from numba.core import types

from hullspeed.kernels.cpu.formats import LANES
from hullspeed.kernels.cpu.simd import TILE_VECTORS, fma, intrinsic

cgutils: Any = untyped_cgutils

# Widths in vectors. NARROW keeps 128 rows of a strip in a 32 KiB L1 beside two keys and a query;
# WIDE reads whole rows, for a single token, where the time is that of memory.
NARROW, WIDE = (2, 8) if TILE_VECTORS > 1 else (1, 2)

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INT = ir.IntType(64)


def make_read(vectors: int) -> Callable[..., Any]:
    """The intrinsic ``read(state, s0, lds, k, k0, kv, kv0, depth)``: ``kv = S^T k`` of a strip.

    S starts at flat offset s0 of ``state`` and has rows lds apart; ``depth`` is k_dim.
    """

    @intrinsic
    def read(
        typingctx: Any, state: Any, s0: Any, lds: Any, k: Any, k0: Any, kv: Any, kv0: Any,
        depth: Any,
    ) -> Any:  # fmt: skip
        i = types.intp

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            ops = _Ops(context, builder, signature, args)
            s, keys, out = ops.pointer(0), ops.pointer(3), ops.pointer(5)
            sums = ops.zeros(vectors)
            with cgutils.for_range(builder, args[7]) as loop:
                key = ops.scalar(keys, loop.index)
                for v, total in enumerate(sums):
                    row = ops.load(s, loop.index, args[2], v)
                    builder.store(fma(builder, key, row, builder.load(total)), total)
            for v, total in enumerate(sums):
                ops.store(builder.load(total), out, _INT(0), _INT(0), v)
            return context.get_dummy_value()

        return types.void(state, i, i, k, i, kv, i, i), codegen

    return read


def make_step(vectors: int, *, ahead: bool) -> Callable[..., Any]:
    """The intrinsic that applies one token to a strip.

    ``step(source, s0, target, t0, lds, qk, q0, k0, next0, v, v0, kv, kv0, out, o0, decay, beta,
    depth)``: with ``d = beta * (v - decay * kv)``, where ``kv`` holds ``S^T k`` of the state at
    ``source``, write ``decay * S + k d^T`` to ``target`` and its product with q to ``out``; with
    ``ahead`` also its product with the key at ``next0`` to ``kv``.
    """

    @intrinsic
    def step(
        typingctx: Any, source: Any, s0: Any, target: Any, t0: Any, lds: Any, qk: Any, q0: Any,
        k0: Any, next0: Any, v: Any, v0: Any, kv: Any, kv0: Any, out: Any, o0: Any, decay: Any,
        beta: Any, depth: Any,
    ) -> Any:  # fmt: skip
        i, f = types.intp, types.float32
        signature = types.void(source, i, target, i, i, qk, i, i, i, v, i, kv, i, out, i, f, f, i)
        return signature, _step_codegen(vectors, ahead=ahead)

    return step


def _step_codegen(vectors: int, *, ahead: bool) -> Callable[..., Any]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ops = _Ops(context, builder, signature, args)
        source, target, lds = ops.pointer(0), ops.pointer(2), args[4]
        qk = ops.base(5)
        q, key, following = (builder.gep(qk, [args[n]]) for n in (6, 7, 8))
        values, kv, out = ops.pointer(9), ops.pointer(11), ops.pointer(13)
        decay, beta = ops.broadcast(args[15]), ops.broadcast(args[16])
        change = []
        for v in range(vectors):
            kept = builder.fmul(decay, ops.load(kv, _INT(0), _INT(0), v))
            gap = builder.fsub(ops.load(values, _INT(0), _INT(0), v), kept)
            change.append(builder.fmul(beta, gap))
        outs = ops.zeros(vectors)
        nexts = ops.zeros(vectors) if ahead else []
        with cgutils.for_range(builder, args[17]) as loop:
            k, r = ops.scalar(key, loop.index), ops.scalar(q, loop.index)
            n = ops.scalar(following, loop.index) if ahead else None
            for v in range(vectors):
                row = builder.fmul(decay, ops.load(source, loop.index, lds, v))
                row = fma(builder, k, change[v], row)
                ops.store(row, target, loop.index, lds, v)
                builder.store(fma(builder, r, row, builder.load(outs[v])), outs[v])
                if ahead:
                    builder.store(fma(builder, n, row, builder.load(nexts[v])), nexts[v])
        for v in range(vectors):
            ops.store(builder.load(outs[v]), out, _INT(0), _INT(0), v)
            if ahead:
                ops.store(builder.load(nexts[v]), kv, _INT(0), _INT(0), v)
        return context.get_dummy_value()

    return codegen


class _Ops:
    """Vector loads, stores and arithmetic of one intrinsic's code."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self._context, self._builder = context, builder
        self._signature, self._args = signature, args

    def base(self, which: int) -> Any:
        """First element of array argument ``which``."""
        make = self._context.make_array(self._signature.args[which])
        return make(self._context, self._builder, self._args[which]).data

    def pointer(self, which: int) -> Any:
        """Element of array argument ``which`` at the flat offset that follows it."""
        return self._builder.gep(self.base(which), [self._args[which + 1]])

    def zeros(self, n: int) -> list[Any]:
        """Accumulators; LLVM keeps them in registers."""
        sums = [cgutils.alloca_once(self._builder, _VECTOR) for _ in range(n)]
        for total in sums:
            self._builder.store(ir.Constant(_VECTOR, None), total)
        return sums

    def broadcast(self, scalar: Any) -> Any:
        """A vector of equal lanes."""
        blank = ir.Constant(_VECTOR, ir.Undefined)
        one = self._builder.insert_element(blank, scalar, ir.IntType(32)(0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
        return self._builder.shuffle_vector(one, blank, mask)

    def scalar(self, base: Any, index: Any) -> Any:
        """Element ``index``, in every lane."""
        return self.broadcast(self._builder.load(self._builder.gep(base, [index])))

    def _at(self, base: Any, row: Any, stride: Any, vector: int) -> Any:
        offset = self._builder.add(self._builder.mul(row, stride), _INT(vector * LANES))
        return self._builder.bitcast(self._builder.gep(base, [offset]), _VECTOR.as_pointer())

    def load(self, base: Any, row: Any, stride: Any, vector: int) -> Any:
        """Vector ``vector`` of row ``row``."""
        value = self._builder.load(self._at(base, row, stride, vector))
        value.align = 4
        return value

    def store(self, value: Any, base: Any, row: Any, stride: Any, vector: int) -> None:
        """Write vector ``vector`` of row ``row``."""
        self._builder.store(value, self._at(base, row, stride, vector)).align = 4
