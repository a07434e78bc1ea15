"""Gates: elementwise products with something squashed, in one pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.base import SWIGLU_ALPHA
from hullspeed.kernels.cpu.dots import dot_of
from hullspeed.kernels.cpu.jit import kernel
from hullspeed.kernels.cpu.simd import exp

Floats = NDArray[np.float32]

_ALPHA = np.float32(SWIGLU_ALPHA)
# gelu(x) = x / 2 (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
_TWO_ROOT = np.float32(2 * np.sqrt(2 / np.pi))
_CUBE = np.float32(0.044715)


@kernel()
def sigmoid_mul(x: Floats, gate: Floats, offset: int) -> None:
    """``x *= sigmoid(gate[:, offset : offset + N])`` for rows ``[N]``."""
    one = np.float32(1.0)
    width = x.shape[1]
    for t in range(len(x)):
        line, factor = x[t], gate[t, offset : offset + width]
        for i in range(width):
            line[i] = line[i] / (one + exp(-factor[i]))


@kernel()
def gelu_mul(gate_up: Floats, out: Floats) -> None:
    """``gelu(gate) * up`` of rows ``[2I]``, tanh form."""
    one = np.float32(1.0)
    width = out.shape[1]
    for t in range(len(out)):
        gate, up, line = gate_up[t, :width], gate_up[t, width:], out[t]
        for i in range(width):
            x = gate[i]
            turned = _TWO_ROOT * (x + _CUBE * x * x * x)
            line[i] = x / (one + exp(-turned)) * up[i]


@kernel()
def clamped_swiglu(gate_up: Floats, out: Floats, limit: np.float32) -> None:
    """``gate * sigmoid(alpha * gate) * (up + 1)`` of rows ``[2I]``, both clamped."""
    one = np.float32(1.0)
    width = out.shape[1]
    for t in range(len(out)):
        gate, up, line = gate_up[t, :width], gate_up[t, width:], out[t]
        for i in range(width):
            x = limit if gate[i] > limit else gate[i]  # in this form NaN stays NaN
            y = limit if up[i] > limit else up[i]
            y = -limit if y < -limit else y
            line[i] = x / (one + exp(-_ALPHA * x)) * (y + one)


@kernel()
def gated_norm(x: Floats, gate: Floats, offset: int, weight: Floats, eps: np.float32) -> None:
    """RMS norm of each head of rows ``[N]``, times ``silu(gate[:, offset : offset + N])``."""
    one = np.float32(1.0)
    width = len(weight)
    for t in range(len(x)):
        for start in range(0, x.shape[1], width):
            line = x[t, start : start + width]
            factor = gate[t, offset + start : offset + start + width]
            square = dot_of(line, line, width)
            scale = one / np.sqrt(square / np.float32(width) + eps)
            for i in range(width):
                squashed = factor[i] / (one + exp(-factor[i]))
                line[i] = weight[i] * (line[i] * scale) * squashed
