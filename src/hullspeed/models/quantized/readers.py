"""From a checkpoint's parts to a ``QuantizedTensor``, one reader for each method of ``Scheme``.

Layouts as in ``hullspeed.arch.schemes``, which also names their sources.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hullspeed.arch.schemes import Scheme
from hullspeed.models.quantized import numbers
from hullspeed.models.quantized.packing import Codes, nibbles, unpack
from hullspeed.models.quantized.parts import StoredParts
from hullspeed.models.quantized.tensor import Floats, QuantizedTensor

Reader = Callable[[StoredParts, Scheme], QuantizedTensor]

PACKED_BITS = {"awq": (4,), "gptq": (2, 3, 4, 8), "packed": (2, 4, 8)}

# AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 of eight into a word; column i is at nibble:
_AWQ_NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)


def fp8_block(parts: StoredParts, scheme: Scheme) -> QuantizedTensor:
    """The official layout of Qwen and DeepSeek: ``weight_scale_inv`` multiplies."""
    tall, wide = scheme.block
    scales = parts.scales("weight_scale_inv", _blocks(parts, tall, wide))
    return QuantizedTensor(_e4m3_codes(parts), numbers.e4m3(), scales, tall=tall, wide=wide)


def fp8_tensor(parts: StoredParts, _scheme: Scheme) -> QuantizedTensor:
    """One scale for the matrix, or one for each row."""
    scales = parts.scales("weight_scale", (1, 1), (parts.rows, 1))
    tall = parts.rows // scales.shape[-2]
    return QuantizedTensor(
        _e4m3_codes(parts), numbers.e4m3(), scales, tall=tall, wide=parts.columns
    )


def eight_bit(parts: StoredParts, scheme: Scheme) -> QuantizedTensor:
    """compressed-tensors' ``float-quantized``, ``int-quantized`` and ``naive-quantized``."""
    if scheme.method == "ct_fp8":
        codes, levels = _e4m3_codes(parts), numbers.e4m3()
    else:
        codes, levels = _weight(parts, "I8"), numbers.int8()
    if scheme.block[0]:
        tall, wide = scheme.block
    elif scheme.group == -1:
        tall, wide = parts.rows, parts.columns
    else:
        tall, wide = 1, scheme.group or parts.columns
    grid = _blocks(parts, tall, wide)
    scales = parts.scales("weight_scale", grid)
    zeros = None
    if not scheme.symmetric:
        stored = parts.raw("weight_zero_point", grid, "I8")
        zeros = stored.view(np.int8).astype(np.float32)
    return QuantizedTensor(codes, levels, scales, zeros, tall, wide)


