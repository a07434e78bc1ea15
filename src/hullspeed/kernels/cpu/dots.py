"""Dot products whose sums have an order of their own, in LLVM IR.

A loop that LLVM may reorder, without which it does not vectorise, has another last bit wherever it
is compiled. Here a product is two vectors of sums, of every second vector of 16 elements, which are
added; then halves are added onto halves, then come the elements that fill no vector.
"""

# numba reads the parameters of an intrinsic by position and name, used or not.
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils as untyped_cgutils
from numba.core import types

from hullspeed.kernels.cpu.formats import LANES
from hullspeed.kernels.cpu.simd import fma, folded, intrinsic, prefetch

cgutils: Any = untyped_cgutils

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INT = ir.IntType(64)

_CHAINS = 2  # of sums: what hides the latency of adding
# Far enough that a line is there when it is due, at 15 GB/s a core and 100 ns.
_AHEAD_FLOATS = 512


@intrinsic
def dot_of(typingctx: Any, a: Any, b: Any, n: Any) -> Any:
    """Sum of the products of the first ``n`` of two contiguous float32 arrays."""
    if a.layout != "C" or b.layout != "C":
        return None  # numba says that no such function is known

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, y = (
            context.make_array(signature.args[which])(context, builder, args[which]).data
            for which in (0, 1)
        )
        (total,) = _sums(builder, x, [y], args[2], ahead=False)
        return total

    return types.float32(a, b, types.intp), codegen


def make_dots(rows: int, *, ahead: bool = False) -> Callable[..., Any]:
    """The intrinsic ``dots(x, x0, weight, w0, ldw, out, o0, n)``.

    ``out[o0 + r] = x[x0 : x0 + n] . weight[w0 + r * ldw : ... + n]`` for r below ``rows``, all
    flat offsets. A product does not depend on the rows it was computed with. ``ahead``: what
    follows in ``weight`` is fetched meanwhile.
    """

    @intrinsic
    def dots(
        typingctx: Any, x: Any, x0: Any, weight: Any, w0: Any, ldw: Any, out: Any, o0: Any, n: Any
    ) -> Any:
        i = types.intp

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def pointer(which: int) -> Any:
                make = context.make_array(signature.args[which])
                return builder.gep(make(context, builder, args[which]).data, [args[which + 1]])

            first = pointer(2)
            lines = [builder.gep(first, [builder.mul(_INT(r), args[4])]) for r in range(rows)]
            target = pointer(5)
            totals = _sums(builder, pointer(0), lines, args[7], ahead=ahead)
            for r, total in enumerate(totals):
                builder.store(total, builder.gep(target, [_INT(r)]))
            return context.get_dummy_value()

        return types.void(x, i, weight, i, i, out, i, i), codegen

    return dots


def _sums(builder: Any, x: Any, lines: Sequence[Any], n: Any, *, ahead: bool) -> list[Any]:
    """Dot products of ``n`` elements at ``x`` with those at each of ``lines``."""
    zero = ir.Constant(_VECTOR, None)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(_CHAINS)] for _ in lines]

    def load(base: Any, at: Any) -> Any:
        place = builder.bitcast(builder.gep(base, [at]), _VECTOR.as_pointer())
        value = builder.load(place)
        value.align = 4
        return value

    def add(at: Any, chain: int) -> None:
        values = load(x, at)
        for line, totals in zip(lines, sums, strict=True):
            total = totals[chain]
            builder.store(fma(builder, values, load(line, at), builder.load(total)), total)
            if ahead:
                prefetch(builder, builder.gep(line, [builder.add(at, _INT(_AHEAD_FLOATS))]))

    round_floats = _CHAINS * LANES
    with cgutils.for_range(builder, builder.sdiv(n, _INT(round_floats))) as loop:
        start = builder.mul(loop.index, _INT(round_floats))
        for chain in range(_CHAINS):
            add(builder.add(start, _INT(chain * LANES)), chain)
    rest = builder.mul(builder.sdiv(n, _INT(round_floats)), _INT(round_floats))
    with cgutils.for_range(builder, builder.sdiv(builder.sub(n, rest), _INT(LANES))) as loop:
        add(builder.add(rest, builder.mul(loop.index, _INT(LANES))), 0)
    done = builder.mul(builder.sdiv(n, _INT(LANES)), _INT(LANES))
    results = []
    for line, totals in zip(lines, sums, strict=True):
        total = builder.load(totals[0])
        for other in totals[1:]:
            total = builder.fadd(total, builder.load(other))
        result = cgutils.alloca_once_value(builder, folded(builder, total))
        with cgutils.for_range(builder, builder.sub(n, done)) as loop:
            at = builder.add(done, loop.index)
            a, b = builder.load(builder.gep(x, [at])), builder.load(builder.gep(line, [at]))
            builder.store(fma(builder, a, b, builder.load(result)), result)
        results.append(builder.load(result))
    return results
