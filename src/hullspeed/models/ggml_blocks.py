"""GGML block formats to float32, bit for bit as ``gguf.quants.dequantize`` of gguf 0.19.

A tensor is a run of blocks; the layout of each is in ``ggml-common.h`` of ggml. Every kernel reads
blocks ``first .. last`` of ``raw`` (uint8, flat) and writes their elements to ``out`` (float32,
flat). Arithmetic is IEEE as written: no fused multiply-add, which would change the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hullspeed.arch.ggml import GgmlType
from hullspeed.errors import UnsupportedModelError
from hullspeed.kernels.cpu.jit import kernel
from hullspeed.kernels.cpu.simd import half_as_float

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def dequantize(raw: Bytes, kind: GgmlType, out: Floats) -> None:
    """Write the elements of ``raw`` (uint8, flat, whole blocks of ``kind``) to ``out`` (flat).

    Raises:
        UnsupportedModelError: for a type that is not read here.
    """
    if kind.name == "F32":
        out[:] = raw.view(np.float32)
    elif kind.name == "F16":
        out[:] = raw.view(np.float16)
    elif kind.name == "BF16":
        np.left_shift(raw.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    elif kind.name in _KERNELS:
        _KERNELS[kind.name](raw, out, 0, len(out) // kind.block_elements)
    else:
        raise UnsupportedModelError(
            "the embedded engine does not read this GGUF type",
            seen=kind.name,
            fix=f"it reads F32, F16, BF16, {', '.join(_KERNELS)}",
        )


@kernel()
def _half(raw: Bytes, at: int) -> np.float32:
    bits = np.uint16(raw[at]) | (np.uint16(raw[at + 1]) << np.uint16(8))
    return np.float32(half_as_float(bits))


@kernel()
def _q4_0(raw: Bytes, out: Floats, first: int, last: int) -> None:
    for b in range(first, last):
        block, target = raw[b * 18 : b * 18 + 18], out[b * 32 : b * 32 + 32]
        d = _half(block, 0)
        for i in range(16):
            q = block[2 + i]
            target[i] = d * np.float32(np.int32(q & 15) - 8)
            target[16 + i] = d * np.float32(np.int32(q >> 4) - 8)


@kernel()
def _q4_1(raw: Bytes, out: Floats, first: int, last: int) -> None:
    for b in range(first, last):
        block, target = raw[b * 20 : b * 20 + 20], out[b * 32 : b * 32 + 32]
        d, m = _half(block, 0), _half(block, 2)
        for i in range(16):
            q = block[4 + i]
            target[i] = d * np.float32(q & 15) + m
            target[16 + i] = d * np.float32(q >> 4) + m


@kernel()
def _bits(raw: Bytes, at: int) -> np.uint32:
    bits = np.uint32(0)
    for i in range(4):
        bits |= np.uint32(raw[at + i]) << np.uint32(8 * i)
    return bits


@kernel()
def _q5_0(raw: Bytes, out: Floats, first: int, last: int) -> None:
    for b in range(first, last):
        block, target = raw[b * 22 : b * 22 + 22], out[b * 32 : b * 32 + 32]
        d, high = _half(block, 0), _bits(block, 2)
        for i in range(16):
            q = block[6 + i]
            low_bit = np.int32((high >> np.uint32(i)) & np.uint32(1))
            high_bit = np.int32((high >> np.uint32(i + 16)) & np.uint32(1))
            target[i] = d * np.float32((np.int32(q & 15) | (low_bit << 4)) - 16)
            target[16 + i] = d * np.float32((np.int32(q >> 4) | (high_bit << 4)) - 16)


@kernel()
def _q5_1(raw: Bytes, out: Floats, first: int, last: int) -> None:
    for b in range(first, last):
        block, target = raw[b * 24 : b * 24 + 24], out[b * 32 : b * 32 + 32]
        d, m, high = _half(block, 0), _half(block, 2), _bits(block, 4)
        for i in range(16):
            q = block[8 + i]
            low_bit = np.int32((high >> np.uint32(i)) & np.uint32(1))
            high_bit = np.int32((high >> np.uint32(i + 16)) & np.uint32(1))
            target[i] = d * np.float32(np.int32(q & 15) | (low_bit << 4)) + m
            target[16 + i] = d * np.float32(np.int32(q >> 4) | (high_bit << 4)) + m


@kernel()
def _q8_0(raw: Bytes, out: Floats, first: int, last: int) -> None:
    for b in range(first, last):
        block, target = raw[b * 34 : b * 34 + 34], out[b * 32 : b * 32 + 32]
        d = _half(block, 0)
        for i in range(32):
            target[i] = np.float32(np.int8(block[2 + i])) * d


@kernel()
def _q2_k(raw: Bytes, out: Floats, first: int, last: int) -> None:
    for b in range(first, last):
        block, target = raw[b * 84 : b * 84 + 84], out[b * 256 : b * 256 + 256]
        d, d_min = _half(block, 80), _half(block, 82)
        for group in range(16):
            # 16 elements; 128 elements share 32 bytes, two bits each.
            scale = d * np.float32(block[group] & 15)
            offset = d_min * np.float32(block[group] >> 4)
            start = 16 + (group // 8) * 32 + (group % 2) * 16
            shift = np.uint8(group % 8 // 2 * 2)
            for i in range(16):
                q = (block[start + i] >> shift) & 3
                target[group * 16 + i] = scale * np.float32(q) - offset


@kernel()
def _q3_k(raw: Bytes, out: Floats, first: int, last: int) -> None:
    for b in range(first, last):
        block, target = raw[b * 110 : b * 110 + 110], out[b * 256 : b * 256 + 256]
        d = _half(block, 108)
        for group in range(16):
            low = (block[96 + group % 8] >> np.uint8(group // 8 * 4)) & 15
            high = (block[104 + group % 4] >> np.uint8(group // 4 * 2)) & 3
            scale = d * np.float32(np.int32(low | (high << 4)) - 32)
            start = 32 + (group // 8) * 32 + (group % 2) * 16
            shift = np.uint8(group % 8 // 2 * 2)
            mask_shift = np.uint8(group // 2)
            for i in range(16):
                q = np.int32((block[start + i] >> shift) & 3)
                kept = np.int32((block[(group % 2) * 16 + i] >> mask_shift) & 1)
                target[group * 16 + i] = scale * np.float32(q - ((kept ^ 1) << 2))


@kernel()
def _scale_and_min(block: Bytes, group: int) -> tuple[np.uint8, np.uint8]:
    """Six-bit scale and minimum of group 0..7 of a Q4_K or Q5_K block."""
    if group < 4:
        return block[4 + group] & np.uint8(63), block[8 + group] & np.uint8(63)
    low = block[8 + group]
    scale = (low & np.uint8(15)) | ((block[group] >> np.uint8(2)) & np.uint8(48))
    minimum = (low >> np.uint8(4)) | ((block[4 + group] >> np.uint8(2)) & np.uint8(48))
    return scale, minimum


@kernel()
def _q4_k(raw: Bytes, out: Floats, first: int, last: int) -> None:
    for b in range(first, last):
        block, target = raw[b * 144 : b * 144 + 144], out[b * 256 : b * 256 + 256]
        d, d_min = _half(block, 0), _half(block, 2)
        for group in range(8):
            scale_bits, min_bits = _scale_and_min(block, group)
            scale, offset = d * np.float32(scale_bits), d_min * np.float32(min_bits)
            start, shift = 16 + group // 2 * 32, np.uint8(group % 2 * 4)
            for i in range(32):
                q = (block[start + i] >> shift) & 15
                target[group * 32 + i] = scale * np.float32(q) - offset


@kernel()
def _q5_k(raw: Bytes, out: Floats, first: int, last: int) -> None:
    for b in range(first, last):
        block, target = raw[b * 176 : b * 176 + 176], out[b * 256 : b * 256 + 256]
        d, d_min = _half(block, 0), _half(block, 2)
        for group in range(8):
            scale_bits, min_bits = _scale_and_min(block, group)
            scale, offset = d * np.float32(scale_bits), d_min * np.float32(min_bits)
            start, shift = 48 + group // 2 * 32, np.uint8(group % 2 * 4)
            for i in range(32):
                q = (block[start + i] >> shift) & 15
                high = (block[16 + i] >> np.uint8(group)) & 1
                target[group * 32 + i] = scale * np.float32(q | (high << 4)) - offset


@kernel()
def _q6_k(raw: Bytes, out: Floats, first: int, last: int) -> None:
    for b in range(first, last):
        block, target = raw[b * 210 : b * 210 + 210], out[b * 256 : b * 256 + 256]
        d = _half(block, 208)
        for group in range(16):
            # 16 elements: half 0/1 of 128; within it, four runs of 32.
            half, run = group // 8, group % 8 // 2
            scale = d * np.float32(np.int8(block[192 + group]))
            low_at = half * 64 + (run % 2) * 32 + (group % 2) * 16
            low_shift = np.uint8(run // 2 * 4)
            high_at = 128 + half * 32 + (group % 2) * 16
            high_shift = np.uint8(run * 2)
            for i in range(16):
                low = np.int32((block[low_at + i] >> low_shift) & 15)
                high = np.int32((block[high_at + i] >> high_shift) & 3)
                target[group * 16 + i] = scale * np.float32((low | (high << 4)) - 32)


_KERNELS: dict[str, Callable[[Bytes, Floats, int, int], None]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
