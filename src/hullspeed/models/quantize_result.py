"""What quantizing did to a checkpoint."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hullspeed.models.quantize_targets import Target

_LAYER = re.compile(r"layers\.(\d+)\.")


class Change(NamedTuple):
    """What quantizing did to one weight.

    Attributes:
        relative_error: ``|W - W'| / |W|`` in the Frobenius norm.
    """

    name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    relative_error: float
    norm: float


@dataclass(frozen=True)
class Quantized:
    """What was done.

    Attributes:
        bytes_before: Of all tensors of the source.
        bytes_after: Of all tensors written; what ``weight_bytes`` gives for the new checkpoint.
        kept: Modules that the format does not fit, with the reason.
        resumed_shards: Shards of an earlier run that were kept.
    """

    out: Path
    target: Target
    bytes_before: int
    bytes_after: int
    changes: tuple[Change, ...]
    kept: dict[str, str]
    resumed_shards: int

    def layer_errors(self) -> dict[str, float]:
        """Relative error of all weights of a layer together, by the layer's number."""
        sums: dict[str, tuple[float, float]] = {}
        for change in self.changes:
            match = _LAYER.search(change.name)
            layer = match[1] if match else "-"
            error, norm = sums.get(layer, (0.0, 0.0))
            off = change.relative_error * change.norm
            sums[layer] = (error + off**2, norm + change.norm**2)
        order = sorted(sums, key=lambda layer: (not layer.isdecimal(), layer.zfill(9)))
        return {layer: math.sqrt(sums[layer][0] / (sums[layer][1] or 1.0)) for layer in order}
