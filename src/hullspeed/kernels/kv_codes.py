"""How keys and values are kept in fewer bits: the formats, in plain torch.

``fp16`` and ``bf16`` hold each number as it is, rounded. ``int8`` and ``fp8`` (e4m3) have one
float32 scale for each token and head, for keys and values apart, such that the largest magnitude
of a head's vector is the largest code: a token's codes depend on nothing but its own key and
value, and nothing is calibrated. A head's scale factors out of its dot product: that of a key
multiplies a score, that of a value a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hullspeed.errors import UsageError
from hullspeed.kernels.base import KvDtype

TORCH_DTYPES: dict[KvDtype, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}

LARGEST_CODE: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Of the formats with scales."""

_TINY = torch.finfo(torch.float32).tiny


def torch_dtype(name: KvDtype) -> torch.dtype:
    """The element type of a KV cache of format ``name``.

    Raises:
        UsageError: for a format there is not.
    """
    if name not in TORCH_DTYPES:
        raise UsageError(
            "unknown KV cache type", seen=name, fix=f"use one of {', '.join(TORCH_DTYPES)}"
        )
    return TORCH_DTYPES[name]


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Round vectors ``[..., D]`` (float32) to codes ``[..., D]`` of ``dtype`` and scales ``[...]``,
    ``None`` for formats without.

    Rounding is to nearest, ties to even. A finite number beyond fp16's range becomes its largest
    one. A vector that holds an infinity or a NaN reads back as NaN where there are scales.
    """
    if dtype not in LARGEST_CODE:
        if dtype == torch.float16:
            largest = torch.finfo(dtype).max
            x = torch.where(x.isinf(), x, x.clamp(-largest, largest))
        return x.to(dtype), None
    largest = LARGEST_CODE[dtype]
    scales = x.abs().amax(-1) / largest
    scaled = x / scales.clamp_min(_TINY)[..., None]
    if dtype == torch.int8:
        scaled = scaled.nan_to_num().round()
    # Division may round above the largest code, which e4m3 would take for no number.
    return scaled.clamp(-largest, largest).to(dtype), scales


def decode(codes: Tensor, scales: Tensor | None) -> Tensor:
    """What :func:`encode` kept, in float32."""
    x = codes.float()
    return x if scales is None else x * scales[..., None]
