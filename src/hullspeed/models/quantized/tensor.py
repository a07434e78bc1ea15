"""QuantizedTensor: the one form that every quantized weight takes before a back end packs it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.cpu.jit import kernel

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """Weights of a linear layer, or of all experts of one: ``(levels[code] - zero) * scale``.

    Attributes:
        codes: uint8 ``[..., out, in]``, one code a byte.
        levels: float32 ``[n]``: the number that each code stands for (see ``numbers.py``).
        scales: float32 ``[..., ceil(out / tall), ceil(in / wide)]``.
        zeros: float32 of the same shape, or ``None`` where they are all zero.
        tall: Rows that share a scale.
        wide: Columns that share a scale.
        group_of: int32 ``[in]``: the column of ``scales`` of each input where inputs are grouped
            in another order than their own (GPTQ's ``desc_act``); ``wide`` is then without meaning.
        transposed: The checkpoint's plain weight would be ``[..., in, out]`` (gpt-oss).
    """

    codes: NDArray[np.uint8]
    levels: Floats
    scales: Floats
    zeros: Floats | None = None
    tall: int = 1
    wide: int = 1
    group_of: NDArray[np.int32] | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight as the checkpoint would hold it in plain numbers."""
        *lead, rows, columns = self.codes.shape
        return (*lead, columns, rows) if self.transposed else (*lead, rows, columns)

    def dequantize(self) -> Floats:
        """The weight in float32, of :attr:`shape`."""
        *lead, rows, columns = self.codes.shape
        out = np.empty(self.shape, np.float32)
        scratch = np.empty((rows, columns), np.float32) if self.transposed else None
        for at in np.ndindex(*lead):
            target = out[at] if scratch is None else scratch
            zeros = _NO_ZEROS if self.zeros is None else self.zeros[at]
            if self.group_of is not None:
                _by_column(
                    self.codes[at], self.levels, self.scales[at], zeros, self.group_of, target
                )
            else:
                _by_block(
                    self.codes[at],
                    self.levels,
                    self.scales[at],
                    zeros,
                    self.tall,
                    self.wide,
                    target,
                )
            if scratch is not None:
                out[at] = scratch.T
        return out


_NO_ZEROS = np.zeros((0, 0), np.float32)


@kernel()
def _by_block(
    codes: NDArray[np.uint8],
    levels: Floats,
    scales: Floats,
    zeros: Floats,
    tall: int,
    wide: int,
    out: Floats,
) -> None:
    rows, columns = codes.shape
    for r in range(rows):
        row, target = codes[r], out[r]
        for group in range(scales.shape[1]):
            scale = scales[r // tall, group]
            zero = zeros[r // tall, group] if zeros.size else np.float32(0)
            for c in range(group * wide, min((group + 1) * wide, columns)):
                target[c] = (levels[row[c]] - zero) * scale


@kernel()
def _by_column(
    codes: NDArray[np.uint8],
    levels: Floats,
    scales: Floats,
    zeros: Floats,
    group_of: NDArray[np.int32],
    out: Floats,
) -> None:
    rows, columns = codes.shape
    for r in range(rows):
        for c in range(columns):
            group = group_of[c]
            zero = zeros[r, group] if zeros.size else np.float32(0)
            out[r, c] = (levels[codes[r, c]] - zero) * scales[r, group]
