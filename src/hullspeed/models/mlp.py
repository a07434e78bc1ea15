"""GatedMlp: ``down(silu(gate(x)) * up(x))`` of one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hullspeed.arch.mlps import DenseMlp
from hullspeed.kernels.base import Kernels
from hullspeed.models.weights import Weights


class GatedMlp:
    """A dense MLP, gate and up in one projection.

    Args:
        below: Prefix of the layer's weights.
    """

    def __init__(self, spec: DenseMlp, weights: Weights, below: str, kernels: Kernels[Any]) -> None:
        def packed(*names: str) -> tuple[Tensor, Tensor | None]:
            full = [f"{below}mlp.{name}_proj" for name in names]
            weight = torch.cat([weights.tensor(f"{name}.weight") for name in full])
            if not spec.bias:
                return weight, None
            return weight, torch.cat([weights.tensor(f"{name}.bias") for name in full])

        self._gate_up = kernels.linear(*packed("gate", "up"))
        self._down = kernels.linear(*packed("down"))
        self._kernels = kernels

    def __call__(self, h: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``."""
        return self._down(self._kernels.silu_mul(self._gate_up(h)))
