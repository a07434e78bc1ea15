"""GgufWeights: the tensors of a GGUF model under their Hugging Face names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hullspeed.arch.gguf import GgufFile
from hullspeed.arch.gguf_names import expert_of, stored_names
from hullspeed.arch.model import ModelArch
from hullspeed.arch.tensors import TensorSpec
from hullspeed.errors import CorruptFileError
from hullspeed.kernels.blocks import BlockWeight
from hullspeed.models.ggml_blocks import dequantize
from hullspeed.models.gguf_blocks import block_weight, has_blocks
from hullspeed.models.gguf_layout import GgufLayout
from hullspeed.models.weights import Weights

# llama.cpp keeps Llama 3's scaling of the rotary frequencies as a tensor.
_FREQUENCY_FACTORS = "rope_freqs.weight"


class _Piece(NamedTuple):
    """A run of whole rows of a stored tensor.

    Attributes:
        part: Which of ``parts`` equal runs.
    """

    stored: str
    part: int = 0
    parts: int = 1


class GgufWeights(Weights):
    """Reads and dequantises weight by weight from the mapped files, experts one by one.

    What has been read leaves this process' memory again.

    Args:
        paths: The file, or all shards.
        arch: The model, for its names and numbers of heads.

    Raises:
        CorruptFileError: if a file is damaged, or two shards hold the same tensor.
    """

    def __init__(self, paths: Sequence[Path], arch: ModelArch) -> None:
        self._files: dict[str, GgufFile] = {}
        files = [GgufFile(path) for path in paths]
        for file in files:
            for name in file.tensors:
                if name in self._files:
                    raise CorruptFileError("two shards hold the same tensor", seen=name)
                self._files[name] = file
        architecture = str(files[0].metadata.get("general.architecture"))
        self._layout = GgufLayout(architecture, arch)
        self._specs: dict[str, TensorSpec] = {}
        self._pieces: dict[str, tuple[_Piece, ...]] = {}
        for spec in arch.tensors(extras=False):
            names = stored_names(spec.name, architecture, arch.prefix, self._files)
            if all(name in self._files for name in names):
                self._specs[spec.name] = spec
                self._pieces[spec.name] = tuple(self._piece(spec, name) for name in names)

    def _piece(self, spec: TensorSpec, stored: str) -> _Piece:
        """Where in ``stored`` the weight lies: an expert's share of all experts' tensor, of which
        gate and up may be halves.
        """
        expert = expert_of(spec.name)
        if expert is None:
            return _Piece(stored)
        shape = self._files[stored].tensors[stored].shape
        halves = 2 if ".ffn_gate_up_exps." in stored else 1
        second = halves == 2 and ".up_proj." in spec.name
        return _Piece(stored, halves * expert + second, halves * shape[0])

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor; those that the model has no place for keep their GGUF name."""
        found: dict[str, tuple[int, ...]] = {}
        used = {_FREQUENCY_FACTORS}
        for name, pieces in self._pieces.items():
            used.update(piece.stored for piece in pieces)
            found[name] = self._shape(self._specs[name], pieces)
        rest = {n: file.tensors[n].shape for n, file in self._files.items() if n not in used}
        return found | rest

    def _shape(self, spec: TensorSpec, pieces: tuple[_Piece, ...]) -> tuple[int, ...]:
        """The model's, where what is stored amounts to it in another layout."""
        stored = [self._files[piece.stored].tensors[piece.stored].shape for piece in pieces]
        sizes = (math.prod(s) // p.parts for s, p in zip(stored, pieces, strict=True))
        same_matrix = len(pieces) > 1 or pieces[0].parts > 1 or len(spec.shape) != 2
        if stored == [spec.shape] or (same_matrix and sum(sizes) == spec.elements):
            return spec.shape
        if spec.shape[0] == 1 and stored == [spec.shape[1:]]:
            return spec.shape
        return stored[0]

    def tensor(self, name: str) -> Tensor:
        """Dequantised, in the layout of the Hugging Face checkpoint."""
        spec, pieces = self._known(name)
        stored = [self._read(piece) for piece in pieces]
        if pieces[0].parts > 1:
            stored = [tensor.reshape(spec.shape) for tensor in stored]
        return self._layout.restored(name, stored).reshape(spec.shape)

    def blocks(self, name: str) -> BlockWeight | None:
        """As stored, but for the order of queries' and keys' rows; see :mod:`.gguf_blocks`."""
        spec, (piece, *more) = self._known(name)
        kind = self._files[piece.stored].tensors[piece.stored].type
        if more or not has_blocks(kind, spec.shape):
            return None
        found = block_weight(np.array(self._raw(piece)), kind, spec.shape)
        self._files[piece.stored].release(piece.stored)
        order = self._layout.row_order(name, spec.shape[0])
        return found if found is None or order is None else found.rows(order.numpy())

    def frequency_factors(self) -> Tensor | None:
        """``rope_freqs.weight``, if there."""
        there = _FREQUENCY_FACTORS in self._files
        return self._read(_Piece(_FREQUENCY_FACTORS)) if there else None

    def _known(self, name: str) -> tuple[TensorSpec, tuple[_Piece, ...]]:
        if name not in self._pieces:
            raise CorruptFileError("the GGUF file lacks a tensor", seen=name)
        return self._specs[name], self._pieces[name]

    def _raw(self, piece: _Piece) -> NDArray[np.uint8]:
        raw = np.frombuffer(self._files[piece.stored].data(piece.stored), np.uint8)
        size = len(raw) // piece.parts
        return raw[piece.part * size : (piece.part + 1) * size]

    def _read(self, piece: _Piece) -> Tensor:
        file = self._files[piece.stored]
        info = file.tensors[piece.stored]
        shape = info.shape if piece.parts == 1 else (math.prod(info.shape) // piece.parts,)
        out = np.empty(shape, np.float32)
        raw = self._raw(piece)
        dequantize(raw, info.type, out.reshape(-1))
        del raw
        file.release(piece.stored)
        return torch.from_numpy(out)
