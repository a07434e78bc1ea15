"""What a checkpoint can be quantized to: the config section, and the parts of each weight.

The sections are those that vLLM, SGLang and transformers read: the official FP8 layout of Qwen and
DeepSeek (``quant_method: fp8``), or compressed-tensors' schema. What each part is called and how
large it is comes from ``hullspeed.arch``, which reads the same section.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hullspeed.errors import UsageError
from hullspeed.models.quantize_codes import fp8_codes, integer_codes, stored_scales
from hullspeed.models.quantized import QuantizedTensor, numbers
from hullspeed.models.quantized.packing import pack
from hullspeed.models.quantized.tensor import Floats

Kind = Literal["fp8", "int8", "int4"]
Format = Literal["fp8", "compressed-tensors"]

FP8_BLOCK = 128
GROUPS = (32, 128)

_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Some rows of a weight: the parts' bytes by suffix, and what they stand for."""

    parts: dict[str, _Bytes]
    value: QuantizedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A format to quantize to; see :func:`target`.

    Attributes:
        bits: Of a code.
        floating: FP8, not integers.
        block: Rows and columns that share a scale in blocks, or ``None``.
        group: Columns that share a scale; 0 for a whole row.
        quantize_inputs: Engines quantize activations too, per token as they come.
    """

    name: str
    bits: int
    floating: bool = False
    block: tuple[int, int] | None = None
    group: int = 0
    quantize_inputs: bool = False

    @property
    def packed(self) -> bool:
        """Integers side by side in 32-bit words."""
        return not self.floating and not self.quantize_inputs

    def section(self, ignore: Sequence[str]) -> dict[str, Any]:
        """``quantization_config``.

        Args:
            ignore: Modules that are not quantized.
        """
        if self.block is not None:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
                "modules_to_not_convert": list(ignore),
            }
        layout = "pack-quantized" if self.packed else self._unpacked
        inputs = None
        if self.quantize_inputs:
            inputs = self._arguments("token", dynamic=True)
        weights = self._arguments("group" if self.group else "channel", dynamic=False)
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": layout,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": list(ignore),
            "config_groups": {"group_0": group},
        }

    def misfit(self, rows: int, columns: int, *, merged: bool) -> str:
        """Why engines could not read a weight of that shape in this format, or nothing.

        Args:
            rows: Outputs.
            columns: Inputs.
            merged: Engines join it with others that follow (q, k, v; gate, up).
        """
        if self.group and columns % self.group:
            return f"{columns} inputs are no multiple of the group of {self.group}"
        if self.packed and columns % (32 // self.bits):
            return f"{columns} inputs do not fill whole 32-bit words"
        if self.block is not None and merged and rows % self.block[0]:
            return f"{rows} outputs are no multiple of the block of {self.block[0]}"
        return ""

    def encode(self, weight: Floats, dtype: str) -> Encoded:
        """Quantize some rows of a weight, whole blocks of them.

        Args:
            weight: float32 ``[rows, columns]``, finite.
            dtype: Number format of the scales.
        """
        columns = weight.shape[1]
        if self.floating:
            tall, wide = self.block or (1, columns)
            codes, scales = fp8_codes(weight, tall, wide, dtype)
            suffix = "weight_scale_inv" if self.block else "weight_scale"
            parts = {"weight": codes, suffix: stored_scales(scales, dtype)}
            return Encoded(parts, QuantizedTensor(codes, numbers.e4m3(), scales, None, tall, wide))
        wide = self.group or columns
        codes, scales = integer_codes(weight, self.bits, wide, dtype)
        stored = stored_scales(scales, dtype)
        levels = numbers.integers(self.bits, 2 ** (self.bits - 1))
        if self.packed:
            words = pack(codes, self.bits).view(np.uint8)
            parts = {"weight_packed": words, "weight_scale": stored}
        else:
            parts = {"weight": codes ^ np.uint8(128), "weight_scale": stored}  # two's complement
        return Encoded(parts, QuantizedTensor(codes, levels, scales, None, 1, wide))

    @property
    def _unpacked(self) -> str:
        return "float-quantized" if self.floating else "int-quantized"

    def _arguments(self, strategy: str, *, dynamic: bool) -> dict[str, Any]:
        """compressed-tensors' ``QuantizationArgs``."""
        searched = not self.floating and not dynamic
        return {
            "num_bits": self.bits,
            "type": "float" if self.floating else "int",
            "symmetric": True,
            "strategy": strategy,
            "group_size": self.group if strategy == "group" else None,
            "block_structure": None,
            "dynamic": dynamic,
            "actorder": None,
            "observer": None if dynamic else ("mse" if searched else "minmax"),
            "observer_kwargs": {},
        }


def target(
    kind: Kind, *, format: Format | None = None, group: int | None = None, activations: int = 16
) -> Target:
    """The format that the options name.

    Args:
        kind: ``"fp8"`` (official 128 x 128 blocks; with ``format="compressed-tensors"`` one scale
            a row), ``"int8"`` (one scale a row) or ``"int4"`` (groups).
        format: Schema of the config section; integers know only compressed-tensors.
        group: Columns that share a scale of int4: 32 or 128, the default.
        activations: 16, or 8 where engines shall quantize activations too (int8; fp8 always does).

    Raises:
        UsageError: for a combination that cannot be.
    """
    if kind != "fp8" and format == "fp8":
        raise UsageError(
            "integers are stored in the compressed-tensors format", seen=format, fix="leave it out"
        )
    if group is not None and (kind != "int4" or group not in GROUPS):
        raise UsageError(
            "groups are for int4, of 32 or 128 weights", seen=(kind, group), fix="use --to int4"
        )
    if activations not in (8, 16) or (activations == 8 and kind == "int4"):
        raise UsageError(
            "activations are kept in 16 bits, or quantized to 8 with int8 weights",
            seen=activations,
            fix="use --to int8 --activations 8",
        )
    if kind == "int4":
        size = group or 128
        return Target(name=f"int4, groups of {size}", bits=4, group=size)
    if kind == "int8":
        quantized = activations == 8
        name = "int8, a scale a row" + (", activations int8" if quantized else "")
        return Target(name=name, bits=8, quantize_inputs=quantized)
    if format == "compressed-tensors":
        return Target(name="fp8, a scale a row", bits=8, floating=True, quantize_inputs=True)
    return Target(name="fp8, blocks of 128 x 128", bits=8, floating=True, block=(128, 128))
