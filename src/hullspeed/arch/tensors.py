"""TensorSpec: one weight as the checkpoint names it."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple


class Role(StrEnum):
    """What a weight is for; quantized formats decide by role what stays in 16 bit."""

    EMBEDDING = "embedding"
    HEAD = "head"
    LINEAR = "linear"
    GATE = (
        "gate"  # small projections that quantized checkpoints keep in 16 bit (routers, a/b of GDN)
    )
    EXPERT = "expert"
    CONV = "conv"
    NORM = "norm"
    BIAS = "bias"
    VECTOR = "vector"  # A_log, dt_bias, sinks, ...
    VISION = "vision"


class TensorSpec(NamedTuple):
    """A weight's name (without the layer's prefix inside a layer), shape and role.

    Shapes are those of the checkpoint: a linear layer is ``[out, in]``.
    """

    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)

    def under(self, prefix: str) -> TensorSpec:
        """The same weight with ``prefix`` before its name."""
        return TensorSpec(prefix + self.name, self.shape, self.role)
