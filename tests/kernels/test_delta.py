"""The gated delta rule on the CPU against plain torch and against transformers' own functions."""

from __future__ import annotations

import random

import pytest
import torch

from hullspeed.errors import UsageError
from hullspeed.kernels.base import DeltaGates, DeltaShape, StateSlots
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.cpu.backend import CpuKernels
from hullspeed.kernels.ref import RefKernels

REF = RefKernels()
N_SLOTS = 12
SHAPES = [
    DeltaShape(2, 4, 16, 32, 4),
    DeltaShape(1, 1, 128, 128, 4),
    DeltaShape(2, 6, 24, 16, 3),
    DeltaShape(2, 2, 40, 176, 2),  # wide, narrow and single strips
]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 thread", "2 threads"])
def cpu(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(weight_dtype="fp32", threads=request.param)


def batch_of(spans: list[tuple[int, int, int, int]]) -> Batch:
    """Spans of (start, tokens, slot to read, slot to write)."""
    return Batch.of(
        [SpanInput([0] * n, start, [0], True, read, write) for start, n, read, write in spans]
    )


MIXED = [(0, 1, -1, 0), (0, 5, -1, 1), (9, 1, 2, 2), (9, 1, 3, 4), (7, 70, 5, 6), (3, 2, 7, 7)]


def random_states(shape: DeltaShape) -> StateSlots:
    states = REF.allocate_states(shape, N_SLOTS)
    states.recurrent.normal_(0, 0.3)
    states.inputs.normal_()
    return states


def copy_of(states: StateSlots) -> StateSlots:
    return StateSlots(states.recurrent.clone(), states.inputs.clone())


def inputs_of(shape: DeltaShape, n: int) -> tuple[torch.Tensor, torch.Tensor, DeltaGates]:
    gates = DeltaGates(torch.rand(shape.v_heads), torch.randn(shape.v_heads))
    return torch.randn(n, shape.channels), torch.randn(n, 2 * shape.v_heads), gates


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scan_of_a_mixed_batch(cpu: CpuKernels, shape: DeltaShape) -> None:
    torch.manual_seed(0)
    batch = batch_of(MIXED)
    qkv, ba, gates = inputs_of(shape, len(batch.tokens))
    states = random_states(shape)
    results = []
    for kernels in (cpu, REF):
        own = copy_of(states)
        out = kernels.delta_scan(qkv.clone(), ba, kernels.plan(batch), shape, gates, own)  # type: ignore[arg-type]
        results.append((out, own.recurrent))
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=1e-5)
    untouched = [i for i in range(N_SLOTS) if i not in {span[3] for span in MIXED}]
    assert torch.equal(results[0][1][untouched], states.recurrent[untouched])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution_of_a_mixed_batch(cpu: CpuKernels, shape: DeltaShape) -> None:
    torch.manual_seed(0)
    batch = batch_of(MIXED)
    x = torch.randn(len(batch.tokens), shape.channels + 48)  # wider: z follows
    weight = torch.randn(shape.taps, shape.channels)
    states = random_states(shape)
    results = []
    for kernels in (cpu, REF):
        own = copy_of(states)
        out = kernels.convolve(x, kernels.plan(batch), weight, own)  # type: ignore[arg-type]
        results.append((out, own.inputs))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_state_depends_neither_on_the_chunk_nor_on_the_batch(
    cpu: CpuKernels, shape: DeltaShape
) -> None:
    """Bit for bit: what a checkpoint holds is what any other way of computing it would hold."""
    torch.manual_seed(1)
    n = 40
    qkv, ba, gates = inputs_of(shape, n)
    whole = REF.allocate_states(shape, N_SLOTS)
    plan = cpu.plan(batch_of([(0, n, -1, 0)]))
    out = cpu.delta_scan(qkv.clone(), ba, plan, shape, gates, whole)
    rng = random.Random(0)
    states = REF.allocate_states(shape, N_SLOTS)
    done, slot, parts = 0, -1, []
    while done < n:
        length = min(rng.choice([1, 1, 2, 7, 13]), n - done)
        target = (slot + 1) % 5
        # A neighbour in the same step; rows of it come first.
        batch = batch_of([(0, 3, -1, 9), (done, length, slot, target)])
        rows = slice(done, done + length)
        both = torch.cat([torch.randn(3, shape.channels), qkv[rows]])
        gating = torch.cat([torch.randn(3, 2 * shape.v_heads), ba[rows]])
        parts.append(cpu.delta_scan(both, gating, cpu.plan(batch), shape, gates, states)[3:])
        done, slot = done + length, target
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(states.recurrent[slot], whole.recurrent[0])


