"""Schemes: what one quantized matrix is made of, tensor by tensor.

Sources: ``finegrained_fp8`` in transformers (fp8), AutoAWQ's and GPTQModel's ``QuantLinear``
(awq, gptq), ``compressed-tensors`` compressors (float, int, packed, nvfp4, mxfp4), ModelOpt's
unified checkpoint (modelopt) and gpt-oss' MXFP4 checkpoint (mxfp4 blocks).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hullspeed.arch.dtypes import nbytes
from hullspeed.arch.tensors import TensorSpec
from hullspeed.errors import UnsupportedModelError


class Part(NamedTuple):
    """One tensor as the checkpoint stores it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return nbytes(math.prod(self.shape), self.dtype)


@dataclass(frozen=True)
class Scheme:
    """How a matrix is quantized.

    Attributes:
        method: Key of ``METHODS``.
        bits: Bits of one weight.
        group: Input columns that share a scale; 0 where a scale covers a whole row.
        block: Rows and columns that share a scale, where they come in blocks.
        scale_dtype: Type of the scales; empty means the model's own.
        symmetric: No zero points.
        static_input: A scale of the activations is stored too.
        ordered: The order of activations is stored (GPTQ's ``desc_act``, ``actorder``).
        zero_offset: Added to a stored zero point (GPTQ's first format stores them less one).
    """

    method: str
    bits: int = 16
    group: int = 0
    block: tuple[int, int] = (0, 0)
    scale_dtype: str = ""
    symmetric: bool = True
    static_input: bool = False
    ordered: bool = False
    zero_offset: int = 0


PLAIN = Scheme("plain")


def parts_of(scheme: Scheme, spec: TensorSpec, dtype: str) -> Iterator[Part]:
    """The tensors that hold one quantized weight.

    Raises:
        UnsupportedModelError: if the weight's shape does not fit the scheme.
    """
    stem = spec.name.removesuffix(".weight")
    if scheme.method == "mxfp4_blocks":
        yield from _mxfp4_blocks(spec)
        return
    *lead, rows, columns = spec.shape
    unit = scheme.group or scheme.block[1] or 1
    if scheme.method in _WHOLE_GROUPS and columns % unit:
        raise UnsupportedModelError(
            f"{spec.name} has {columns} input columns, no multiple of the group of {unit}",
            seen=scheme.method,
            fix="check quantization_config",
        )
    for suffix, kind, shape in METHODS[scheme.method](scheme, rows, columns):
        yield Part(f"{stem}.{suffix}", kind or scheme.scale_dtype or dtype, (*lead, *shape))


_Row = tuple[str, str, tuple[int, ...]]
_WHOLE_GROUPS = frozenset({"awq", "gptq", "packed", "nvfp4", "modelopt_nvfp4", "mxfp4"})


