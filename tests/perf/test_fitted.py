"""Terms and fitted costs, against arithmetic by hand and published measurements."""

from __future__ import annotations

import pytest

from hullspeed.arch import catalogue
from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.hardware.detect import gpu_from_driver
from hullspeed.perf.fitted import (
    REGIMES,
    FittedCost,
    coefficients_of,
    engine_of,
    measured_gpus,
    regime_of,
    spread_of,
    training_groups,
)
from hullspeed.perf.gemm import padded_rows, wave_factor
from hullspeed.perf.nearest import nearest_points, public_points
from hullspeed.perf.speculative import SpeculativeCost
from hullspeed.perf.terms import StepTerms, Terms
from hullspeed.perf.work import Shape
from hullspeed.units import GIB

from .conftest import dense_arch, hybrid_arch, moe_arch


def test_reading_and_multiplying_by_hand() -> None:
    arch = catalogue.load("Qwen/Qwen3-32B")
    terms = StepTerms(arch, find_gpu("H100-SXM"))
    decode = terms.of(1, 1000, ())
    body = terms.work.body_params
    assert decode.weights_s == pytest.approx(2 * (body + terms.work.head_params) / 3350e9)
    assert decode.multiply_s == 0
    assert decode.kv_s == pytest.approx(262144 * 1001 / 3350e9)
    prompt = terms.of(0, 0, [Shape(4096, 0)])
    assert prompt.multiply_s == pytest.approx(2 * 4096 * body / 989.4e12, rel=0.15)  # last waves
    assert prompt.multiply_s >= 2 * 4096 * body / 989.4e12
    assert prompt.attention_s == pytest.approx(arch.flops(4096, 0, 0) / 989.4e12
                                               - 2 * 4096 * body / 989.4e12)  # fmt: skip


def test_formats_without_hardware_for_them_read_less_and_multiply_in_16_bit() -> None:
    from dataclasses import replace

    arch = replace(catalogue.load("Qwen/Qwen3-32B"), quant="fp8_block")
    bytes_ = arch.param_count(extras=False)
    a100 = StepTerms(arch, find_gpu("A100-80GB-SXM"), weight_bytes=bytes_)
    h100 = StepTerms(arch, find_gpu("H100-SXM"), weight_bytes=bytes_)
    chunk = [Shape(4096, 0)]
    assert a100.of(0, 0, chunk).multiply_low_s == 0
    assert a100.of(0, 0, chunk).multiply_s > 0
    assert h100.of(0, 0, chunk).multiply_low_s > 0
    full = StepTerms(catalogue.load("Qwen/Qwen3-32B"), find_gpu("A100-80GB-SXM"))
    assert a100.of(1, 10, ()).weights_s < 0.6 * full.of(1, 10, ()).weights_s


def test_counts_of_a_step() -> None:
    gpu = find_gpu("H100-SXM")
    one = StepTerms(dense_arch(), gpu).of(3, 30, [Shape(10, 0), Shape(20, 5, sample=False)])
    assert (one.layers, one.steps, one.sequences, one.reduces) == (4, 1, 5, 0)
    assert one.eager_layers == 4
    assert StepTerms(dense_arch(), gpu).of(3, 30, ()).eager_layers == 0
    assert StepTerms(dense_arch(), gpu, eager=True).of(3, 30, ()).eager_layers == 4
    assert StepTerms(moe_arch(), gpu).of(1, 1, ()).moe_layers == 2
    two = StepTerms(dense_arch(), gpu, tp=2).of(3, 30, ())
    assert two.reduces == 8
    assert two.reduce_s > 0


def test_recurrent_state_is_read_and_written_and_windows_bound_kv() -> None:
    terms = StepTerms(hybrid_arch(), find_gpu("A40"))
    assert terms.of(2, 20, ()).state_s == pytest.approx(4 * terms.work.state_bytes / 696e9)
    far, near = terms.of(1, 100_000, ()).kv_s, terms.of(1, 200, ()).kv_s
    assert far == pytest.approx(terms.work.kv_bytes(100_001) / 696e9)
    assert near == pytest.approx(terms.work.kv_bytes(201) / 696e9)
    assert terms.of(0, 0, [Shape(64, 0)]).delta_s > 0


def test_experts_of_many_tokens_are_all_read() -> None:
    terms = StepTerms(moe_arch(), find_gpu("H100-SXM"))
    assert terms.of(64, 64, ()).weights_s > 1.5 * terms.of(1, 1, ()).weights_s


def test_rows_in_tiles_and_waves() -> None:
    assert [padded_rows(n) for n in (0, 1, 16, 17, 128, 129, 4096)] == [
        0, 16, 16, 32, 128, 192, 4096,
    ]  # fmt: skip
    factor = wave_factor(find_gpu("H100-SXM"), catalogue.load("Qwen/Qwen3-32B"), 1)
    assert factor(64) == 1
    assert 1 <= factor(8192) < 1.1
    assert factor(512) >= factor(8192)
    assert wave_factor(find_gpu("MI300X"), dense_arch(), 1)(4096) == 1


def test_batches_as_numbers_or_as_shapes() -> None:
    cost = FittedCost(dense_arch(), find_gpu("H100-SXM"))
    shapes = [Shape(1, 100), Shape(1, 300), Shape(50, 10)]
    assert cost.seconds(shapes) == pytest.approx(cost.batch_seconds(2, 400, [Shape(50, 10)]))
    assert cost.parts(shapes).total_s == pytest.approx(cost.seconds(shapes))


