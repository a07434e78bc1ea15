"""Blocks used as they are stand for the numbers that the gguf package reads from them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from hullspeed.arch.ggml import BY_NAME
from hullspeed.arch.load import load_arch
from hullspeed.models.gguf_blocks import block_weight, has_blocks
from hullspeed.models.load import open_weights
from hullspeed.sources.files import ModelFiles

HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0]}


@pytest.mark.parametrize("name", HALVES)
def test_a_matrix_of_blocks(name: str) -> None:
    rng = np.random.default_rng(3)
    kind, shape = BY_NAME[name], (7, 96)
    raw = rng.integers(0, 256, (21, kind.block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        raw[:, at : at + 2] = (
            rng.normal(0, 0.1, 21).astype(np.float16).view(np.uint8).reshape(21, 2)
        )
    assert has_blocks(kind, shape)
    got = block_weight(raw.reshape(-1), kind, shape)
    assert got is not None
    assert got.shape == shape
    wanted = gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType[name])
    np.testing.assert_allclose(got.dequantize(), wanted.reshape(shape), rtol=1e-6, atol=1e-9)


def test_what_has_no_blocks_of_32() -> None:
    assert not has_blocks(BY_NAME["Q6_K"], (4, 256))
    assert not has_blocks(BY_NAME["F16"], (4, 64))
    assert not has_blocks(BY_NAME["Q8_0"], (64,))


def test_a_scale_beyond_the_form_is_left_to_the_float_path() -> None:
    kind = BY_NAME["Q4_0"]
    raw = np.zeros((2, kind.block_bytes), np.uint8)
    raw[1, :2] = np.array([9000], np.float16).view(np.uint8)
    assert block_weight(raw.reshape(-1), kind, (1, 64)) is None


def test_rows_of_a_file_in_the_order_of_the_checkpoint(smollm2_files: ModelFiles) -> None:
    arch = load_arch(smollm2_files)
    weights = open_weights(smollm2_files.weights, arch)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        full = f"{arch.prefix}layers.3.{name}.weight"
        blocks = weights.blocks(full)
        assert blocks is not None
        np.testing.assert_allclose(
            blocks.dequantize(), weights.tensor(full).numpy(), rtol=1e-6, atol=1e-8
        )
    assert weights.blocks(f"{arch.prefix}norm.weight") is None
