"""SafetensorsWeights: the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hullspeed.arch.safetensors import StoredTensor, read_files
from hullspeed.errors import CorruptFileError, UnsupportedModelError
from hullspeed.models.weights import Weights

_NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


class SafetensorsWeights(Weights):
    """Reads tensor by tensor from the mapped files.

    Args:
        paths: All shards.

    Raises:
        CorruptFileError: if a file is cut short or contradicts itself or another.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._stored = read_files(paths)
        self._maps: dict[str, np.memmap[tuple[int], np.dtype[np.uint8]]] = {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor."""
        return {name: stored.shape for name, stored in self._stored.items()}

    def tensor(self, name: str) -> Tensor:
        """As float32."""
        if name not in self._stored:
            raise CorruptFileError("the checkpoint lacks a tensor", seen=name)
        stored = self._stored[name]
        raw = self._raw(stored)
        out = np.empty(stored.shape, np.float32)
        flat = out.reshape(-1)
        if stored.dtype == "BF16":
            np.left_shift(raw.view(np.uint16), 16, out=flat.view(np.uint32), dtype=np.uint32)
        elif stored.dtype in _NUMPY:
            flat[:] = raw.view(_NUMPY[stored.dtype])
        else:
            raise UnsupportedModelError(
                f"the embedded engine does not read {name!r} in this number format",
                seen=stored.dtype,
                fix="it reads F32, F16 and BF16",
            )
        return torch.from_numpy(out)

    def _raw(self, stored: StoredTensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if stored.file not in self._maps:
            self._maps[stored.file] = np.memmap(stored.file, np.uint8, "r")
        return np.array(self._maps[stored.file][stored.offset : stored.offset + stored.nbytes])