def test_scan_equals_transformers(cpu: CpuKernels) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    torch.manual_seed(2)
    shape, n = DeltaShape(2, 4, 32, 64, 4), 150
    qkv, ba, gates = inputs_of(shape, n)
    states = cpu.allocate_states(shape, 2)
    out = cpu.delta_scan(qkv.clone(), ba, cpu.plan(batch_of([(0, n, -1, 1)])), shape, gates, states)
    q, k, v = torch.split(qkv, [64, 64, 256], dim=1)
    b, a = ba.chunk(2, dim=1)
    decay = -gates.rate * torch.nn.functional.softplus(a + gates.bias)
    wanted, state = torch_chunk_gated_delta_rule(
        q.view(1, n, 2, 32),
        k.view(1, n, 2, 32),
        v.view(1, n, 4, 64),
        g=decay[None],
        beta=b.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, wanted.reshape(n, -1), atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(states.recurrent[1], state[0], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 5, 50])
def test_gates(cpu: CpuKernels, rows: int) -> None:
    torch.manual_seed(3)
    x, gate, weight = torch.randn(rows, 96), 5 * torch.randn(rows, 200), torch.randn(32)
    for offset in (0, 104):
        ours = cpu.sigmoid_mul(x.clone(), gate, offset)
        torch.testing.assert_close(ours, REF.sigmoid_mul(x.clone(), gate, offset))
        ours = cpu.gated_norm(x.clone(), gate, offset, weight, 1e-6)
        wanted = REF.gated_norm(x.clone(), gate, offset, weight, 1e-6)
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
    for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
        ours = cpu.activate(gate, activation, 4.0)
        wanted = REF.activate(gate, activation, 4.0)
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
    gate[0, 7] = torch.nan
    assert cpu.activate(gate, "clamped_swiglu", 4.0)[0, 7].isnan()


def test_experts_equal_a_loop_over_tokens(cpu: CpuKernels) -> None:
    torch.manual_seed(4)
    x = torch.randn(30, 48)
    first, second = torch.randn(6, 64, 48), torch.randn(6, 48, 32)
    experts = cpu.experts([cpu.linear(w) for w in first], [cpu.linear(w) for w in second], "silu")
    shares, chosen = torch.randn(30, 6).softmax(-1).topk(2)
    got = experts(x, chosen, shares)
    for t in range(30):
        wanted = torch.zeros(48)
        for expert, share in zip(chosen[t].tolist(), shares[t], strict=True):
            inner = REF.activate((first[expert] @ x[t])[None], "silu")[0]
            wanted += share * (second[expert] @ inner)
        torch.testing.assert_close(got[t], wanted, atol=1e-3, rtol=1e-4)
    assert experts(x[:0], chosen[:0], shares[:0]).shape == (0, 48)


def test_attention_sinks(cpu: CpuKernels) -> None:
    from hullspeed.kernels.base import AttentionShape

    torch.manual_seed(5)
    shape = AttentionShape(6, 2, 32, window_tokens=20)
    batch = batch_of([(0, 30, -1, 0), (50, 1, -1, 0)])
    kv = REF.allocate_kv(shape, 1, 64)
    kv.keys.normal_()
    kv.values.normal_()
    q, sinks = torch.randn(31, 6, 32), 3 * torch.randn(6)
    ours = cpu.attend(q, cpu.plan(batch), shape, kv, sinks)
    wanted = REF.attend(q, REF.plan(batch), shape, kv, sinks)
    torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(ours, cpu.attend(q, cpu.plan(batch), shape, kv))


def test_value_heads_that_do_not_fill_vectors_are_refused(cpu: CpuKernels) -> None:
    with pytest.raises(UsageError, match="multiple of 16"):
        cpu.allocate_states(DeltaShape(1, 1, 16, 24, 4), 3)


def test_copied_states(cpu: CpuKernels) -> None:
    layers = [random_states(SHAPES[0]), random_states(SHAPES[0])]
    wanted = [layer.recurrent[3].clone() for layer in layers]
    inputs = layers[1].inputs[3].clone()
    cpu.copy_states(layers, [3, 5], [5, 7])
    for layer, state in zip(layers, wanted, strict=True):
        assert torch.equal(layer.recurrent[5], state)
        assert torch.equal(layer.recurrent[7], state)
    assert torch.equal(layers[1].inputs[7], inputs)
