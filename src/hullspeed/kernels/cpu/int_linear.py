"""BlockLinear: a linear layer on a checkpoint's own integer codes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hullspeed.errors import UnsupportedModelError
from hullspeed.kernels.blocks import BlockWeight
from hullspeed.kernels.cpu import int_gemm
from hullspeed.kernels.cpu.int_tile import BYTES_4, BYTES_8, PANEL

# Below so many multiply-adds one thread is done before a second is awake.
_PARALLEL_PRODUCTS = 300_000


def fits(weight: BlockWeight) -> bool:
    """Whether :class:`BlockLinear` takes a weight of this shape."""
    return weight.shape[0] % PANEL == 0


class BlockLinear:
    """``x @ weight.T + bias`` on codes of 4 or 8 bits. A row's result does not depend on the others
    nor on the number of threads.

    Args:
        weight: See :func:`fits`.
        threads: Among which a product is shared.

    Raises:
        UnsupportedModelError: if a scale is not finite.
    """

    def __init__(self, weight: BlockWeight, bias: Tensor | None, threads: int) -> None:
        numbers = [weight.scales] if weight.mins is None else [weight.scales, weight.mins]
        if not all(np.isfinite(part).all() for part in numbers):
            raise UnsupportedModelError(
                "a scale of a quantised weight is not finite",
                seen="inf or NaN",
                fix="fetch the model again",
            )
        self._packed, self._bits = pack(weight), weight.bits
        self._bias = np.zeros(weight.shape[0], np.float32) if bias is None else bias.numpy()
        self._products, self._threads = weight.shape[0] * weight.shape[1], threads

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in]`` to ``[T, out]``."""
        out = torch.empty(len(x), len(self._bias))
        args = x.contiguous().numpy(), self._packed, self._bits, self._bias, out.numpy()
        if self._threads > 1 and len(x) * self._products >= _PARALLEL_PRODUCTS:
            int_gemm.linear_parallel(*args, self._threads)
        else:
            int_gemm.linear(*args)
        return out


def pack(weight: BlockWeight) -> NDArray[np.uint8]:
    """Flat, panel by panel of 32 outputs and in it block by block: the codes of two inputs of all
    32 outputs, of the next two..., then the scales of all 32, then their mins.
    """
    n, blocks = weight.scales.shape
    panels = n // PANEL
    size = BYTES_4 if weight.bits == 4 else BYTES_8
    packed = np.empty((panels, blocks, size), np.uint8)
    pairs = np.ascontiguousarray(weight.codes).view(np.uint16).reshape(panels, PANEL, blocks, -1)
    end = PANEL * pairs.shape[3] * 2
    target = packed[:, :, :end].view(np.uint16).reshape(panels, blocks, -1, PANEL)
    target[:] = pairs.transpose(0, 2, 3, 1)
    for numbers in (weight.scales, weight.mins):
        if numbers is not None:
            by_block = numbers.reshape(panels, PANEL, blocks).transpose(0, 2, 1)
            packed[:, :, end : end + 2 * PANEL].view(np.float16)[:] = by_block
            end += 2 * PANEL
    return packed.reshape(-1)
