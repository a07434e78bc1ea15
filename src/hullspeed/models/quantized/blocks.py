"""From a ``QuantizedTensor`` to the blocks that the CPU kernels compute with, where nothing is
lost: integers of 4 or 8 bits, groups of a multiple of 32 inputs, factors that fp16 holds exactly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hullspeed.kernels.blocks import BLOCK, BlockWeight
from hullspeed.models.quantized.numbers import int8, integers
from hullspeed.models.quantized.tensor import Floats, QuantizedTensor


def as_blocks(tensor: QuantizedTensor) -> BlockWeight | None:
    """The same weight in blocks of 32, or ``None`` if it is not of that kind."""
    whole = tensor.codes.ndim == 2 and tensor.tall == 1 and not tensor.transposed
    columns = tensor.codes.shape[-1]
    run = min(tensor.wide, columns)
    if not whole or tensor.group_of is not None or run % BLOCK or columns % run:
        return None
    scales = _as_half(tensor.scales)
    if scales is None:
        return None
    scales = np.repeat(scales, run // BLOCK, axis=1)
    blocks = tensor.codes.reshape(len(tensor.codes), -1, BLOCK)
    first = float(tensor.levels[0])
    if np.array_equal(tensor.levels, integers(4, int(-first))):
        lowest = first if tensor.zeros is None else np.float32(first) - tensor.zeros
        mins = _as_half((lowest * tensor.scales).astype(np.float32))
        if mins is None:
            return None
        packed = blocks[..., : BLOCK // 2] | np.left_shift(blocks[..., BLOCK // 2 :], np.uint8(4))
        return BlockWeight(packed, scales, np.repeat(mins, run // BLOCK, axis=1))
    if tensor.zeros is not None:
        return None
    if np.array_equal(tensor.levels, int8()):
        return BlockWeight(blocks.view(np.int8).copy(), scales)
    if np.array_equal(tensor.levels, integers(8, 128)):
        return BlockWeight((blocks ^ np.uint8(128)).view(np.int8), scales)
    return None


def _as_half(values: Floats) -> NDArray[np.float16] | None:
    """``values`` in fp16, if it holds them exactly."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), values) else None
