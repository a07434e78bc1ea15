"""Weights of projections, as a back end takes them: a checkpoint's own codes, or float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hullspeed.kernels.base import Kernels
from hullspeed.kernels.blocks import BlockWeight, stack_rows
from hullspeed.models.weights import Weights


def stacked(weights: Weights, names: Sequence[str], kernels: Kernels[Any]) -> Tensor | BlockWeight:
    """The weights ``names``, one under the other: codes if the back end computes with them and all
    of the weights have them.
    """
    if kernels.takes_blocks:
        parts = [weights.blocks(name) for name in names]
        found = [part for part in parts if part is not None]
        joined = stack_rows(found) if len(found) == len(parts) else None
        if joined is not None:
            return joined
    tensors = [weights.tensor(name) for name in names]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
