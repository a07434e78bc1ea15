"""Dequantisation, bit for bit against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from hullspeed.arch.ggml import BY_NAME
from hullspeed.errors import UnsupportedModelError
from hullspeed.models.ggml_blocks import dequantize

# Where a block keeps fp16 numbers: random bytes there would be NaN, which equals nothing.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def random_blocks(name: str, n_blocks: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    kind = BY_NAME[name]
    raw = rng.integers(0, 256, (n_blocks, kind.block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        halves = rng.normal(0, 0.1, n_blocks).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(n_blocks, 2)
    return raw.reshape(-1)


@pytest.mark.parametrize("name", HALVES)
def test_blocks_equal_those_of_gguf(name: str) -> None:
    kind = BY_NAME[name]
    n_blocks = 700_001 // kind.block_elements
    raw = random_blocks(name, n_blocks)
    out = np.empty(n_blocks * kind.block_elements, np.float32)
    dequantize(raw, kind, out)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(out.view(np.uint32), wanted.reshape(-1).view(np.uint32))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types(name: str) -> None:
    values = np.random.default_rng(1).normal(0, 1, 1000).astype(np.float32)
    kind = BY_NAME[name]
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    out = np.empty(1000, np.float32)
    dequantize(raw, kind, out)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(out, wanted)


def test_a_type_that_is_not_read_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="IQ4_NL"):
        dequantize(np.zeros(18, np.uint8), BY_NAME["IQ4_NL"], np.empty(32, np.float32))
