"""ExpertLoop: experts one after the other, each on all the tokens that chose it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hullspeed.kernels.base import Linear


class ExpertLoop:
    """Tokens are grouped by expert, so that an expert's weights are read once a step.

    A token's experts are summed in ascending order whatever the batch: neighbours do not change it.

    Args:
        gate_up: First linear of each expert.
        down: Second linear of each.
        activate: What lies between them.
    """

    def __init__(
        self,
        gate_up: Sequence[Linear],
        down: Sequence[Linear],
        activate: Callable[[Tensor], Tensor],
    ) -> None:
        self._gate_up, self._down = list(gate_up), list(down)
        self._activate = activate

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """See :class:`hullspeed.kernels.base.Experts`."""
        k = chosen.shape[1]
        flat, order = chosen.flatten().sort(stable=True)
        tokens = order // k
        grouped, shares = x[tokens], shares.flatten()[order, None]
        counts = torch.bincount(flat, minlength=len(self._down)).tolist()
        outputs = torch.empty_like(grouped)
        begin = 0
        for expert, n in enumerate(counts):
            if n:
                rows = slice(begin, begin + n)
                inner = self._activate(self._gate_up[expert](grouped[rows]))
                torch.mul(self._down[expert](inner), shares[rows], out=outputs[rows])
                begin += n
        # Back in the order of the tokens, each one's experts ascending.
        back = tokens.argsort(stable=True)
        return outputs[back].view(len(x), k, x.shape[1]).sum(1)
