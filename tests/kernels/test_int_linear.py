"""Products on codes of 4 and 8 bits, against float64 of the weights that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from hullspeed.errors import UnsupportedModelError
from hullspeed.kernels.blocks import BLOCK, BlockWeight, stack_rows
from hullspeed.kernels.cpu.backend import CpuKernels
from hullspeed.kernels.cpu.int_linear import BlockLinear, fits
from hullspeed.kernels.cpu.int_tile import has_vnni
from hullspeed.kernels.cpu.linear import Fp16Linear
from hullspeed.kernels.ref import RefKernels

vnni = pytest.mark.skipif(not has_vnni(), reason="needs AVX-512 VNNI")


def weight(n: int, k: int, bits: int, seed: int = 0) -> BlockWeight:
    rng = np.random.default_rng(seed)
    blocks = k // BLOCK
    scales = (rng.standard_normal((n, blocks)) * 0.01).astype(np.float16)
    if bits == 8:
        return BlockWeight(rng.integers(-128, 128, (n, blocks, 32)).astype(np.int8), scales)
    codes = rng.integers(0, 256, (n, blocks, 16)).astype(np.uint8)
    return BlockWeight(codes, scales, (rng.standard_normal((n, blocks)) * 0.05).astype(np.float16))


def activations(rows: int, k: int, seed: int = 1) -> Tensor:
    """With outliers, as hidden states have them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k)) * np.exp(2 * rng.standard_normal((1, k)))
    return torch.from_numpy(x.astype(np.float32))


def numbers(weight: BlockWeight) -> NDArray[np.float64]:
    """The weight code by code, as ggml-common.h defines it."""
    out = np.empty(weight.shape)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            b, i = divmod(column, BLOCK)
            if weight.mins is None:
                code, least = int(weight.codes[row, b, i]), 0.0
            else:
                byte = int(weight.codes[row, b, i % 16])
                code, least = byte >> 4 if i >= 16 else byte & 15, float(weight.mins[row, b])
            out[row, column] = code * float(weight.scales[row, b]) + least
    return out


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize_gives_the_number_of_each_code(bits: int) -> None:
    some = weight(3, 96, bits)
    assert some.bits == bits
    assert np.allclose(some.dequantize(), numbers(some), rtol=1e-6, atol=1e-9)


@vnni
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    panels=st.integers(1, 5),
    blocks=st.integers(1, 20),
    bits=st.sampled_from([4, 8]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 2**16),
)
def test_products_are_close_to_float64(
    rows: int, panels: int, blocks: int, bits: int, threads: int, seed: int
) -> None:
    some = weight(32 * panels, BLOCK * blocks, bits, seed)
    x = activations(rows, BLOCK * blocks, seed + 1)
    bias = activations(1, 32 * panels, seed + 2)[0]
    got = BlockLinear(some, bias, threads)(x).double()
    exact = torch.from_numpy(some.dequantize()).double()
    # An activation is off by at most half a step: its block's largest / 65534.
    step = x.double().reshape(rows, -1, BLOCK).abs().amax(2) / 65534
    magnitudes = exact.abs().reshape(len(exact), -1, BLOCK).sum(2)
    float32 = x.double().abs() @ exact.abs().T + bias.abs()
    bound = step @ magnitudes.T + 4e-6 * float32
    assert bool(((got - (x.double() @ exact.T + bias)).abs() <= bound).all())


@vnni
def test_the_largest_codes_do_not_overflow() -> None:
    codes = np.full((32, 2, 32), -128, np.int8)
    some = BlockWeight(codes, np.ones((32, 2), np.float16))
    got = BlockLinear(some, None, 1)(torch.full((9, 64), 3.0))
    assert torch.allclose(got, torch.full((9, 32), -128.0 * 3 * 64))


@vnni
@pytest.mark.parametrize("bits", [4, 8])
def test_closer_to_the_checkpoint_than_fp16(bits: int) -> None:
    some, x = weight(64, 576, bits), activations(16, 576)
    exact = torch.from_numpy(some.dequantize())
    truth = x.double() @ exact.double().T
    ours = (BlockLinear(some, None, 1)(x) - truth).pow(2).mean()
    assert ours < 0.1 * (Fp16Linear(exact)(x) - truth).pow(2).mean()


@vnni
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_batch_or_the_threads(bits: int) -> None:
    some = weight(1024, 576, bits)
    x = activations(700, 576)  # more than one chunk of rows
    serial, parallel = BlockLinear(some, None, 1), BlockLinear(some, None, 2)
    whole = serial(x)
    assert torch.equal(parallel(x), whole)
    for first, last in ((0, 1), (5, 7), (3, 6), (100, 104), (1, 8), (200, 213), (640, 700)):
        part = x[first:last]
        assert torch.equal(serial(part), whole[first:last])
        assert torch.equal(parallel(part), whole[first:last])


@vnni
def test_zeros_and_faults_pass_through() -> None:
    some = weight(32, 64, 4)
    x = activations(6, 64)
    x[1], x[2, 3], x[3, 40], x[4] = 0, float("nan"), float("inf"), 1e-42
    got = BlockLinear(some, None, 1)(x)
    assert torch.equal(got[1], torch.zeros(32))
    assert not got[2].isfinite().any()
    assert not got[3].isfinite().any()
    assert got[4].abs().max() < 1e-39
    assert got[[0, 5]].isfinite().all()


@vnni
def test_a_scale_that_is_not_finite_is_refused() -> None:
    some = weight(32, 64, 4)
    some.scales[3, 1] = np.inf
    with pytest.raises(UnsupportedModelError, match="scale"):
        BlockLinear(some, None, 1)


def test_back_ends_agree_whatever_they_do_with_codes() -> None:
    x = activations(5, 64)
    for n in (64, 40):  # 40 outputs are no whole panels
        some, bias = weight(n, 64, 4), torch.arange(n).float()
        assert fits(some) is (n == 64)
        truth = RefKernels().linear(some, bias)(x)
        for weight_dtype in ("native", "fp16", "fp32"):
            got = CpuKernels(weight_dtype=weight_dtype).linear(some, bias)(x)
            assert torch.allclose(got, truth, rtol=1e-3, atol=1e-2 * float(truth.abs().mean()))


def test_rows_and_stacks() -> None:
    a, b = weight(4, 64, 4), weight(6, 64, 4, seed=5)
    both = stack_rows([a, b])
    assert both is not None
    assert np.array_equal(both.dequantize(), np.concatenate([a.dequantize(), b.dequantize()]))
    order = np.array([3, 1, 0])
    assert np.array_equal(a.rows(order).dequantize(), a.dequantize()[order])
    assert stack_rows([a, weight(4, 64, 8)]) is None