def packed(parts: StoredParts, scheme: Scheme) -> QuantizedTensor:
    """compressed-tensors' ``pack-quantized``: signed integers stored with an offset."""
    bits, offset = scheme.bits, 2 ** (scheme.bits - 1)
    rows, columns, lead = parts.rows, parts.columns, parts.lead
    wide = scheme.group or columns
    grid = _blocks(parts, 1, wide)
    if parts.has("weight_shape"):
        stated = parts.integers("weight_shape", (2,)).tolist()
        if stated != [rows, columns]:
            parts.corrupt("weight_shape", f"states another shape than {[rows, columns]}", stated)
    words = parts.raw("weight_packed", (rows, -(-columns * bits // 32)), "I32")
    codes = unpack(words.reshape(-1, words.shape[-1]), bits, columns).reshape(parts.shape)
    scales = parts.scales("weight_scale", grid)
    zeros = None
    if not scheme.symmetric:
        stored = parts.raw("weight_zero_point", (-(-rows * bits // 32), grid[1]), "I32")
        streams = stored.swapaxes(-1, -2).reshape(-1, stored.shape[-2])
        codes_of = unpack(streams, bits, rows).reshape(*lead, grid[1], rows)
        zeros = codes_of.swapaxes(-1, -2).astype(np.float32) - np.float32(offset)
    group_of = _group_of(parts, "weight_g_idx", wide, grid[1]) if scheme.ordered else None
    levels = numbers.integers(bits, offset)
    return QuantizedTensor(codes, levels, scales, zeros, 1, wide, group_of)


def awq(parts: StoredParts, scheme: Scheme) -> QuantizedTensor:
    """AutoAWQ's GEMM layout: inputs down, outputs packed across."""
    bits, rows, columns = scheme.bits, parts.rows, parts.columns
    wide = scheme.group or columns
    groups = -(-columns // wide)
    words = rows * bits // 32
    codes = _awq_columns(parts.raw("qweight", (columns, words), "I32"), rows)
    scales = np.ascontiguousarray(parts.scales("scales", (groups, rows)).T)
    if scheme.symmetric:
        zeros = np.full_like(scales, 2 ** (bits - 1))
    else:
        zeros = _awq_columns(parts.raw("qzeros", (groups, words), "I32"), rows).astype(np.float32)
    return QuantizedTensor(codes, numbers.integers(bits, 0), scales, zeros, 1, wide)


def gptq(parts: StoredParts, scheme: Scheme) -> QuantizedTensor:
    """AutoGPTQ's and GPTQModel's layout: inputs packed down, outputs across."""
    bits, rows, columns = scheme.bits, parts.rows, parts.columns
    wide = scheme.group or columns
    groups = -(-columns // wide)
    words = parts.raw("qweight", (columns * bits // 32, rows), "I32")
    codes = unpack(words.T, bits, columns)
    scales = np.ascontiguousarray(parts.scales("scales", (groups, rows)).T)
    stored = unpack(parts.raw("qzeros", (groups, rows * bits // 32), "I32"), bits, rows)
    # A zero point of all ones wraps round when one is added, as the kernels' own arithmetic does.
    zeros = ((stored.T + np.uint8(scheme.zero_offset)) & (2**bits - 1)).astype(np.float32)
    group_of = _group_of(parts, "g_idx", wide, groups)
    return QuantizedTensor(codes, numbers.integers(bits, 0), scales, zeros, 1, wide, group_of)


def nvfp4(parts: StoredParts, scheme: Scheme) -> QuantizedTensor:
    """compressed-tensors: the global scale divides."""
    return _fp4(parts, scheme, "weight_packed", "weight_global_scale", divides=True)


def modelopt_nvfp4(parts: StoredParts, scheme: Scheme) -> QuantizedTensor:
    """ModelOpt: the global scale multiplies."""
    return _fp4(parts, scheme, "weight", "weight_scale_2", divides=False)


def mxfp4(parts: StoredParts, scheme: Scheme) -> QuantizedTensor:
    """compressed-tensors: 32 columns share a power of two."""
    codes = nibbles(parts.raw("weight_packed", (parts.rows, parts.columns // 2), "U8"))
    grid = _blocks(parts, 1, scheme.group)
    scales = _powers(parts, "weight_scale", parts.raw("weight_scale", grid, "U8", "F8_E8M0"))
    return QuantizedTensor(codes, numbers.e2m1(), scales, wide=scheme.group)


def mxfp4_blocks(parts: StoredParts, _scheme: Scheme) -> QuantizedTensor:
    """gpt-oss' experts: 16 bytes of 32 inputs and one power of two."""
    inputs, outputs = parts.shape[-2:]  # the plain weight is [experts, in, out]
    grid = (outputs, inputs // 32)
    blocks = parts.raw("blocks", (*grid, 16), "U8")
    codes = nibbles(blocks.reshape(*parts.lead, outputs, inputs // 2))
    scales = _powers(parts, "scales", parts.raw("scales", grid, "U8"))
    return QuantizedTensor(codes, numbers.e2m1(), scales, wide=32, transposed=True)


READERS: dict[str, Reader] = {
    "fp8_block": fp8_block,
    "fp8_tensor": fp8_tensor,
    "ct_fp8": eight_bit,
    "ct_int8": eight_bit,
    "packed": packed,
    "awq": awq,
    "gptq": gptq,
    "nvfp4": nvfp4,
    "modelopt_nvfp4": modelopt_nvfp4,
    "mxfp4": mxfp4,
    "mxfp4_blocks": mxfp4_blocks,
}


def parts_stem(scheme: Scheme, name: str) -> str:
    """What the names of the parts of weight ``name`` begin with."""
    return f"{name}_" if scheme.method == "mxfp4_blocks" else f"{name.removesuffix('.weight')}."


def unreadable(scheme: Scheme) -> str:
    """Why a scheme is not read here, or nothing."""
    if scheme.method not in READERS:
        return f"the layout {scheme.method!r}"
    bits = PACKED_BITS.get(scheme.method)
    if bits and scheme.bits not in bits:
        return f"{scheme.method} with {scheme.bits} bits"
    return ""


def _weight(parts: StoredParts, *dtypes: str) -> Codes:
    codes: Codes = parts.raw("weight", (parts.rows, parts.columns), *dtypes)
    return codes


def _e4m3_codes(parts: StoredParts) -> Codes:
    codes = _weight(parts, "F8_E4M3")
    # 0x7f and 0xff are NaN: the largest code without its sign.
    if codes.size and int(np.max(codes & 127)) == 127:
        parts.corrupt("weight", "holds a weight that is not a number", "NaN")
    return codes


def _blocks(parts: StoredParts, tall: int, wide: int) -> tuple[int, int]:
    return -(-parts.rows // tall), -(-parts.columns // wide)


def _fp4(
    parts: StoredParts, scheme: Scheme, codes: str, global_scale: str, *, divides: bool
) -> QuantizedTensor:
    packed_codes = parts.raw(codes, (parts.rows, parts.columns // 2), "U8")
    stored = parts.raw("weight_scale", _blocks(parts, 1, scheme.group), "F8_E4M3")
    factor = parts.scales(global_scale, (1, 1))
    local = numbers.e4m3()[stored]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scales = local / factor if divides else local * factor
    parts.finite(scales, "weight_scale")
    return QuantizedTensor(nibbles(packed_codes), numbers.e2m1(), scales, wide=scheme.group)


def _powers(parts: StoredParts, suffix: str, exponents: NDArray[np.uint8]) -> Floats:
    return parts.finite(numbers.e8m0()[exponents], suffix)


def _awq_columns(words: NDArray[np.uint32], rows: int) -> Codes:
    """``[n, rows / 8]`` words to codes ``[rows, n]``."""
    in_word_order = unpack(words, 4, rows).reshape(-1, rows // 8, 8)
    return np.ascontiguousarray(in_word_order[:, :, _AWQ_NIBBLE_OF].reshape(-1, rows).T)


def _group_of(parts: StoredParts, suffix: str, wide: int, groups: int) -> NDArray[np.int32] | None:
    """The group of each input, or ``None`` where groups are runs of ``wide`` inputs."""
    if not parts.has(suffix):
        return None
    stored = parts.integers(suffix, (parts.columns,))
    if (stored == -1).all():  # compressed-tensors: never set
        return None
    low, high = int(stored.min()), int(stored.max())
    if not 0 <= low <= high < groups:
        parts.corrupt(suffix, f"names a group outside 0..{groups - 1}", (low, high))
    if np.array_equal(stored, np.arange(parts.columns) // wide):
        return None
    return stored.astype(np.int32)
