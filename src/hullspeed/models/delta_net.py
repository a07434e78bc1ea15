"""DeltaNet: the gated delta rule layer of Qwen3-Next and Qwen3.5, over state slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hullspeed.arch.mixers import GatedDeltaNet
from hullspeed.arch.model import ModelArch
from hullspeed.kernels.base import DeltaGates, DeltaShape, Kernels, StateSlots
from hullspeed.models.stored_states import StoredDtype, StoredStates
from hullspeed.models.weights import Weights


class DeltaNet:
    """Projections, short convolution, gated delta rule and gated norm of one layer.

    Args:
        spec: Heads and particulars.
        below: Prefix of the layer's weights.
    """

    def __init__(
        self,
        spec: GatedDeltaNet,
        arch: ModelArch,
        weights: Weights,
        below: str,
        kernels: Kernels[Any],
    ) -> None:
        self._shape = DeltaShape(
            spec.k_heads, spec.v_heads, spec.k_dim, spec.v_dim, spec.conv_kernel
        )
        self._eps = arch.norm_eps
        self._kernels = kernels
        below += "linear_attn."

        def read(name: str) -> Tensor:
            return weights.tensor(below + name)

        if spec.fused_projections:
            qkvz = _sorted_rows(spec, read("in_proj_qkvz.weight"))
            b, a = read("in_proj_ba.weight").view(spec.k_heads, 2, -1, arch.hidden).unbind(1)
            ba = torch.cat([b.flatten(0, 1), a.flatten(0, 1)])
        else:
            qkvz = torch.cat([read("in_proj_qkv.weight"), read("in_proj_z.weight")])
            ba = torch.cat([read("in_proj_b.weight"), read("in_proj_a.weight")])
        self._qkvz = kernels.linear(qkvz)
        self._ba = kernels.linear(ba)
        self._taps = read("conv1d.weight")[:, 0].T.contiguous()
        self._gates = DeltaGates(read("A_log").exp(), read("dt_bias"))
        self._norm = read("norm.weight")
        self._output = kernels.linear(read("out_proj.weight"))
        self.allocate_states(0)

    states: StateSlots
    stored: StoredStates | None

    def allocate_states(
        self, n_slots: int, n_stored: int = 0, stored_dtype: StoredDtype = "int8"
    ) -> None:
        """Take fresh slots, and ``n_stored`` for cached states in fewer bits."""
        self.states = self._kernels.allocate_states(self._shape, n_slots)
        self.stored = StoredStates(self.states, n_stored, stored_dtype) if n_stored else None

    def __call__(self, h: Tensor, plan: Any) -> Tensor:
        """``[T, H]`` to ``[T, H]``; moves the spans' states on."""
        kernels, shape, states = self._kernels, self._shape, self.states
        projected = self._qkvz(h)
        qkv = kernels.convolve(projected, plan, self._taps, states)
        mixed = kernels.delta_scan(qkv, self._ba(h), plan, shape, self._gates, states)
        mixed = kernels.gated_norm(mixed, projected, shape.channels, self._norm, self._eps)
        return self._output(mixed)


def _sorted_rows(spec: GatedDeltaNet, qkvz: Tensor) -> Tensor:
    """Rows of all queries, keys, values and z from Qwen3-Next's, which go by key head."""
    group = spec.v_heads // spec.k_heads * spec.v_dim
    by_head = qkvz.view(spec.k_heads, -1, qkvz.shape[1])
    parts = torch.split(by_head, [spec.k_dim, spec.k_dim, group, group], dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])
