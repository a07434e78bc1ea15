"""BlockWeight: a weight as the integer codes and scales that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # inputs that share a scale


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A matrix ``[out, in]`` in blocks of 32 inputs: ``code * scale + min``.

    Attributes:
        codes: uint8 ``[out, in / 32, 16]``, two codes 0..15 a byte (inputs i and i + 16 of the
            block in the low and high half), or int8 ``[out, in / 32, 32]``, as in GGML's blocks.
        scales: fp16 ``[out, in / 32]``.
        mins: fp16 of the same shape with codes of 4 bits, ``None`` with those of 8.
    """

    codes: NDArray[np.uint8] | NDArray[np.int8]
    scales: NDArray[np.float16]
    mins: NDArray[np.float16] | None = None

    @property
    def bits(self) -> int:
        """Of a code: 4 or 8."""
        return 8 if self.mins is None else 4

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.scales.shape[0], self.scales.shape[1] * BLOCK

    def rows(self, order: NDArray[np.intp]) -> BlockWeight:
        """The rows ``order``, in that order."""
        mins = None if self.mins is None else self.mins[order]
        return BlockWeight(self.codes[order], self.scales[order], mins)

    def dequantize(self) -> NDArray[np.float32]:
        """The weight in float32."""
        codes = self.codes
        if self.mins is not None:
            codes = np.concatenate([codes & 15, codes >> 4], axis=2)
        weight = codes.astype(np.float32) * self.scales[..., None].astype(np.float32)
        if self.mins is not None:
            weight += self.mins[..., None].astype(np.float32)
        return weight.reshape(self.shape)


def stack_rows(weights: Sequence[BlockWeight]) -> BlockWeight | None:
    """Weights of the same inputs one under the other; ``None`` if their codes differ in width."""
    if len({weight.bits for weight in weights}) > 1:
        return None
    mins = [weight.mins for weight in weights if weight.mins is not None]
    return BlockWeight(
        np.concatenate([weight.codes for weight in weights]),
        np.concatenate([weight.scales for weight in weights]),
        np.concatenate(mins) if mins else None,
    )
