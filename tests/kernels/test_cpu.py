"""The CPU kernels against plain torch, kernel by kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hullspeed.errors import UnsupportedModelError, UsageError
from hullspeed.kernels.base import AttentionShape, HeadNorms, KvPages, RotaryTable
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.cpu.backend import CpuKernels
from hullspeed.kernels.cpu.simd import exp
from hullspeed.kernels.ref import RefKernels

REF = RefKernels()
N_PAGES = 40


@pytest.fixture(scope="module", params=[1, 2], ids=["1 thread", "2 threads"])
def cpu(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(weight_dtype="fp32", threads=request.param)


@dataclass
class Case:
    """Queries of a mixed batch over random pages."""

    shape: AttentionShape
    batch: Batch
    q: torch.Tensor
    kv: KvPages

    def attend(self, kernels: Any) -> torch.Tensor:
        result: torch.Tensor = kernels.attend(self.q, kernels.plan(self.batch), self.shape, self.kv)
        return result


def make_case(
    shape: AttentionShape, lengths: list[tuple[int, int]], page_tokens: int = 64, seed: int = 0
) -> Case:
    """``lengths``: (start, tokens) of each span. What no query may read is NaN."""
    torch.manual_seed(seed)
    free = iter(torch.randperm(N_PAGES).tolist())
    g, d = shape.kv_heads, shape.head_dim
    keys = torch.full((N_PAGES, g, d, page_tokens), torch.nan)
    values = torch.full((N_PAGES, g, page_tokens, d), torch.nan)
    spans = []
    for start, n in lengths:
        pages = [next(free) for _ in range(-(-(start + n) // page_tokens))]
        spans.append(SpanInput([0] * n, start, pages, sample=True))
        for i, page in enumerate(pages):
            used = min(page_tokens, start + n - i * page_tokens)
            keys[page, :, :, :used] = torch.randn(g, d, used)
            values[page, :, :used] = torch.randn(g, used, d)
    n_tokens = sum(n for _, n in lengths)
    q = torch.randn(n_tokens, shape.q_heads, d)
    return Case(shape, Batch.of(spans), q, KvPages(keys, values))


MIXED = [(0, 1), (63, 1), (64, 1), (200, 1), (0, 5), (30, 70), (64, 64), (129, 131)]


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(9, 3, 64),
        AttentionShape(14, 2, 64),
        AttentionShape(8, 8, 32),
        AttentionShape(16, 2, 128),
        AttentionShape(4, 1, 80),
        AttentionShape(12, 2, 16),
        AttentionShape(6, 2, 64, window_tokens=50),
        AttentionShape(6, 2, 64, window_tokens=64),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_tokens", [64, 16])
def test_attention(cpu: CpuKernels, shape: AttentionShape, page_tokens: int) -> None:
    lengths = MIXED if page_tokens == 64 else [(0, 1), (16, 1), (37, 60), (90, 9), (0, 33)]
    case = make_case(shape, lengths, page_tokens)
    torch.testing.assert_close(case.attend(cpu), case.attend(REF), atol=2e-5, rtol=1e-5)


def test_attention_depends_neither_on_the_batch_nor_on_the_chunk(cpu: CpuKernels) -> None:
    """Bit for bit: what the prefix cache serves must equal what would be computed."""
    case = make_case(AttentionShape(9, 3, 64), MIXED)
    together = case.attend(cpu)
    starts = case.batch.span_starts
    for s in range(len(MIXED)):
        for rows in ([slice(starts[s], starts[s + 1])], _one_by_one(starts[s], starts[s + 1])):
            for part in rows:
                alone = Batch(
                    tokens=case.batch.tokens[part],
                    positions=case.batch.positions[part],
                    span_starts=np.array([0, part.stop - part.start], np.int32),
                    page_table=case.batch.page_table[s : s + 1],
                    logits_rows=np.zeros(0, np.int64),
                )
                out = Case(case.shape, alone, case.q[part], case.kv).attend(cpu)
                assert torch.equal(out, together[part])


def _one_by_one(first: int, last: int) -> list[slice]:
    return [slice(t, t + 1) for t in range(first, last)]


def test_attention_of_large_scores_stays_finite(cpu: CpuKernels) -> None:
    case = make_case(AttentionShape(4, 2, 64), [(100, 30)])
    case.q.mul_(1000)
    torch.testing.assert_close(case.attend(cpu), case.attend(REF), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rotate_and_store(cpu: CpuKernels, normed: bool, rotary_dim: int) -> None:
    shape = AttentionShape(6, 2, 64)
    case = make_case(shape, MIXED)
    n = len(case.q)
    qkv = torch.randn(n, 10 * 64)
    angles = torch.randn(300, rotary_dim // 2)
    rotary = RotaryTable(angles.cos(), angles.sin())
    norms = HeadNorms(torch.randn(64), torch.randn(64), 1e-5) if normed else None
    results = []
    for kernels in (cpu, REF):
        kv = kernels.allocate_kv(shape, N_PAGES, 64)
        plan: Any = kernels.plan(case.batch)
        q = kernels.rotate_and_store(qkv, plan, shape, rotary, norms, kv)
        results.append((q, kv.keys, kv.values))
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 5, 200])
def test_pointwise(cpu: CpuKernels, rows: int) -> None:
    x, delta, weight = torch.randn(rows, 96), torch.randn(rows, 96), torch.randn(96)
    for change in (None, delta):
        a, b = x.clone(), x.clone()
        ours, wanted = cpu.rms_norm(a, weight, 1e-5, change), REF.rms_norm(b, weight, 1e-5, change)
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a, b)
    both = 20 * torch.randn(rows, 2 * 72)
    torch.testing.assert_close(
        cpu.activate(both, "silu"), REF.activate(both, "silu"), atol=1e-5, rtol=1e-5
    )


def test_nan_stays_visible(cpu: CpuKernels) -> None:
    x = torch.ones(3, 32)
    x[1, 7] = torch.nan
    normed = cpu.rms_norm(x, torch.ones(32), 1e-5, None)
    assert normed.isnan().any(dim=1).tolist() == [False, True, False]


def test_exp_over_its_whole_range() -> None:
    x = np.linspace(-87, 88, 20_001).astype(np.float32)
    ours = np.array([exp(v) for v in x], np.float64)
    wanted = np.exp(x.astype(np.float64))
    assert np.max(np.abs(ours / wanted - 1)) < 2.5e-7
    assert exp(np.float32(0)) == 1
    assert exp(np.float32(-1000)) < 1e-37


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_linear(bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(72, 96), torch.randn(rows, 96)
    offset = torch.randn(72) if bias else None
    wanted = torch.nn.functional.linear(x.double(), weight.double())
    rounded = torch.nn.functional.linear(x.double(), weight.half().double())
    if offset is not None:
        wanted, rounded = wanted + offset, rounded + offset
    whole = CpuKernels(weight_dtype="fp32").linear(weight, offset)(x)
    half = CpuKernels(weight_dtype="fp16").linear(weight, offset)(x)
    torch.testing.assert_close(whole.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(half.double(), rounded, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 32, 33])
@pytest.mark.parametrize("width", [7, 40, 520, 1024])
def test_float32_products_of_few_rows_shared_by_threads(rows: int, width: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(1030, width), torch.randn(rows, width)  # 1,030 rows are no whole fours
    wanted = torch.nn.functional.linear(x.double(), weight.double())
    for threads in (1, 2):
        linear = CpuKernels(weight_dtype="fp32", threads=threads).linear(weight)
        got = linear(x)
        torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-5)
        if 0 < rows < 33:  # few rows are computed each by itself
            assert torch.equal(linear(x[rows // 2 :][:1])[0], got[rows // 2])


@pytest.mark.parametrize("bad", [1e6, torch.inf, torch.nan])
def test_a_weight_that_fp16_cannot_hold_is_refused(bad: float) -> None:
    weight = torch.randn(32, 32)
    weight[3, 4] = bad
    with pytest.raises(UnsupportedModelError, match="fp16"):
        CpuKernels(weight_dtype="fp16").linear(weight)


def test_copy_pages(cpu: CpuKernels) -> None:
    pools = [torch.randn(8, 2, 16, 16) for _ in range(4)]
    layers = [KvPages(pools[0].clone(), pools[1].clone()), KvPages(pools[2].clone(), pools[3])]
    wanted = pools[2].clone()
    wanted[5], wanted[0] = wanted[1], wanted[5].clone()
    cpu.copy_pages(layers, [5, 1], [0, 5])
    assert torch.equal(layers[1].keys, wanted)
    assert torch.equal(layers[0].values[5], pools[1][1])


@pytest.mark.parametrize(("head_dim", "page_tokens"), [(64, 24), (40, 64), (64, 0)])
def test_pages_that_do_not_fill_vectors_are_refused(head_dim: int, page_tokens: int) -> None:
    with pytest.raises(UsageError, match="multiple of 16"):
        CpuKernels().allocate_kv(AttentionShape(2, 1, head_dim), 4, page_tokens)
