"""Attention: projections, rotation and the paged keys and values of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hullspeed.arch.mixers import FullAttention, SlidingAttention
from hullspeed.arch.model import ModelArch
from hullspeed.kernels.base import (
    AttentionShape,
    HeadNorms,
    Kernels,
    KvDtype,
    KvPages,
    RotaryTable,
)
from hullspeed.kernels.blocks import BlockWeight
from hullspeed.models.particulars import norm_weight, option
from hullspeed.models.projection import stacked
from hullspeed.models.rope import Rotation
from hullspeed.models.weights import Weights

PAGE_TOKENS = 64


class Attention:
    """Grouped-query attention of one layer, queries, keys, values (and the output gate, if there is
    one) in one projection.

    Args:
        spec: Heads and particulars.
        arch: The model.
        rotaries: Tables by how the layer's heads are rotated.
        below: Prefix of the layer's weights.
    """

    def __init__(
        self,
        spec: FullAttention,
        arch: ModelArch,
        rotaries: Mapping[Rotation, RotaryTable],
        weights: Weights,
        below: str,
        kernels: Kernels[Any],
    ) -> None:
        window = spec.window_tokens if isinstance(spec, SlidingAttention) else 0
        scale = option(arch, "query_scale", 0.0)
        self._shape = AttentionShape(spec.q_heads, spec.kv_heads, spec.head_dim, window, scale)
        self._rotary = rotaries[Rotation.of(spec, arch)]
        self._kernels = kernels
        below += f"{spec.module}."
        self._qkv = kernels.linear(
            _weight(spec, weights, below, kernels),
            _projection(spec, weights, below, "bias") if spec.qkv_bias else None,
        )
        # Where the gate starts in a row of the projection.
        width = (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim
        self._gate = width if spec.output_gate else None
        bias = weights.tensor(f"{below}o_proj.bias") if spec.output_bias else None
        self._output = kernels.linear(stacked(weights, [f"{below}o_proj.weight"], kernels), bias)
        self._norms = None
        if spec.qk_norm:
            q_norm, k_norm = (norm_weight(weights, arch, f"{below}{n}_norm.weight") for n in "qk")
            self._norms = HeadNorms(q_norm, k_norm, arch.norm_eps)
        self._sinks = weights.tensor(f"{below}sinks") if spec.sinks else None
        self.allocate_kv(0, PAGE_TOKENS)

    kv: KvPages

    @property
    def window_tokens(self) -> int:
        """Keys that a query sees; 0: all."""
        return self._shape.window_tokens

    def allocate_kv(self, n_pages: int, page_tokens: int, dtype: KvDtype = "fp32") -> None:
        """Take fresh pages."""
        self.kv = self._kernels.allocate_kv(self._shape, n_pages, page_tokens, dtype)

    def __call__(self, h: Tensor, plan: Any) -> Tensor:
        """``[T, H]`` to ``[T, H]``; writes the tokens' keys and values."""
        kernels, shape, kv = self._kernels, self._shape, self.kv
        projected = self._qkv(h)
        q = kernels.rotate_and_store(projected, plan, shape, self._rotary, self._norms, kv)
        mixed = kernels.attend(q, plan, shape, kv, self._sinks)
        if self._gate is not None:
            mixed = kernels.sigmoid_mul(mixed, projected, self._gate)
        return self._output(mixed)


def _weight(
    spec: FullAttention, weights: Weights, below: str, kernels: Kernels[Any]
) -> Tensor | BlockWeight:
    """Of queries, keys, values and gate; with a gate in float32."""
    if spec.output_gate:
        return _projection(spec, weights, below, "weight")
    return stacked(weights, [f"{below}{name}_proj.weight" for name in "qkv"], kernels)


def _projection(spec: FullAttention, weights: Weights, below: str, kind: str) -> Tensor:
    """Rows of queries, keys, values and gate.

    With an output gate the checkpoint's ``q_proj`` holds, head by head, the query and its gate.
    """
    q, k, v = (weights.tensor(f"{below}{name}_proj.{kind}") for name in "qkv")
    if not spec.output_gate:
        return torch.cat([q, k, v])
    heads = q.view(spec.q_heads, 2, spec.head_dim, *q.shape[1:])
    return torch.cat([heads[:, 0].flatten(0, 1), k, v, heads[:, 1].flatten(0, 1)])
