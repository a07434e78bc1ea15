"""GgufWeights: the tensors of a GGUF model under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hullspeed.arch.gguf import GgufFile
from hullspeed.arch.gguf_names import gguf_names
from hullspeed.arch.mixers import FullAttention
from hullspeed.arch.model import ModelArch
from hullspeed.errors import CorruptFileError
from hullspeed.kernels.blocks import BlockWeight
from hullspeed.models.ggml_blocks import dequantize
from hullspeed.models.gguf_blocks import block_weight, has_blocks
from hullspeed.models.weights import Weights

# llama.cpp keeps Llama 3's scaling of the rotary frequencies as a tensor.
_FREQUENCY_FACTORS = "rope_freqs.weight"

# Architectures whose converter interleaves the two halves of each query and key head
# (``permute`` of LlamaModel in llama.cpp's convert_hf_to_gguf.py).
_INTERLEAVED = ("llama",)


class GgufWeights(Weights):
    """Reads and dequantises tensor by tensor from the mapped files.

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
        self._stored = {
            spec.name: stored
            for spec in arch.tensors(extras=False)
            for stored in gguf_names(spec.name, architecture, arch.prefix)[:1]
            if stored in self._files
        }
        self._heads = _interleaved_heads(arch) if architecture in _INTERLEAVED else {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor; those that the model has no place for keep their GGUF name."""
        names = {stored: name for name, stored in self._stored.items()}
        return {
            names.get(stored, stored): file.tensors[stored].shape
            for stored, file in self._files.items()
            if stored != _FREQUENCY_FACTORS
        }

    def tensor(self, name: str) -> Tensor:
        """Dequantised; queries and keys in the order of the Hugging Face checkpoint."""
        if name not in self._stored:
            raise CorruptFileError("the GGUF file lacks a tensor", seen=name)
        tensor = self._read(self._stored[name])
        return _halves_apart(tensor, self._heads[name]) if name in self._heads else tensor

    def blocks(self, name: str) -> BlockWeight | None:
        """As stored, but for the order of queries' and keys' rows; see :mod:`.gguf_blocks`."""
        if name not in self._stored:
            raise CorruptFileError("the GGUF file lacks a tensor", seen=name)
        stored = self._stored[name]
        file = self._files[stored]
        info = file.tensors[stored]
        if not has_blocks(info.type, info.shape):
            return None
        raw = np.array(np.frombuffer(file.data(stored), np.uint8))
        file.release(stored)
        found = block_weight(raw, info.type, info.shape)
        if found is None or name not in self._heads:
            return found
        order = _halves_apart(torch.arange(info.shape[0]), self._heads[name])
        return found.rows(order.numpy())

    def frequency_factors(self) -> Tensor | None:
        """``rope_freqs.weight``, if there."""
        return self._read(_FREQUENCY_FACTORS) if _FREQUENCY_FACTORS in self._files else None

    def _read(self, stored: str) -> Tensor:
        file = self._files[stored]
        info = file.tensors[stored]
        out = np.empty(info.shape, np.float32)
        raw = np.frombuffer(file.data(stored), np.uint8)
        dequantize(raw, info.type, out.reshape(-1))
        del raw
        file.release(stored)
        return torch.from_numpy(out)


def _interleaved_heads(arch: ModelArch) -> dict[str, int]:
    """Number of heads of each query and key projection, by name."""
    heads = {}
    for i, layer in enumerate(arch.layers):
        if isinstance(layer.mixer, FullAttention):
            for part in ("weight", "bias"):
                below = f"{arch.prefix}layers.{i}.self_attn."
                heads[f"{below}q_proj.{part}"] = layer.mixer.q_heads
                heads[f"{below}k_proj.{part}"] = layer.mixer.kv_heads
    return heads


def _halves_apart(tensor: Tensor, heads: int) -> Tensor:
    """Undo the interleaving: rows (head, pair, half) to (head, half, pair)."""
    pairs = tensor.shape[0] // heads // 2
    split = tensor.reshape(heads, pairs, 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)
