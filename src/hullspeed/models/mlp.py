"""GatedMlp: ``down(act(gate(x)) * up(x))`` of one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hullspeed.arch.mlps import DenseMlp
from hullspeed.kernels.base import Activation, Kernels
from hullspeed.kernels.blocks import BlockWeight
from hullspeed.models.projection import stacked
from hullspeed.models.weights import Weights

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "clamped_swiglu": "clamped_swiglu",
}
"""Kernels' names of the activations that configs name."""


class GatedMlp:
    """A dense MLP, gate and up in one projection.

    Args:
        below: Prefix of the layer's weights.

    Attributes:
        linears: Gate and up in one, and down.
    """

    def __init__(self, spec: DenseMlp, weights: Weights, below: str, kernels: Kernels[Any]) -> None:
        def packed(*names: str) -> tuple[Tensor | BlockWeight, Tensor | None]:
            full = [f"{below}{spec.module}.{name}" for name in names]
            weight = stacked(weights, [f"{name}.weight" for name in full], kernels)
            if not spec.bias:
                return weight, None
            return weight, torch.cat([weights.tensor(f"{name}.bias") for name in full])

        gate, up, down = spec.names
        self.linears = kernels.linear(*packed(gate, up)), kernels.linear(*packed(down))
        self._activation = ACTIVATIONS[spec.activation]
        self._kernels = kernels

    def __call__(self, h: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``."""
        gate_up, down = self.linears
        return down(self._kernels.activate(gate_up(h), self._activation))
