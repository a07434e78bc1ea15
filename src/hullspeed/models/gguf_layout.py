"""What llama.cpp's converter changes about weights, undone.

Source: ``modify_tensors`` of each architecture in ``conversion/`` of llama.cpp (llama, qwen, gemma,
gpt_oss). Splits and merges of tensors are a matter of names: see :mod:`hullspeed.arch.gguf_names`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from hullspeed.arch.mixers import FullAttention, GatedDeltaNet
from hullspeed.arch.model import ModelArch

# Architectures whose converter interleaves the two halves of each query and key head
# (``permute`` of LlamaModel).
_INTERLEAVED = ("llama",)
# ... that stores norms as factors where the checkpoint stores them less one,
_SHIFTED_NORMS = ("gemma3", "qwen3next", "qwen35", "qwen35moe")
# ... and that orders value heads so that the key heads repeat: all first value heads, all second.
_TILED_HEADS = ("qwen35", "qwen35moe")

_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)$")


class GgufLayout:
    """Weights of one file in the layout of the Hugging Face checkpoint.

    Args:
        architecture: ``general.architecture`` of the file.
        arch: The model.
    """

    def __init__(self, architecture: str, arch: ModelArch) -> None:
        self._architecture, self._arch = architecture, arch

    def row_order(self, name: str, rows: int) -> Tensor | None:
        """Which stored row each row of weight ``name`` is, int64 ``[rows]``; ``None``: the same.

        Holds for weights that :meth:`restored` only reorders.
        """
        found = _IN_LAYER.search(name)
        if found is None or self._architecture not in _INTERLEAVED:
            return None
        mixer, inner = self._arch.layers[int(found[1])].mixer, found[2]
        if isinstance(mixer, FullAttention) and inner.startswith(("self_attn.q_", "self_attn.k_")):
            heads = mixer.q_heads if inner.startswith("self_attn.q_") else mixer.kv_heads
            return _halves_apart(torch.arange(rows), heads)
        return None

    def restored(self, name: str, stored: Sequence[Tensor]) -> Tensor:
        """Weight ``name`` from the tensors that hold it."""
        found = _IN_LAYER.search(name)
        mixer = self._arch.layers[int(found[1])].mixer if found else None
        inner = found[2] if found else ""
        if isinstance(mixer, GatedDeltaNet) and inner.startswith("linear_attn."):
            return self._delta_net(inner.removeprefix("linear_attn."), stored, mixer)
        tensor = stored[0] if len(stored) == 1 else torch.cat(list(stored))
        if self._architecture in _SHIFTED_NORMS and name.endswith("norm.weight"):
            return tensor - 1
        order = self.row_order(name, len(tensor))
        return tensor if order is None else tensor[order]

    def _delta_net(self, part: str, stored: Sequence[Tensor], mixer: GatedDeltaNet) -> Tensor:
        if part == "in_proj_qkvz.weight" and len(stored) == 2:
            return _by_key_head(stored[0], stored[1], mixer)
        tensor = stored[0]
        if part == "A_log":
            tensor = (-tensor).log()
        elif part == "conv1d.weight":
            tensor = tensor.reshape(mixer.conv_dim, 1, mixer.conv_kernel)
        if self._architecture not in _TILED_HEADS:
            return tensor
        keys = 2 * mixer.k_heads * mixer.k_dim
        match part:
            case "in_proj_qkv.weight" | "conv1d.weight":
                return torch.cat([tensor[:keys], _grouped(tensor[keys:], mixer, mixer.v_dim)])
            case "in_proj_z.weight":
                return _grouped(tensor, mixer, mixer.v_dim)
            case "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias":
                return _grouped(tensor, mixer, 1)
            case "out_proj.weight":
                return _grouped(tensor.T, mixer, mixer.v_dim).T.contiguous()
        return tensor


def _halves_apart(tensor: Tensor, heads: int) -> Tensor:
    """Undo the interleaving: rows (head, pair, half) to (head, half, pair)."""
    pairs = tensor.shape[0] // heads // 2
    split = tensor.reshape(heads, pairs, 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)


def _grouped(tensor: Tensor, mixer: GatedDeltaNet, width: int) -> Tensor:
    """Rows of value heads from (nth of its group, key head, row) to (key head, nth, row)."""
    split = tensor.reshape(-1, mixer.k_heads, width, *tensor.shape[1:])
    return split.transpose(0, 1).reshape(tensor.shape)


def _by_key_head(qkv: Tensor, z: Tensor, mixer: GatedDeltaNet) -> Tensor:
    """Qwen3-Next's projection: query, key, values and z of one key head after the other."""
    keys, values = mixer.k_heads * mixer.k_dim, mixer.v_heads * mixer.v_dim
    parts = (*torch.split(qkv, [keys, keys, values]), z)
    return torch.cat([p.reshape(mixer.k_heads, -1, p.shape[1]) for p in parts], 1).flatten(0, 1)