def test_an_unknown_engine_is_taken_as_vllm_and_a_gpu_without_speeds_is_refused() -> None:
    assert coefficients_of("other") == coefficients_of("vllm")
    assert coefficients_of("trtllm") != coefficients_of("vllm")
    with pytest.raises(UsageError, match="no speeds"):
        FittedCost(dense_arch(), gpu_from_driver("NVIDIA Nothing 1", 8 * GIB, "7.5"))


def test_coefficients_are_physical() -> None:
    terms = coefficients_of("vllm").terms
    assert set(terms) == set(Terms._fields)
    for name in ("weights_s", "multiply_s", "multiply_low_s", "attention_s", "kv_s"):
        assert 1 <= terms[name] < 4, name  # nothing is faster than its peak
    for name in ("layers", "steps", "sequences"):
        assert 0 < terms[name] < 5e-3


def test_intervals_widen_with_their_share() -> None:
    for metric in ("ttft", "tpot", "output"):
        narrow, wide = spread_of(metric), spread_of(metric, 90)
        assert wide.low <= narrow.low < 1 < narrow.high <= wide.high
        for regime in REGIMES:
            some, new = spread_of(metric, 80, regime), spread_of(metric, 80, regime, seen=False)
            assert new.low <= some.low < 1 < some.high <= new.high
    assert {"H100-SXM", "H200", "A100-80GB-SXM"} <= measured_gpus()
    assert len(training_groups()) > 50


def test_a_load_is_told_by_how_long_its_requests_wait() -> None:
    assert [regime_of(waited) for waited in (1.0, 3.0, 50.0)] == ["alone", "shared", "queued"]
    assert regime_of(3.0, in_process=True) == "process"
    queued, decode = spread_of("tpot", 80, "queued"), spread_of("tpot", 80, "alone")
    assert queued.high / queued.low > decode.high / decode.low


def test_a_host_takes_its_own_time_and_leaves_the_gpu_alone() -> None:
    plain = coefficients_of("vllm-0.7")
    named = coefficients_of("vllm-0.7", "accelmark NVIDIA H200")
    factor = named.terms["steps"] / plain.terms["steps"]
    assert factor != 1
    assert named.terms["sequences"] / plain.terms["sequences"] == pytest.approx(factor)
    assert named.terms["weights_s"] == plain.terms["weights_s"]
    assert coefficients_of("vllm", "nobody's") == coefficients_of("vllm")


def test_weights_that_are_unpacked_first_cost_their_unpacking() -> None:
    from dataclasses import replace

    a100 = find_gpu("A100-80GB-SXM")
    arch = catalogue.load("meta-llama/Llama-3.1-8B")
    tables = 4 * arch.vocab * arch.hidden
    stored = round(0.56 * StepTerms(arch, a100).work.body_params) + tables
    marlin, plain = (
        StepTerms(replace(arch, quant=quant), a100, weight_bytes=stored)
        for quant in ("gptq", "gptq-exllama")
    )
    one, many = plain.of(1, 10, ()).weights_s, plain.of(100, 1000, ()).weights_s
    assert one == pytest.approx(marlin.of(1, 10, ()).weights_s, rel=0.1)
    full = StepTerms(arch, a100).of(100, 1000, ())
    assert many > full.weights_s + full.multiply_s  # no better than 16 bit where many decode


def test_in_process_nothing_is_sent() -> None:
    served = engine_of("vllm", find_gpu("H200"))
    inside = engine_of("vllm", find_gpu("H200"), in_process=True)
    assert inside.request_s == 0 < served.request_s
    assert inside.first_token_s < served.first_token_s


def test_small_cards_have_smaller_steps() -> None:
    assert engine_of("vllm", find_gpu("A100-80GB-SXM")).step_tokens == 2048
    assert engine_of("vllm", find_gpu("H200")).step_tokens == 8192
    assert engine_of("sglang", find_gpu("H200")).policy == "prefill_first"


# sgl-project/sglang qwen3.8-27b-benchmarks (GB300, P50): the fit has seen these groups' rows only
# through coefficients that all models share.
@pytest.mark.parametrize(("concurrency", "measured_ms"), [(1, 10.3), (16, 12.5), (64, 18.4)])
def test_published_time_between_tokens_of_the_hybrid(concurrency: int, measured_ms: float) -> None:
    cost = FittedCost(catalogue.load("Qwen/Qwen3.8-27B"), find_gpu("GB300"), engine="sglang")
    step_s = cost.batch_seconds(concurrency, concurrency * 1536, ())
    assert step_s == pytest.approx(measured_ms / 1e3, rel=0.15)


def test_speculation_shares_a_step_between_tokens() -> None:
    plain = FittedCost(catalogue.load("Qwen/Qwen3.8-27B"), find_gpu("GB300"), engine="sglang")
    drafted = SpeculativeCost(plain, 3, 3.2)
    # 4.0 ms measured with drafts, 10.3 without (the same source).
    assert drafted.batch_seconds(1, 1536, ()) == pytest.approx(4.0e-3, rel=0.15)
    chunk = [Shape(512, 0)]
    assert drafted.batch_seconds(0, 0, chunk) == plain.batch_seconds(0, 0, chunk)
    assert plain.seconds(chunk) < drafted.seconds([*chunk, Shape(1, 100)])
    with pytest.raises(UsageError, match="between 1 and"):
        SpeculativeCost(plain, 3, 4.5)


def test_the_nearest_point_is_of_the_same_kind() -> None:
    (first, *_) = nearest_points(
        params=32_000_000_000, gpu="H100-SXM", tp=2, quant="none", engine="vllm", isl=1024,
        osl=512, concurrency=32,
    )  # fmt: skip
    assert (first.model, first.gpu, first.engine) == ("Qwen/Qwen3-32B", "H100-SXM", "vllm")
    assert all(point.source and point.ttft_s > 0 for point in public_points())
