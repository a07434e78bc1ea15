"""Keys and values in fewer bits: rounding against torch's own types, attention against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hullspeed.errors import UsageError
from hullspeed.kernels.base import AttentionShape, KvDtype, KvPages, RotaryTable
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.cpu import formats
from hullspeed.kernels.cpu.backend import CpuKernels
from hullspeed.kernels.kv_codes import TORCH_DTYPES, decode, encode
from hullspeed.kernels.ref import RefKernels

NARROW: list[KvDtype] = ["fp16", "bf16", "int8", "fp8"]
KINDS = {"fp16": formats.FP16, "bf16": formats.BF16, "int8": formats.INT8, "fp8": formats.FP8}
SHAPE = AttentionShape(6, 2, 32)
N_TOKENS, PAGE_TOKENS = 150, 64


def vectors() -> torch.Tensor:
    """Of all sizes: ordinary, zero, tiny, huge."""
    torch.manual_seed(0)
    x = torch.randn(300, 64) * torch.rand(300, 1) * 4
    return torch.cat([x, torch.zeros(1, 64), x[:4] * 1e-41, x[:4] * 1e36, x[:4] * 2.0**-12])


@pytest.mark.parametrize("dtype", NARROW)
def test_the_kernel_rounds_as_torch(dtype: KvDtype) -> None:
    x = vectors()
    codes, scales = encode(x, TORCH_DTYPES[dtype])
    wanted = codes.view(formats.STAND_INS[codes.dtype]).numpy()
    got = np.empty(64, np.int32)
    for i, row in enumerate(x.numpy()):
        scale = formats.encode(row, KINDS[dtype], got)
        np.testing.assert_array_equal(got.astype(wanted.dtype), wanted[i])
        if scales is not None:
            assert scale == scales[i]


def test_every_e4m3_number_is_its_own_code() -> None:
    """And what lies between two is rounded as ``torch.float8_e4m3fn`` does."""
    codes = torch.arange(256).to(torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].sort().values
    between = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([449.0, -1e9])])
    wanted = between.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    got = [int(formats._to_fp8(np.float32(v))) for v in between.tolist()]
    assert got == wanted.tolist()


@pytest.mark.parametrize(
    ("dtype", "error"), [("fp16", 2**-11), ("bf16", 2**-8), ("int8", 1 / 253), ("fp8", 1 / 27)]
)
def test_the_error_is_bounded_by_the_largest(dtype: KvDtype, error: float) -> None:
    x = vectors()[:300]
    read = decode(*encode(x, TORCH_DTYPES[dtype]))
    assert ((read - x).abs() <= error * x.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_no_finite_number_reads_back_as_none_and_nan_stays(dtype: KvDtype) -> None:
    x = vectors()
    x[0, 0] = 1e5 if dtype != "bf16" else 1e38
    assert decode(*encode(x, TORCH_DTYPES[dtype])).isfinite().all()
    x[1, 3] = torch.nan
    assert decode(*encode(x, TORCH_DTYPES[dtype]))[1].isnan().any()


def written(kernels: Any, dtype: KvDtype, chunk: int) -> tuple[torch.Tensor, KvPages]:
    """Attention of a sequence that is written and read in chunks."""
    torch.manual_seed(1)
    qkv = torch.randn(N_TOKENS, 10 * 32)
    angles = torch.randn(200, 16)
    rotary = RotaryTable(angles.cos(), angles.sin())
    kv, out = kernels.allocate_kv(SHAPE, 4, PAGE_TOKENS, dtype), []
    for start in range(0, N_TOKENS, chunk):
        part = qkv[start : start + chunk].clone()
        plan = kernels.plan(Batch.of([SpanInput([0] * len(part), start, [3, 0, 2], True)]))
        q = kernels.rotate_and_store(part, plan, SHAPE, rotary, None, kv)
        out.append(kernels.attend(q, plan, SHAPE, kv))
    return torch.cat(out), kv


@pytest.mark.parametrize("dtype", NARROW)
def test_attention_reads_what_was_written(dtype: KvDtype) -> None:
    cpu = CpuKernels(threads=1)
    ours, pages = written(cpu, dtype, N_TOKENS)
    wanted, _ = written(RefKernels(), dtype, N_TOKENS)
    # Keys that differ in the last bit may round to neighbouring codes.
    torch.testing.assert_close(ours, wanted, atol=2e-2 if dtype == "fp8" else 5e-3, rtol=0)
    assert (ours - wanted).abs().mean() < 2e-4
    for chunk in (1, 7, 64):
        again, other = written(cpu, dtype, chunk)
        assert torch.equal(again, ours)
        for a, b in zip(pages.pools, other.pools, strict=True):
            assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("kernels", [CpuKernels(), RefKernels()], ids=["cpu", "ref"])
@pytest.mark.parametrize("dtype", NARROW)
def test_pages_are_copied_with_their_scales(kernels: Any, dtype: KvDtype) -> None:
    _, kv = written(kernels, dtype, N_TOKENS)
    kernels.copy_pages([kv], [3], [1])
    assert len(kv.pools) == (4 if dtype in ("int8", "fp8") else 2)
    for pool in kv.pools:
        assert torch.equal(pool[1].float(), pool[3].float())
        assert pool[1].float().abs().sum() > 0


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UsageError, match="KV cache type"):
        RefKernels().allocate_kv(SHAPE, 1, 64, "int3")  # type: ignore[arg-type]
