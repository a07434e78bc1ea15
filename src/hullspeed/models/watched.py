"""WatchedWeights: weights that tell how much of them has been read, and free what was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from hullspeed.arch.model import ModelArch
from hullspeed.kernels.blocks import BlockWeight
from hullspeed.models.heap import trim
from hullspeed.models.quantized import QuantizedTensor
from hullspeed.models.weights import Weights

# Parameters read between two looks at the heap: as many as the largest tensor has, so that what
# small ones leave behind is no more than it, at least 4 and at most 32 MiB of float32.
_TRIM_PARAMS = 2**20, 8 * 2**20

_STEP = 0.01


def silent(_share: float) -> None:
    """A report to nobody."""


class WatchedWeights(Weights):
    """Passes on another's tensors; gives the memory of those let go of back to the system.

    Args:
        weights: The other.
        arch: The model; its decoder's parameters are the whole.
        report: Told of the share read so far, at each hundredth, by one thread at a time.
    """

    def __init__(
        self, weights: Weights, arch: ModelArch, report: Callable[[float], None] = silent
    ) -> None:
        self._weights, self._report = weights, report
        self._left = {spec.name: spec.elements for spec in arch.tensors(extras=False)}
        least, most = _TRIM_PARAMS
        self._trim_params = min(most, max(least, *self._left.values()))
        self._total = sum(self._left.values()) or 1
        self._read = self._trimmed = 0
        self._told = 0.0
        self._lock = threading.Lock()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The other's."""
        return self._weights.shapes()

    def check(self, arch: ModelArch) -> None:
        """The other's."""
        self._weights.check(arch)

    def frequency_factors(self) -> Tensor | None:
        """The other's."""
        return self._weights.frequency_factors()

    def tensor(self, name: str) -> Tensor:
        """The other's, counted once."""
        tensor = self._weights.tensor(name)
        self._count(name)
        return tensor

    def expert(self, name: str, index: int) -> Tensor:
        """The other's, counted once."""
        tensor = self._weights.expert(name, index)
        self._count(name, tensor.numel())
        return tensor

    def quantized(self, name: str) -> QuantizedTensor | None:
        """The other's, counted once."""
        found = self._weights.quantized(name)
        if found is not None:
            self._count(name)
        return found

    def blocks(self, name: str) -> BlockWeight | None:
        """The other's, counted once."""
        found = self._weights.blocks(name)
        if found is not None:
            self._count(name)
        return found

    def _count(self, name: str, elements: int | None = None) -> None:
        """That ``elements`` of a tensor were read, or what was left of it."""
        with self._lock:
            left = self._left.get(name, 0)
            read = left if elements is None else min(elements, left)
            self._left[name] = left - read
            self._read += read
            share = self._read / self._total
            if share - self._told >= _STEP or (share == 1.0 and self._told < 1.0):
                self._told = share
                self._report(share)
            if self._read - self._trimmed > self._trim_params:
                self._trimmed = self._read
                trim()
