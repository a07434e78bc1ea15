"""Attention: projections, rotation and the paged keys and values of one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hullspeed.arch.mixers import FullAttention, SlidingAttention
from hullspeed.kernels.base import AttentionShape, HeadNorms, Kernels, KvPages, RotaryTable
from hullspeed.models.weights import Weights

PAGE_TOKENS = 64


class Attention:
    """Grouped-query attention of one layer, queries, keys and values in one projection.

    Args:
        spec: Heads and particulars.
        rotaries: Tables by rotary dimension.
        below: Prefix of the layer's weights.
    """

    def __init__(
        self,
        spec: FullAttention,
        rotaries: dict[int, RotaryTable],
        eps: float,
        weights: Weights,
        below: str,
        kernels: Kernels[Any],
    ) -> None:
        window = spec.window_tokens if isinstance(spec, SlidingAttention) else 0
        self._shape = AttentionShape(spec.q_heads, spec.kv_heads, spec.head_dim, window)
        self._rotary = rotaries[spec.rotary_dim]
        self._kernels = kernels
        below += "self_attn."
        qkv = [f"{below}{name}_proj" for name in "qkv"]
        weight = torch.cat([weights.tensor(f"{name}.weight") for name in qkv])
        bias = None
        if spec.qkv_bias:
            bias = torch.cat([weights.tensor(f"{name}.bias") for name in qkv])
        self._qkv = kernels.linear(weight, bias)
        bias = weights.tensor(f"{below}o_proj.bias") if spec.output_bias else None
        self._output = kernels.linear(weights.tensor(f"{below}o_proj.weight"), bias)
        self._norms = None
        if spec.qk_norm:
            q_norm, k_norm = (weights.tensor(f"{below}{name}_norm.weight") for name in "qk")
            self._norms = HeadNorms(q_norm, k_norm, eps)
        self.allocate_kv(0, PAGE_TOKENS)

    kv: KvPages

    def allocate_kv(self, n_pages: int, page_tokens: int) -> None:
        """Take fresh pages."""
        self.kv = self._kernels.allocate_kv(self._shape, n_pages, page_tokens)

    def __call__(self, h: Tensor, plan: Any) -> Tensor:
        """``[T, H]`` to ``[T, H]``; writes the tokens' keys and values."""
        kernels, shape, kv = self._kernels, self._shape, self.kv
        q = kernels.rotate_and_store(self._qkv(h), plan, shape, self._rotary, self._norms, kv)
        return self._output(kernels.attend(q, plan, shape, kv))
