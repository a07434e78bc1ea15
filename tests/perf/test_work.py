"""FLOPs and bytes of a step, against the architecture's own sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hullspeed.arch.model import ModelArch
from hullspeed.arch.tensors import Role
from hullspeed.perf.work import Shape, Work

from .conftest import dense_arch, hybrid_arch, moe_arch

ARCHS: dict[str, Callable[[], ModelArch]] = {
    "dense": dense_arch,
    "moe": moe_arch,
    "hybrid": hybrid_arch,
}


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize(("n", "context"), [(1, 0), (1, 500), (64, 0), (64, 1000), (300, 200)])
def test_flops_agree_with_the_architecture(name: str, n: int, context: int) -> None:
    arch = ARCHS[name]()
    work = Work(arch)
    head = 2 * arch.vocab * arch.hidden
    mine = work.body_flops(n) + work.attention_flops(Shape(n, context)) + head
    assert mine == pytest.approx(arch.flops(n, context, n_logits=1))


@pytest.mark.parametrize("name", ARCHS)
def test_parameters_agree_with_the_tensors(name: str) -> None:
    arch = ARCHS[name]()
    multiplied = sum(
        t.elements for t in arch.tensors() if t.role in (Role.LINEAR, Role.GATE, Role.EXPERT)
    )
    assert Work(arch).body_params == multiplied


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("context", [0, 1, 255, 256, 257, 4000])
def test_kv_bytes_agree_with_the_architecture(name: str, context: int) -> None:
    arch = ARCHS[name]()
    assert Work(arch).kv_bytes(context) == arch.kv_bytes(context, "bf16")


def test_a_step_reads_each_dense_weight_once() -> None:
    work = Work(dense_arch())
    assert work.body_bytes(1) == work.body_bytes(512) == 2 * work.body_params


def test_a_step_reads_the_experts_that_are_chosen() -> None:
    work = Work(moe_arch())
    one, many = work.body_bytes(1), work.body_bytes(10_000)
    assert many == pytest.approx(2 * work.body_params)
    # 4 of 32 experts for one token; router and attention always.
    arch = moe_arch()
    experts = sum(t.elements for t in arch.tensors() if t.role is Role.EXPERT)
    assert one == pytest.approx(2 * (work.body_params - experts * 28 / 32))
    assert one < work.body_bytes(4) < many


def test_stored_bytes_set_the_bytes_of_a_parameter() -> None:
    arch = dense_arch(tied=False)
    tables = 2 * arch.vocab * arch.hidden
    work = Work(arch, weight_bytes=2 * tables + Work(arch).body_params)
    assert work.bytes_per_param == pytest.approx(1.0)


def test_a_model_whose_tables_are_quantized_too_is_not_negative() -> None:
    arch = dense_arch()
    params = arch.param_count()
    assert 0 < Work(arch, weight_bytes=params // 2).bytes_per_param < 1