def _fp8_block(scheme: Scheme, rows: int, columns: int) -> Iterator[_Row]:
    tall, wide = scheme.block
    yield "weight", "fp8", (rows, columns)
    yield "weight_scale_inv", "", (-(-rows // tall), -(-columns // wide))
    if scheme.static_input:
        yield "input_scale", "fp32", ()


def _fp8_tensor(scheme: Scheme, rows: int, columns: int) -> Iterator[_Row]:
    """ModelOpt's FP8, and the ``fp8`` method without blocks: one scale for the matrix."""
    yield "weight", "fp8", (rows, columns)
    yield "weight_scale", "fp32", ()
    if scheme.static_input:
        yield "input_scale", "fp32", ()


def _eight_bit(scheme: Scheme, rows: int, columns: int) -> Iterator[_Row]:
    """compressed-tensors' ``float-quantized`` and ``int-quantized``."""
    yield "weight", "fp8" if scheme.method == "ct_fp8" else "int8", (rows, columns)
    if scheme.block[0]:
        tall, wide = scheme.block
        yield "weight_scale", "", (-(-rows // tall), -(-columns // wide))
    elif scheme.group == -1:  # one for the whole matrix
        yield "weight_scale", "", (1,)
    else:
        yield "weight_scale", "", (rows, 1 if not scheme.group else columns // scheme.group)
    if not scheme.symmetric:
        yield "weight_zero_point", "int8", (rows, 1)
    if scheme.static_input:
        yield "input_scale", "", (1,)


def _packed(scheme: Scheme, rows: int, columns: int) -> Iterator[_Row]:
    """compressed-tensors' ``pack-quantized``: integers side by side in 32-bit words."""
    per_word = 32 // scheme.bits
    groups = columns // scheme.group if scheme.group else 1
    yield "weight_packed", "int32", (rows, -(-columns // per_word))
    yield "weight_scale", "", (rows, groups)
    yield "weight_shape", "int64", (2,)
    if not scheme.symmetric:
        yield "weight_zero_point", "int32", (-(-rows // per_word), groups)
    if scheme.ordered:
        yield "weight_g_idx", "int32", (columns,)


def _awq(scheme: Scheme, rows: int, columns: int) -> Iterator[_Row]:
    per_word = 32 // scheme.bits
    groups = columns // scheme.group if scheme.group else 1
    yield "qweight", "int32", (columns, rows // per_word)
    yield "scales", "fp16", (groups, rows)
    if not scheme.symmetric:
        yield "qzeros", "int32", (groups, rows // per_word)


def _gptq(scheme: Scheme, rows: int, columns: int) -> Iterator[_Row]:
    groups = columns // scheme.group if scheme.group else 1
    yield "qweight", "int32", (columns * scheme.bits // 32, rows)
    yield "qzeros", "int32", (groups, rows * scheme.bits // 32)
    yield "scales", "fp16", (groups, rows)
    yield "g_idx", "int32", (columns,)


def _nvfp4(scheme: Scheme, rows: int, columns: int) -> Iterator[_Row]:
    """compressed-tensors' ``nvfp4-pack-quantized``."""
    yield "weight_packed", "uint8", (rows, columns // 2)
    yield "weight_scale", "fp8", (rows, columns // scheme.group)
    yield "weight_global_scale", "fp32", (1,)
    if scheme.static_input:
        yield "input_global_scale", "fp32", (1,)


def _modelopt_nvfp4(scheme: Scheme, rows: int, columns: int) -> Iterator[_Row]:
    yield "weight", "uint8", (rows, columns // 2)
    yield "weight_scale", "fp8", (rows, columns // scheme.group)
    yield "weight_scale_2", "fp32", ()
    if scheme.static_input:
        yield "input_scale", "fp32", ()


def _mxfp4(scheme: Scheme, rows: int, columns: int) -> Iterator[_Row]:
    """compressed-tensors' ``mxfp4-pack-quantized``."""
    yield "weight_packed", "uint8", (rows, columns // 2)
    yield "weight_scale", "uint8", (rows, columns // scheme.group)


def _mxfp4_blocks(spec: TensorSpec) -> Iterator[Part]:
    """gpt-oss: 32 inputs are 16 bytes and one scale. Stored ``[experts, out, in]`` although the
    plain weight is ``[experts, in, out]``.
    """
    experts, columns, rows = spec.shape
    yield Part(f"{spec.name}_blocks", "uint8", (experts, rows, columns // 32, 16))
    yield Part(f"{spec.name}_scales", "uint8", (experts, rows, columns // 32))


METHODS: dict[str, Callable[[Scheme, int, int], Iterator[_Row]]] = {
    "fp8_block": _fp8_block,
    "fp8_tensor": _fp8_tensor,
    "ct_fp8": _eight_bit,
    "ct_int8": _eight_bit,
    "packed": _packed,
    "awq": _awq,
    "gptq": _gptq,
    "nvfp4": _nvfp4,
    "modelopt_nvfp4": _modelopt_nvfp4,
    "mxfp4": _mxfp4,
}
