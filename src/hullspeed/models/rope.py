"""Rotary frequencies: plain, linear and Llama 3 scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hullspeed.arch.model import Rope
from hullspeed.errors import CorruptFileError, UnsupportedModelError
from hullspeed.kernels.base import RotaryTable


def rotary_table(
    rope: Rope, rotary_dim: int, max_context_tokens: int, factors: Tensor | None = None
) -> RotaryTable:
    """Cosines and sines of every position, float32 ``[max_context_tokens, rotary_dim / 2]``.

    ``factors`` are divisors of the plain frequencies that came with the weights, float32
    ``[rotary_dim / 2]``; they replace ``rope.scaling``.

    Raises:
        UnsupportedModelError: for a kind of scaling that is not computed here.
        CorruptFileError: if the factors are of another size.
    """
    if factors is None:
        turns = frequencies(rope, rotary_dim)
    elif factors.shape != (rotary_dim // 2,):
        raise CorruptFileError(
            f"frequency factors must be {rotary_dim // 2} numbers", seen=tuple(factors.shape)
        )
    else:
        turns = frequencies(Rope(theta=rope.theta), rotary_dim) / factors
    angles = torch.outer(torch.arange(max_context_tokens).float(), turns)
    return RotaryTable(angles.cos(), angles.sin())


def frequencies(rope: Rope, rotary_dim: int) -> Tensor:
    """Radians per token of each pair of dimensions, float32 ``[rotary_dim / 2]``: theta^(-2i/d),
    scaled as ``rope.scaling`` says. Source: ``modeling_rope_utils`` in transformers.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    fields = dict(rope.scaling)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / _number(fields, "factor")
    if kind == "llama3":
        return _llama3(plain, fields)
    raise UnsupportedModelError(
        "this kind of RoPE scaling is not computed here",
        seen=kind,
        fix="supported: default, linear, llama3",
    )


def _llama3(plain: Tensor, fields: dict[str, object]) -> Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    factor = _number(fields, "factor")
    low = _number(fields, "low_freq_factor")
    high = _number(fields, "high_freq_factor")
    original_tokens = _number(fields, "original_max_position_embeddings")
    wavelength = 2 * math.pi / plain
    blend = (original_tokens / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    scaled = torch.where(wavelength > original_tokens / low, plain / factor, blended)
    return torch.where(wavelength < original_tokens / high, plain, scaled)


def _number(fields: dict[str, object], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModelError(
            f"RoPE scaling lacks a positive {name!r}", seen=value, fix="check the model's config"
        )
    return float(value)
