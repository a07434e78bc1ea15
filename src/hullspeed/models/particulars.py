"""Particulars of families that change what a weight means."""

from __future__ import annotations

from torch import Tensor

from hullspeed.arch.model import ModelArch
from hullspeed.models.weights import Weights


def norm_weight(weights: Weights, arch: ModelArch, name: str) -> Tensor:
    """The factor of an RMS norm: the weight, plus one in families that store it less one."""
    return weights.tensor(name) + option(arch, "norm_offset", 0.0)


def option(arch: ModelArch, name: str, absent: float) -> float:
    """A number among the family's particulars."""
    value = arch.options.get(name, absent)
    return float(value) if isinstance(value, int | float) else absent
