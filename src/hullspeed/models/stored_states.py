"""StoredStates: cached recurrent states in fewer bits than the running ones.

A state is read once a request and then lives on in float32, so rounding it happens once and does
not add up. ``int8`` has one scale for each row of ``v_dim`` values, symmetric: about a quarter of
float32's bytes; ``bf16`` half. The convolution's inputs are kept in bf16 by both.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hullspeed.kernels.base import StateSlots

StoredDtype = Literal["bf16", "int8"]
_INT8_MAX = 127.0


class StoredStates:
    """The stored states of one layer.

    Args:
        live: The layer's running states, which are stored from and loaded to.
        n_slots: How many there are.
    """

    def __init__(self, live: StateSlots, n_slots: int, dtype: StoredDtype) -> None:
        self._live = live
        _, heads, k_dim, v_dim = live.recurrent.shape
        device = live.recurrent.device
        self._scales: Tensor | None = None
        if dtype == "int8":
            self._scales = torch.zeros(n_slots, heads, k_dim, 1, device=device)
        kind = torch.int8 if dtype == "int8" else torch.bfloat16
        self._codes = torch.zeros(n_slots, heads, k_dim, v_dim, dtype=kind, device=device)
        shape = (n_slots, *live.inputs.shape[1:])
        self._inputs = torch.zeros(shape, dtype=torch.bfloat16, device=device)

    def store(self, source: int, target: int) -> None:
        """Round running state ``source`` to stored slot ``target``."""
        state = self._live.recurrent[source]
        if self._scales is not None:
            scales = state.abs().amax(-1, keepdim=True) / _INT8_MAX
            self._scales[target] = scales
            state = (state / scales.clamp_min(torch.finfo(torch.float32).tiny)).round()
        self._codes[target] = state.to(self._codes.dtype)
        self._inputs[target] = self._live.inputs[source].to(torch.bfloat16)

    def load(self, source: int, target: int) -> None:
        """Unpack stored slot ``source`` to running slot ``target``."""
        state = self._codes[source].float()
        self._live.recurrent[target] = (
            state if self._scales is None else state * self._scales[source]
        )
        self._live.inputs[target] = self._inputs[source].float()
