"""DecoderLayer: a mixer and an MLP with the norms around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hullspeed.arch.mixers import FullAttention, GatedDeltaNet
from hullspeed.arch.mlps import DenseMlp, MoeMlp
from hullspeed.arch.model import Layer, ModelArch
from hullspeed.errors import UnsupportedModelError
from hullspeed.kernels.base import Kernels, RotaryTable
from hullspeed.models.attention import Attention
from hullspeed.models.delta_net import DeltaNet
from hullspeed.models.mlp import GatedMlp
from hullspeed.models.moe import RoutedMlp
from hullspeed.models.particulars import norm_weight
from hullspeed.models.rope import Rotation
from hullspeed.models.weights import Weights


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: the mixer and the MLP, a norm ``[H]`` before each and, in some families, one
    after each.
    """

    kernels: Kernels[Any]
    eps: float
    input_norm: Tensor
    mixer: Attention | DeltaNet
    mixed_norm: Tensor | None
    mlp_norm: Tensor
    mlp: GatedMlp | RoutedMlp
    output_norm: Tensor | None

    def __call__(
        self, x: Tensor, delta: Tensor | None, plan: Any, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is still to be added to it, both ``[T, H]``; with ``rows``
        only theirs.
        """
        kernels, eps = self.kernels, self.eps
        h = kernels.rms_norm(x, self.input_norm, eps, delta)
        mixed = self.mixer(h, plan)
        if rows is not None and len(rows) < len(x):
            x, mixed = x[rows], mixed[rows]
        if self.mixed_norm is not None:
            mixed = kernels.rms_norm(mixed, self.mixed_norm, eps, None)
        h = kernels.rms_norm(x, self.mlp_norm, eps, mixed)
        out = self.mlp(h)
        if self.output_norm is not None:
            out = kernels.rms_norm(out, self.output_norm, eps, None)
        return x, out


def packed_layer(
    layer: Layer,
    arch: ModelArch,
    rotaries: Mapping[Rotation, RotaryTable],
    weights: Weights,
    below: str,
    kernels: Kernels[Any],
) -> DecoderLayer:
    """``layer`` from the weights whose names begin with ``below``.

    Raises:
        UnsupportedModelError: if it is of a kind that is not computed here.
    """
    mixer: Attention | DeltaNet
    if isinstance(layer.mixer, FullAttention):
        mixer = Attention(layer.mixer, arch, rotaries, weights, below, kernels)
    elif isinstance(layer.mixer, GatedDeltaNet):
        mixer = DeltaNet(layer.mixer, arch, weights, below, kernels)
    else:
        raise _unknown(layer)
    mlp: GatedMlp | RoutedMlp
    if isinstance(layer.mlp, DenseMlp):
        mlp = GatedMlp(layer.mlp, weights, below, kernels)
    elif isinstance(layer.mlp, MoeMlp):
        mlp = RoutedMlp(layer.mlp, arch, weights, below, kernels)
    else:
        raise _unknown(layer)
    norms = [norm_weight(weights, arch, f"{below}{name}.weight") for name in layer.norms]
    after_mixer, before_mlp, after_mlp = (
        (None, norms[1], None) if len(norms) == 2 else (norms[1], norms[2], norms[3])
    )
    return DecoderLayer(
        kernels, arch.norm_eps, norms[0], mixer, after_mixer, before_mlp, mlp, after_mlp
    )


def _unknown(layer: Layer) -> UnsupportedModelError:
    kinds = (layer.mixer.kind, layer.mlp.kind)
    return UnsupportedModelError("the embedded engine does not run a kind of layer", seen=kinds)
