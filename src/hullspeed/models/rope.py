"""Rotary frequencies: plain, linear, Llama 3 and YaRN scaling."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hullspeed.arch.mixers import FullAttention, SlidingAttention
from hullspeed.arch.model import ModelArch, Rope
from hullspeed.errors import CorruptFileError, UnsupportedModelError
from hullspeed.kernels.base import RotaryTable


class Rotation(NamedTuple):
    """How the heads of a layer are rotated.

    Attributes:
        theta: Base of their own (Gemma 3's sliding layers, unscaled), or ``None`` for the model's.
    """

    dim: int
    theta: float | None = None

    @classmethod
    def of(cls, mixer: FullAttention, arch: ModelArch) -> Self:
        """That of ``mixer`` in ``arch``."""
        theta = arch.options.get("sliding_rope_theta")
        if isinstance(mixer, SlidingAttention) and isinstance(theta, int | float):
            return cls(mixer.rotary_dim, float(theta))
        return cls(mixer.rotary_dim)

    def rope(self, arch: ModelArch) -> Rope:
        """The embedding to make a table of."""
        return arch.rope if self.theta is None else Rope(theta=self.theta)


def rotary_table(
    rope: Rope, rotary_dim: int, max_context_tokens: int, factors: Tensor | None = None
) -> RotaryTable:
    """Cosines and sines of every position, float32 ``[max_context_tokens, rotary_dim / 2]``; YaRN
    stretches them by its attention factor.

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
    stretch = attention_factor(rope)
    return RotaryTable(angles.cos() * stretch, angles.sin() * stretch)


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
    if kind == "yarn":
        return _yarn(plain, fields, rope.theta)
    raise UnsupportedModelError(
        "this kind of RoPE scaling is not computed here",
        seen=kind,
        fix="supported: default, linear, llama3, yarn",
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


def _yarn(plain: Tensor, fields: dict[str, object], theta: float) -> Tensor:
    """Fast pairs are kept, slow ones stretched by ``factor``, those between blended.

    Source: Peng et al., arXiv 2309.00071, section 3.2, and transformers' ``truncate``.
    """
    half = len(plain)
    original_tokens = _number(fields, "original_max_position_embeddings")

    def pair(turns: float) -> float:
        """The pair that turns this often over the original context."""
        wavelength = original_tokens / (turns * 2 * math.pi)
        return half * math.log(wavelength) / math.log(theta)

    low = pair(_number(fields, "beta_fast", 32.0))
    high = pair(_number(fields, "beta_slow", 1.0))
    if fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = ((torch.arange(half).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / _number(fields, "factor") * ramp + plain * (1 - ramp)


def attention_factor(rope: Rope) -> float:
    """By how much YaRN lengthens queries and keys; 1 for other kinds of scaling."""
    fields = dict(rope.scaling)
    if fields.get("rope_type", fields.get("type")) != "yarn":
        return 1.0
    given = fields.get("attention_factor")
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    factor = _number(fields, "factor")

    def lengthened(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        names = ("mscale", "mscale_all_dim")
        above, below = (lengthened(_number(fields, name)) for name in names)
        return above / below
    return lengthened(1.0)


def _number(fields: dict[str, object], name: str, absent: float | None = None) -> float:
    value = fields.get(name)
    value = absent if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModelError(
            f"RoPE scaling lacks a positive {name!r}", seen=value, fix="check the model's config"
        )
    return float(value)
