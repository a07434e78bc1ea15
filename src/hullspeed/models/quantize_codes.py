"""From weights to codes and scales: rounding to nearest, with scales searched where that pays.

An integer format spends its few levels evenly, so a scale that clips the largest weights of a
group often lowers the squared error; the best of ``_SHRINKS`` is taken. FP8 has levels of nearly
constant relative distance and gains nothing from it: its scale maps the largest weight to 448.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hullspeed.kernels.cpu.jit import kernel
from hullspeed.models.plain_numbers import as_float32
from hullspeed.models.quantized.numbers import E4M3_MAX
from hullspeed.models.quantized.tensor import Floats

Codes = NDArray[np.uint8]

# Shares of the scale that would just hold the largest weight.
_SHRINKS = np.array([1.0 - 0.02 * i for i in range(20)], np.float32)

_SMALLEST = {"bf16": 2.0**-126, "fp16": 2.0**-24, "fp32": 2.0**-126}
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def integer_codes(weight: Floats, bits: int, group: int, dtype: str) -> tuple[Codes, Floats]:
    """Symmetric integers: ``weight[i, j] ~ (code - 2^(bits-1)) * scale``.

    Args:
        weight: float32 ``[rows, columns]``, finite.
        bits: Of a code.
        group: Columns that share a scale; divides ``columns``.
        dtype: Number format that the scales are stored in; those found are rounded to it.

    Returns:
        uint8 codes of the same shape, and scales ``[rows, columns / group]``.
    """
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    rows, columns = weight.shape
    found = np.empty((rows, columns // group), np.float32)
    _search(weight, group, low, high, _SHRINKS, found)
    best = _rounded(found, dtype)
    codes = np.empty(weight.shape, np.uint8)
    _round(weight, best, group, low, high, codes)
    return codes, best


def fp8_codes(weight: Floats, tall: int, wide: int, dtype: str) -> tuple[Codes, Floats]:
    """float8_e4m3fn with one scale for each block of ``tall`` rows and ``wide`` columns.

    Args:
        weight: float32 ``[rows, columns]``, finite; blocks at the edges may be smaller.
        tall: Rows of a block.
        wide: Columns of a block.
        dtype: Number format that the scales are stored in.

    Returns:
        uint8 codes of the same shape, and scales ``[ceil(rows / tall), ceil(columns / wide)]``.
    """
    rows, columns = weight.shape
    row_at, column_at = np.arange(0, rows, tall), np.arange(0, columns, wide)
    largest: Floats = np.maximum.reduceat(np.abs(weight), row_at, axis=0)
    largest = np.maximum.reduceat(largest, column_at, axis=1)
    scales = _rounded(largest / np.float32(E4M3_MAX), dtype)
    scaled = np.empty_like(weight)
    for i, top in enumerate(row_at):
        factors = np.repeat(scales[i], wide)[:columns]
        np.divide(weight[top : top + tall], factors, out=scaled[top : top + tall])
    np.clip(scaled, -E4M3_MAX, E4M3_MAX, out=scaled)
    codes = torch.from_numpy(scaled).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes, scales


def stored_scales(scales: Floats, dtype: str) -> NDArray[np.uint8]:
    """Scales as the bytes of ``dtype``: ``[..., columns * bytes]``."""
    values = torch.from_numpy(np.ascontiguousarray(scales)).to(_TORCH[dtype])
    return values.view(torch.uint8).numpy()


def _rounded(scales: Floats, dtype: str) -> Floats:
    """The nearest scales that ``dtype`` holds; 1 where all weights are zero."""
    values = np.where(scales > 0, np.maximum(scales, _SMALLEST[dtype]), 1.0).astype(np.float32)
    if dtype == "fp32":
        return values
    stored = stored_scales(values, dtype).reshape(-1)
    return as_float32(stored, {"bf16": "BF16", "fp16": "F16"}[dtype]).reshape(scales.shape)


@kernel()
def _search(weight: Floats, group: int, low: int, high: int, shrinks: Floats, out: Floats) -> None:
    """The scale of each group, among ``shrinks`` of the one that just holds its largest weight,
    whose squared error is least.
    """
    bottom, top = np.float32(low), np.float32(high)
    for r in range(out.shape[0]):
        for g in range(out.shape[1]):
            run = weight[r, g * group : (g + 1) * group]
            largest = np.float32(0)
            for i in range(group):
                largest = max(largest, abs(run[i]))
            best = largest / top
            if best > 0:
                least = _squared_error(run, best, bottom, top)
                for shrink in shrinks[1:]:
                    scale = shrink * (largest / top)
                    error = _squared_error(run, scale, bottom, top)
                    if error < least:
                        best, least = scale, error
            out[r, g] = best


@kernel()
def _squared_error(
    run: Floats, scale: np.float32, bottom: np.float32, top: np.float32
) -> np.float32:
    inverse = np.float32(1) / scale
    total = np.float32(0)
    for i in range(len(run)):
        level = min(max(np.rint(run[i] * inverse), bottom), top)
        off = run[i] - level * scale
        total += off * off
    return total


@kernel()
def _round(weight: Floats, scales: Floats, group: int, low: int, high: int, codes: Codes) -> None:
    bottom, top = np.float32(low), np.float32(high)
    for r in range(weight.shape[0]):
        for g in range(scales.shape[1]):
            inverse = np.float32(1) / scales[r, g]
            for c in range(g * group, (g + 1) * group):
                level = min(max(np.rint(weight[r, c] * inverse), bottom), top)
                codes[r, c] = np.uint8(np.int32(level) - low)
