"""RoutedMlp: a router, its experts and, in some families, one expert that every token shares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hullspeed.arch.mlps import DenseMlp, MoeMlp
from hullspeed.arch.model import ModelArch
from hullspeed.kernels.base import Kernels, Linear
from hullspeed.models.mlp import ACTIVATIONS, GatedMlp
from hullspeed.models.particulars import option
from hullspeed.models.weights import Weights


class RoutedMlp:
    """Each token through its ``experts_per_token`` likeliest experts.

    Shares are the router's probabilities of the chosen, made to sum to one unless the config says
    otherwise (``norm_topk_prob``; gpt-oss's softmax over the chosen is the same number).

    Args:
        below: Prefix of the layer's weights.
    """

    def __init__(
        self,
        spec: MoeMlp,
        arch: ModelArch,
        weights: Weights,
        below: str,
        kernels: Kernels[Any],
    ) -> None:
        root = f"{below}{spec.module}."
        self._k = spec.experts_per_token
        self._normed = bool(arch.options.get("norm_topk_prob", True))
        # In float32 whatever the other weights are: a rounded router picks other experts.
        self._router = weights.tensor(f"{root}{spec.router}.weight")
        self._router_bias = None
        if spec.router_bias:
            self._router_bias = weights.tensor(f"{root}{spec.router}.bias")
        pairs = list(_packed_experts(spec, weights, f"{root}experts.", kernels))
        self._experts = kernels.experts(
            [gate_up for gate_up, _ in pairs],
            [down for _, down in pairs],
            ACTIVATIONS[spec.activation],
            option(arch, "swiglu_limit", 0.0),
        )
        self._shared: GatedMlp | None = None
        self._shared_gate: Tensor | None = None
        if spec.shared_intermediate:
            shared = DenseMlp(
                intermediate=spec.shared_intermediate,
                activation=spec.activation,
                names=spec.names,
                module=f"{spec.module}.{spec.shared_name}",
            )
            self._shared = GatedMlp(shared, weights, below, kernels)
            if spec.shared_gate:
                self._shared_gate = weights.tensor(f"{root}{spec.shared_name}_gate.weight")

    def __call__(self, h: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``."""
        logits = torch.nn.functional.linear(h, self._router, self._router_bias)
        shares, chosen = logits.softmax(-1).topk(self._k, dim=-1)
        if self._normed:
            shares = shares / shares.sum(-1, keepdim=True)
        out = self._experts(h, chosen, shares)
        if self._shared is None:
            return out
        shared = self._shared(h)
        if self._shared_gate is not None:
            shared = shared * (h @ self._shared_gate.T).sigmoid()
        return out + shared


def _packed_experts(
    spec: MoeMlp, weights: Weights, below: str, kernels: Kernels[Any]
) -> Iterator[tuple[Linear, Linear]]:
    """Gate-and-up and down of each expert, gate rows first."""
    if not spec.fused_experts:
        plain = DenseMlp(intermediate=spec.intermediate, bias=spec.bias, names=spec.names)
        for i in range(spec.experts):
            mlp = replace(plain, module=f"{below}{i}")
            yield GatedMlp(mlp, weights, "", kernels).linears
        return
    biases: list[Tensor | None] = [None, None]
    if spec.bias:
        biases = [weights.tensor(f"{below}{n}_proj_bias") for n in ("gate_up", "down")]
    for i in range(spec.experts):
        first, second = (weights.expert(f"{below}{n}_proj", i) for n in ("gate_up", "down"))
        first_bias, second_bias = (b if b is None else b[i] for b in biases)
        if spec.transposed:
            # gpt-oss: [in, out], gate and up row by row in turn
            first, second = _untangled(first.T), second.T.contiguous()
            first_bias = first_bias if first_bias is None else _untangled(first_bias)
        yield kernels.linear(first, first_bias), kernels.linear(second, second_bias)


def _untangled(rows: Tensor) -> Tensor:
    return torch.cat([rows[0::2], rows[1::2]])
