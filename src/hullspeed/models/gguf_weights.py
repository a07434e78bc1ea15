"""GgufWeights: the tensors of a GGUF model under their Hugging Face names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hullspeed.arch.gguf import GgufFile
from hullspeed.arch.mixers import FullAttention
from hullspeed.arch.model import ModelArch
from hullspeed.errors import CorruptFileError
from hullspeed.models.ggml_blocks import dequantize
from hullspeed.models.weights import Weights

_NAMES = tomllib.loads(Path(__file__).with_name("gguf_names.toml").read_text())
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_QUERY_OR_KEY = re.compile(r"layers\.(\d+)\.self_attn\.([qk])_proj\.")
_FREQUENCY_FACTORS = "rope_freqs.weight"


class GgufWeights(Weights):
    """Reads and dequantises tensor by tensor from the mapped files.

    Args:
        paths: The file, or all shards.
        arch: The model, for its names and numbers of heads.
        threads: For dequantisation.

    Raises:
        CorruptFileError: if two shards hold the same tensor, or one has an unknown name.
    """

    def __init__(self, paths: Sequence[Path], arch: ModelArch, threads: int = 1) -> None:
        self._arch = arch
        self._threads = threads
        self._aside: dict[str, GgufFile] = {}
        self._files: dict[str, tuple[GgufFile, str]] = {}
        files = [GgufFile(path) for path in paths]
        for file in files:
            for name in file.tensors:
                self._add(file, name)
        self._permuted = files[0].metadata.get("general.architecture") in _NAMES["permuted"]

    def _add(self, file: GgufFile, name: str) -> None:
        if name in _NAMES["aside"]:
            self._aside[name] = file
            return
        known = _huggingface_name(name, self._arch.prefix)
        if known in self._files:
            raise CorruptFileError(f"two shards of the model hold {name!r}", seen=str(file.path))
        self._files[known] = (file, name)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor; names we do not know keep their GGUF name."""
        return {known: file.tensors[name].shape for known, (file, name) in self._files.items()}

    def tensor(self, name: str) -> Tensor:
        """Dequantised; queries and keys in the order of the Hugging Face checkpoint."""
        if name not in self._files:
            raise CorruptFileError("the GGUF file lacks a tensor", seen=name)
        file, stored = self._files[name]
        tensor = self._read(file, stored)
        match = _QUERY_OR_KEY.search(name)
        if match and self._permuted:
            mixer = self._arch.layers[int(match[1])].mixer
            if isinstance(mixer, FullAttention):
                return _halves_apart(tensor, mixer.q_heads if match[2] == "q" else mixer.kv_heads)
        return tensor

    def frequency_factors(self) -> Tensor | None:
        """``rope_freqs.weight``: where llama.cpp keeps Llama 3's scaling of the frequencies."""
        file = self._aside.get(_FREQUENCY_FACTORS)
        return None if file is None else self._read(file, _FREQUENCY_FACTORS)

    def _read(self, file: GgufFile, name: str) -> Tensor:
        info = file.tensors[name]
        out = np.empty(info.shape, np.float32)
        raw = np.frombuffer(file.data(name), np.uint8)
        dequantize(raw, info.type, out.reshape(-1), self._threads)
        return torch.from_numpy(out)


def _huggingface_name(name: str, prefix: str) -> str:
    if name in _NAMES["top"]:
        return str(_NAMES["top"][name]).format(prefix=prefix)
    match = _LAYER.fullmatch(name)
    if match and match[2] in _NAMES["layer"]:
        return f"{prefix}layers.{int(match[1])}.{_NAMES['layer'][match[2]]}.{match[3]}"
    return name


def _halves_apart(tensor: Tensor, heads: int) -> Tensor:
    """Undo the interleaving of llama.cpp: rows (head, pair, half) to (head, half, pair)."""
    rows = tensor.shape[0] // heads // 2
    split = tensor.reshape(heads, rows, 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape).contiguous()
