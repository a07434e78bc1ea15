"""Activations: what a layer moves and launches for a token beside its weights and its KV."""

from __future__ import annotations

from collections import Counter

from hullspeed.arch.mixers import GatedDeltaNet, Mamba2, Mixer
from hullspeed.arch.mlps import MoeMlp
from hullspeed.arch.model import ModelArch
from hullspeed.arch.tensors import Role

_WIDE_PASSES = 8  # of a hidden-wide row: two residual sums with their norms, two reads, two writes
_GDN_CHUNK_TOKENS, _MAMBA_CHUNK_TOKENS = 64, 128
_DELTA_PASSES = 8  # of the recurrent layers' own rows, 16 bit: convolution, gates, chunk kernels
# Kernels of a recurrent layer over those of an attention layer: convolution, gates, gated norm.
_RECURRENT_KERNELS = 1.2
# A layer's launches by the format that it multiplies in, over those of 16 bit: quantizing the
# rows first, and the slower start of such products. Per product 4, 7 and 9 microseconds in NVIDIA's
# published measurements per operation (16, 8 and 4 bit; aiconfigurator-core 0.12.0), beside some 20
# of a layer's other kernels.
_FORMAT_KERNELS = {"bf16": 1.0, "fp8": 1.25, "int8": 1.25, "fp4": 1.5}


def row_bytes(arch: ModelArch, tp: int) -> float:
    """Bytes that one token's 16-bit activations take through memory in all layers of a rank, beside
    the products themselves: norms and residuals, which every rank computes in full, and one write
    and one read of what lies between products, which ranks share.
    """
    elements = 0.0
    alike = Counter((layer.mixer, layer.mlp) for layer in arch.layers)
    for (mixer, mlp), layers in alike.items():
        shared = sum(
            2.0 * (sum(tensor.shape) - arch.hidden)
            for part in (mixer, mlp)
            for tensor in part.tensors(arch.hidden)
            if tensor.role is Role.LINEAR and len(tensor.shape) == 2
        )
        each = _WIDE_PASSES * arch.hidden + shared / tp
        if isinstance(mlp, MoeMlp):
            each += 3.0 * mlp.experts_per_token * (mlp.intermediate / tp + arch.hidden)
        elements += layers * each
    return 2.0 * elements


def recurrent_bytes(mixer: Mixer) -> float:
    """Bytes a prompt token moves in one recurrent layer: its share of the chunk's state in 32
    bit, written and read, and its rows. Chunk kernels are bound by this, not by their arithmetic:
    a layer of Qwen3.5-27B takes 0.05 (vLLM) to 0.13 microseconds a token (SGLang) on an H100.
    """
    if isinstance(mixer, GatedDeltaNet):
        value = mixer.v_heads * mixer.v_dim
        state, rows, chunk = value * mixer.k_dim, mixer.conv_dim + value, _GDN_CHUNK_TOKENS
    elif isinstance(mixer, Mamba2):
        state, rows = mixer.inner * mixer.state_dim, mixer.conv_dim + mixer.inner
        chunk = _MAMBA_CHUNK_TOKENS
    else:
        return 0.0
    return 8.0 * state / chunk + 2.0 * _DELTA_PASSES * rows


def layer_launches(arch: ModelArch, compute_dtype: str) -> float:
    """Layers launched, in layers of attention and 16-bit products."""
    each = sum(
        _RECURRENT_KERNELS if isinstance(layer.mixer, GatedDeltaNet | Mamba2) else 1.0
        for layer in arch.layers
    )
    return each * _FORMAT_KERNELS[compute_dtype]
