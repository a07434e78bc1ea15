"""SafetensorsWeights: the tensors of a Hugging Face checkpoint, plain or quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hullspeed.arch.headers import OPTIONAL_PARTS, renamed
from hullspeed.arch.mapped import MappedFile
from hullspeed.arch.model import ModelArch
from hullspeed.arch.safetensors import StoredTensor, read_files
from hullspeed.arch.schemes import PLAIN as NOT_QUANTIZED
from hullspeed.arch.schemes import Part, Scheme
from hullspeed.errors import CorruptFileError, UnsupportedModelError
from hullspeed.kernels.blocks import BlockWeight
from hullspeed.memory.held import held_as_codes
from hullspeed.models.plain_numbers import PLAIN, as_float32
from hullspeed.models.quantized import QuantizedTensor
from hullspeed.models.quantized.blocks import as_blocks
from hullspeed.models.quantized.parts import StoredParts
from hullspeed.models.quantized.readers import READERS, parts_stem
from hullspeed.models.weights import Weights


class _Quantized(NamedTuple):
    """How one weight is stored."""

    shape: tuple[int, ...]
    scheme: Scheme
    parts: tuple[Part, ...]


class SafetensorsWeights(Weights):
    """Reads, and dequantizes, tensor by tensor from the mapped files.

    What has been read leaves this process' memory again, so that a load takes the tensors it
    keeps and the one at hand.

    Args:
        paths: All shards.
        arch: The model; needed for quantized weights, and for names under another prefix.

    Raises:
        CorruptFileError: if a file is cut short or contradicts itself or another, or a part of a
            quantized weight is missing.
    """

    def __init__(self, paths: Sequence[Path], arch: ModelArch | None = None) -> None:
        self._stored = read_files(paths)
        self._maps: dict[str, MappedFile] = {}
        self._quantized: dict[str, _Quantized] = {}
        if arch is not None:
            self._stored = dict(renamed(arch, self._stored))
            self._quantized = dict(_quantized(arch, self._stored))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor; a quantized weight counts as the one that its parts stand for."""
        parts = {part.name for found in self._quantized.values() for part in found.parts}
        plain = {
            name: stored.shape
            for name, stored in self._stored.items()
            if name not in parts and not (parts and name.endswith(OPTIONAL_PARTS))
        }
        return plain | {name: found.shape for name, found in self._quantized.items()}

    def check(self, arch: ModelArch) -> None:
        """As for all weights; also refuse biases that the model has no place for.

        Old GPTQ exporters wrote biases of zeros beside every weight.
        """
        super().check(arch)
        below = f"{arch.prefix}layers."
        for extra in arch.extras:
            for spec in extra.tensors if extra.name == "unlisted" else ():
                stray = spec.name.startswith(below) and spec.name.endswith(".bias")
                if stray and bool(self.tensor(spec.name).any()):
                    raise UnsupportedModelError(
                        "the checkpoint holds a bias that its config.json does not declare",
                        seen=spec.name,
                        fix="another engine may run it (--engine)",
                    )

    def tensor(self, name: str) -> Tensor:
        """As float32."""
        if (quantized := self.quantized(name)) is not None:
            values = quantized.dequantize()
            self._release(part.name for part in self._quantized[name].parts)
            return torch.from_numpy(values)
        if name not in self._stored:
            raise CorruptFileError("the checkpoint lacks a tensor", seen=name)
        stored = self._stored[name]
        if stored.dtype not in PLAIN:
            raise UnsupportedModelError(
                f"the embedded engine does not read {name!r} in this number format",
                seen=stored.dtype,
                fix="it reads F32, F16 and BF16, and quantized weights that config.json declares",
            )
        values = as_float32(self._raw(stored), stored.dtype).reshape(stored.shape)
        self._release([name])
        return torch.from_numpy(values)

    def expert(self, name: str, index: int) -> Tensor:
        """Read by itself: no more of the file than its share."""

        def share(of: str) -> StoredTensor | None:
            stored = self._stored.get(of)
            return None if stored is None else _one_of(stored, index)

        if (found := self._quantized.get(name)) is not None:
            stem = parts_stem(found.scheme, name)
            parts = StoredParts(stem, found.shape[1:], share, self._raw)
            values = READERS[found.scheme.method](parts, found.scheme).dequantize()
            self._release(part.name for part in found.parts)
            return torch.from_numpy(values)
        stored = share(name)
        if stored is None or stored.dtype not in PLAIN:
            return super().expert(name, index)  # which says what is wrong
        values = as_float32(self._raw(stored), stored.dtype).reshape(stored.shape)
        self._release([name])
        return torch.from_numpy(values)

    def quantized(self, name: str) -> QuantizedTensor | None:
        """The weight's codes and scales; codes may be a view of the file."""
        found = self._quantized.get(name)
        if found is None:
            return None
        stem = parts_stem(found.scheme, name)
        parts = StoredParts(stem, found.shape, self._stored.get, self._raw)
        return READERS[found.scheme.method](parts, found.scheme)

    def blocks(self, name: str) -> BlockWeight | None:
        """The weight's codes in blocks of 32, where that loses nothing."""
        scheme = self._quantized[name].scheme if name in self._quantized else None
        if scheme is None or not held_as_codes(scheme):
            return None
        quantized = self.quantized(name)
        found = None if quantized is None else as_blocks(quantized)
        if found is not None:
            self._release(part.name for part in self._quantized[name].parts)
        return found

    def _raw(self, stored: StoredTensor) -> NDArray[np.uint8]:
        return self._map(stored).bytes(stored.offset, stored.nbytes)

    def _map(self, stored: StoredTensor) -> MappedFile:
        if stored.file not in self._maps:
            self._maps[stored.file] = MappedFile(Path(stored.file))
        return self._maps[stored.file]

    def _release(self, names: Iterable[str]) -> None:
        for name in names:
            if (stored := self._stored.get(name)) is not None:
                self._map(stored).release(stored.offset, stored.nbytes)


def _one_of(stored: StoredTensor, index: int) -> StoredTensor:
    """Where row ``index`` of the first dimension lies."""
    nbytes = stored.nbytes // stored.shape[0]
    offset = stored.offset + index * nbytes
    return replace(stored, shape=stored.shape[1:], offset=offset, nbytes=nbytes)


def _quantized(
    arch: ModelArch, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, _Quantized]]:
    """The weights that the model's format holds in parts, by name."""
    format_ = arch.weight_format
    if format_.name in ("none", "gguf"):
        return
    for spec in arch.tensors():
        scheme = format_.scheme_of(spec)
        if scheme is not NOT_QUANTIZED:
            parts = tuple(format_.parts(spec, arch.dtype))
            for part in parts:
                if part.name not in stored and not part.name.endswith(OPTIONAL_PARTS):
                    raise CorruptFileError(
                        f"the checkpoint lacks {part.name}",
                        seen=f"{spec.name} in {format_.name}",
                        fix="fetch the model again; config and weights must be of one revision",
                    )
            yield spec.name, _Quantized(spec.shape, scheme, parts)
