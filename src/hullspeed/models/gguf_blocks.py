"""GGUF tensors whose blocks of 32 are used as they are: Q4_0, Q4_1 and Q8_0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hullspeed.arch.ggml import GgmlType
from hullspeed.kernels.blocks import BLOCK, BlockWeight

# Layouts of ``block_q4_0``, ``block_q4_1`` and ``block_q8_0`` in ggml-common.h of ggml.
_LAYOUTS = {
    "Q4_0": np.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
    "Q4_1": np.dtype([("scale", "<f2"), ("min", "<f2"), ("codes", "u1", 16)]),
    "Q8_0": np.dtype([("scale", "<f2"), ("codes", "i1", 32)]),
}
_Q4_0_ZERO = np.float16(8)  # the code of zero
_LARGEST_Q4_0_SCALE = 65504 / 8


def has_blocks(kind: GgmlType, shape: tuple[int, ...]) -> bool:
    """Whether :func:`block_weight` takes a tensor of this type and shape."""
    return kind.name in _LAYOUTS and len(shape) == 2 and shape[1] % BLOCK == 0


def block_weight(
    raw: NDArray[np.uint8], kind: GgmlType, shape: tuple[int, ...]
) -> BlockWeight | None:
    """A view of ``raw`` (flat, whole blocks) as the codes of a matrix ``shape``; ``None`` if a
    scale is too large for the form.
    """
    blocks = raw.view(_LAYOUTS[kind.name]).reshape(shape[0], shape[1] // BLOCK)
    scales = blocks["scale"]
    if kind.name == "Q8_0":
        return BlockWeight(blocks["codes"], scales)
    if kind.name == "Q4_1":
        return BlockWeight(blocks["codes"], scales, blocks["min"])
    if not (np.abs(scales) <= _LARGEST_Q4_0_SCALE).all():
        return None
    return BlockWeight(blocks["codes"], scales, -_Q4_0_ZERO * scales)
