"""The numbers of three public texts about serving 27B models, each with what is right about it."""

from __future__ import annotations

import pytest

from hullspeed.arch import catalogue
from hullspeed.arch.quant import weight_bytes
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.perf.roofline import Roofline
from hullspeed.perf.steady import prefill_seconds
from hullspeed.plan.plan import make_plan
from hullspeed.units import GIB, KIB

from .conftest import MakeCase

FP8 = "Qwen/Qwen3.6-27B-FP8"


def test_54_and_27_gb_are_parameters_times_bytes_and_the_checkpoints_are_larger() -> None:
    """27 x 10^9 x 2 = 54 GB and x 1 = 27 GB. The model has 27.78 x 10^9 parameters (26.90 in the
    text decoder), and its FP8 checkpoint keeps embedding, head, gates and vision in 16 bit.
    """
    assert 27e9 * 2 == 54e9
    bf16, fp8 = (catalogue.load(name) for name in ("Qwen/Qwen3.6-27B", FP8))
    assert bf16.param_count() == 27_781_427_952
    assert weight_bytes(bf16) == 55_562_855_904
    assert (
        weight_bytes(bf16, extras=False) == 2 * 26_895_998_464
    )  # 53.8 GB: "54 GB" is the text part
    # The published size of 30,866,866,928 bytes counts the files' headers of 203,664 bytes.
    assert weight_bytes(fp8) == 30_866_866_928 - 203_664
    assert weight_bytes(fp8) > 1.1 * 27e9


def test_14_85_gb_is_below_any_real_4_bit_checkpoint() -> None:
    """0.55 bytes for every parameter: real 4-bit checkpoints keep 2.5 GB each of embedding and
    head, and often attention, in 16 or 8 bit.
    """
    seed_bytes = 27e9 * 0.55
    assert seed_bytes == pytest.approx(14.85e9)
    assert weight_bytes(catalogue.load("nvidia/Qwen3.6-27B-NVFP4")) > 1.2 * seed_bytes


def test_256_and_128_kib_a_token_are_the_shape_of_qwen3_32b() -> None:
    """2 x 64 layers x 8 heads x 128 x 2 bytes: no 27B has this shape, Qwen3-32B does."""
    dense = catalogue.load("Qwen/Qwen3-32B")
    assert dense.kv_bytes_per_token("bf16") == 256 * KIB
    assert dense.kv_bytes_per_token("fp8") == 128 * KIB


def test_64_kib_a_token_is_the_hybrids_sixteen_attention_layers(make_case: MakeCase) -> None:
    plan = make_plan(make_case("Qwen/Qwen3.6-27B", "h100-sxm", context=32768, concurrency=1))
    assert plan.kv_bytes_per_token == 64 * KIB
    assert "16 layers x 2 (K, V) x 4 KV heads x 256 x 2 B" in plan.kv_formula
    assert plan.state_bytes_per_sequence == 153_944_064
    assert "48 heads x 128 x 128 in fp32" in plan.state_formula


def test_381_700_tokens_in_23_3_gib_and_eleven_sessions(make_case: MakeCase) -> None:
    """23.3 GiB / 64 KiB is 381,747 tokens, and / 32,768 eleven sessions. vLLM cuts the pool in
    blocks of 784 tokens x 4 groups, 49 MiB each: 486 of them. One session holds 42 blocks of KV and
    2 of state in each of three groups: ten by the log's own figure, fewer when prefix caching keeps
    checkpoints of their state. (From 0.29 on Hopper blocks are multiples of 64: 832 tokens.)
    """
    pool = round(23.3 * GIB)
    assert pool // (64 * KIB) == pytest.approx(381_700, abs=50)
    case = make_case(
        "Qwen/Qwen3.8-27B", "h100-sxm", context=32768, isl=32000, osl=768, concurrency=8,
        kv_cache_bytes=pool, version="0.27.1", prefix_caching=True,
    )  # fmt: skip
    plan = make_plan(case)
    assert plan.capacity.blocks == 486
    row = next(r for r in plan.capacity.by_context if r.context_tokens == 32768)
    assert int(row.divided) == 11
    assert row.engine == pytest.approx(486 / 48)
    assert 7 <= row.served <= 9  # "overstates how many conversations fit by a fifth"
    off = make_plan(case.with_settings(prefix_caching=False))
    row = next(r for r in off.capacity.by_context if r.context_tokens == 32768)
    assert row.served == 10


def test_an_a40_holds_the_fp8_model_at_32k(make_case: MakeCase) -> None:
    """48 GB on the box is 44.34 GiB to a process; weights leave about 11 GiB."""
    plan = make_plan(make_case(FP8, "a40", context=32768, isl=28500, osl=512, concurrency=2))
    assert plan.ok
    assert 9 * GIB < plan.capacity.pool_bytes < 13 * GIB
    assert plan.capacity.served >= 3


def test_an_a40_holds_one_sequence_at_128k_so_memory_did_not_force_the_move(
    make_case: MakeCase,
) -> None:
    """The text moved to an A100 for 128k. One sequence fits the A40 even with 16-bit KV, four fit
    with FP8 KV and text only; what the A100 brings is speed and concurrency.
    """
    one = make_plan(make_case(FP8, "a40", context=131072, isl=130000, concurrency=1))
    assert one.ok
    assert one.capacity.longest_served == 1
    two = make_plan(make_case(FP8, "a40", context=131072, isl=130000, concurrency=2))
    assert two.verdict == "too many requests"
    lean = make_case(
        FP8, "a40", context=131072, isl=130000, concurrency=1, kv_dtype="fp8",
        language_model_only=True,
    )  # fmt: skip
    assert make_plan(lean).capacity.longest_served >= 2
    a100 = make_plan(make_case(FP8, "a100-80gb-sxm", context=131072, isl=130000, concurrency=1))
    assert a100.capacity.longest_served >= 3
    assert a100.speed is not None
    assert one.speed is not None
    assert a100.speed.ttft_s.value < 0.6 * one.speed.ttft_s.value


@pytest.mark.parametrize("gpu", ["A40", "A100-80GB-SXM"])
def test_28500_tokens_cold_and_cached(gpu: str) -> None:
    """12.1 s cold and 0.43 s with the prefix cached, on one of the two cards. The cache gives whole
    blocks of 784 tokens, so 36 of them; the rest, 276 tokens, is computed over the whole past.
    """
    arch = catalogue.load(FP8)
    cost = Roofline(arch, find_gpu(gpu), weight_bytes=weight_bytes(arch, extras=False))
    cold = prefill_seconds(cost, 28_500, 0, 2048)
    warm = prefill_seconds(cost, 28_500, 36 * 784, 2048)
    low, high = cost.itl_interval.low, max(cost.itl_interval.high, 2.0)
    assert cold * low <= 12.1 <= cold * high
    assert 0.05 < warm < 0.43
    assert cold / warm > 15
