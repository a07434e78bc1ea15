"""Terms and fitted costs, against arithmetic by hand and published measurements."""

from __future__ import annotations

import pytest

from hullspeed.arch import catalogue
from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu, gpus
from hullspeed.hardware.detect import gpu_from_driver
from hullspeed.perf.activations import recurrent_bytes
from hullspeed.perf.fitted import (
    REGIMES,
    FittedCost,
    coefficients_of,
    engine_of,
    kinds_of,
    measured_gpus,
    regime_of,
    spread_of,
    training_groups,
)
from hullspeed.perf.gemm import overlapped, padded_rows, sustained_share, wave_factor
from hullspeed.perf.nearest import nearest_points, public_points
from hullspeed.perf.speculative import SpeculativeCost
from hullspeed.perf.terms import StepTerms, Terms
from hullspeed.perf.work import Shape
from hullspeed.units import GIB

from .conftest import dense_arch, hybrid_arch, moe_arch


def test_reading_and_multiplying_by_hand() -> None:
    arch = catalogue.load("Qwen/Qwen3-32B")
    terms = StepTerms(arch, find_gpu("H100-SXM"))
    body, rate = terms.work.body_params, 0.79 * 989.4e12  # sustained.toml
    decode = terms.of(1, 1000, (), 1e-9, 1.0)  # reading binds altogether
    assert decode.weights_s == pytest.approx(2 * (body + terms.work.head_params) / 3350e9)
    assert decode.multiply_s == pytest.approx(0, abs=1e-9)
    assert decode.kv_s == pytest.approx(262144 * 1001 / 3350e9)
    prompt = terms.of(0, 0, [Shape(4096, 0)], 1.0, 1e-9)
    assert prompt.multiply_s == pytest.approx(2 * 4096 * body / rate, rel=0.15)  # last waves
    assert prompt.multiply_s >= 2 * 4096 * body / rate
    assert prompt.attention_s == pytest.approx(arch.flops(4096, 0, 0) / 989.4e12
                                               - 2 * 4096 * body / 989.4e12)  # fmt: skip


def test_reading_and_multiplying_overlap_but_for_their_ends() -> None:
    read, multiply = overlapped(3.0, 4.0)
    assert 3.0 * read + 4.0 * multiply == pytest.approx(5.0)
    assert overlapped(7.0, 0.0) == (1.0, 0.0)
    assert overlapped(0.0, 0.0) == (1.0, 0.0)
    # Beside a published measurement: NVIDIA's median of 256 rows through 16-bit matrices of 16
    # million and more on H100 is 0.66 of the bandwidth that one row reaches 0.80 of.
    read_s, multiply_s = 1 / 0.80, 256 / 989.4e12 * 3350e9 / 0.79
    read, multiply = overlapped(read_s, multiply_s)
    assert read_s * read + multiply_s * multiply == pytest.approx(1 / 0.66, rel=0.15)


def test_products_sustain_a_share_of_their_peak() -> None:
    for gpu in gpus():
        for dtype in ("bf16", "fp8", "fp4", "int8"):
            if gpu.has(dtype):
                assert 0.25 < sustained_share(gpu.compute_capability, dtype) < 0.9, gpu.name
    assert sustained_share("9.0", "bf16") > sustained_share("9.0", "fp8")


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
    assert StepTerms(hybrid_arch(), gpu).of(1, 1, ()).layers > len(hybrid_arch().layers)
    assert StepTerms(dense_arch(), gpu).of(3, 30, ()).eager_layers == 0
    assert StepTerms(dense_arch(), gpu, eager=True).of(3, 30, ()).eager_layers == 4
    assert StepTerms(moe_arch(), gpu).of(1, 1, ()).moe_layers == 2
    two = StepTerms(dense_arch(), gpu, tp=2).of(3, 30, ())
    assert two.reduces == 8
    assert two.reduce_s > 0
    eight = StepTerms(dense_arch(), gpu, tp=8)
    assert (eight.of(3, 30, ()).reduces, eight.of(0, 0, [Shape(8192, 0)]).reduces) == (8, 16)


def test_eight_bit_kv_is_hardly_faster_to_read_on_hopper() -> None:
    arch = dense_arch()
    full = StepTerms(arch, find_gpu("H100-SXM")).of(8, 80_000, ()).kv_s
    half = StepTerms(arch, find_gpu("H100-SXM"), kv_dtype="fp8").of(8, 80_000, ()).kv_s
    assert 0.6 * full < half < 0.9 * full
    for gpu, engine in (("H100-SXM", "trtllm"), ("B200", "vllm")):
        whole = StepTerms(arch, find_gpu(gpu), engine=engine).of(8, 80_000, ()).kv_s
        less = StepTerms(arch, find_gpu(gpu), kv_dtype="fp8", engine=engine).of(8, 80_000, ()).kv_s
        assert less == pytest.approx(whole / 2)


def test_recurrent_state_is_read_and_written_and_windows_bound_kv() -> None:
    terms = StepTerms(hybrid_arch(), find_gpu("A40"))
    assert terms.of(2, 20, ()).state_s == pytest.approx(4 * terms.work.state_bytes / 696e9)
    far, near = terms.of(1, 100_000, ()).kv_s, terms.of(1, 200, ()).kv_s
    assert far == pytest.approx(terms.work.kv_bytes(100_001) / 696e9)
    assert near == pytest.approx(terms.work.kv_bytes(201) / 696e9)
    assert terms.of(0, 0, [Shape(64, 0)]).delta_s > 0


def test_chunk_kernels_of_a_published_layer() -> None:
    """A layer of Qwen3.5-27B over 8,192 tokens on H100: NVIDIA measured 392 microseconds with
    FlashInfer's kernels (vLLM) and 1,085 with Triton's (SGLang), beside 150 of convolution.
    """
    layers = catalogue.load("Qwen/Qwen3.6-27B").layers
    mixer = next(layer.mixer for layer in layers if layer.mixer.kind == "gated_delta_net")
    seconds = 8192 * recurrent_bytes(mixer) / 3350e9 * coefficients_of("vllm").terms["delta_s"]
    assert 540e-6 < seconds < 1240e-6


def test_experts_of_many_tokens_are_all_read() -> None:
    terms = StepTerms(moe_arch(), find_gpu("H100-SXM"))
    assert terms.of(64, 64, ()).weights_s > 1.5 * terms.of(1, 1, ()).weights_s


def test_experts_multiply_at_their_own_rate() -> None:
    """Of a layer of 256 experts of 512 on H100, 8,192 tokens take 1.1 to 1.5 ms in 16 bit
    (NVIDIA's measurements per operation): 0.48 ms of reading and 0.42 of multiplying at peak.
    """
    arch = catalogue.load("Qwen/Qwen3.6-35B-A3B")
    terms, gpu = StepTerms(arch, find_gpu("H100-SXM")), find_gpu("H100-SXM")
    work, weights = terms.work, coefficients_of("vllm").terms
    read = weights["weights_s"] * work.expert_bytes(8192) / gpu.bandwidth_bytes_per_s
    rate = gpu.flops_per_s["bf16"] * sustained_share("9.0", "bf16") * 0.6
    multiply = weights["multiply_s"] * work.expert_flops(8192) / rate
    assert 1.1e-3 < (read + multiply) / len(arch.layers) < 1.6e-3
    step = terms.of(0, 0, [Shape(8192, 0)])
    assert step.weights_s > work.expert_bytes(8192) / gpu.bandwidth_bytes_per_s
    assert step.multiply_s > work.expert_flops(8192) / rate


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
        plain, moe = spread_of(metric), spread_of(metric, kinds=("moe", "drafts"))
        assert moe.low <= plain.low < plain.high <= moe.high
    assert kinds_of(moe_arch(), drafts=True) == ("moe", "drafts")
    assert kinds_of(dense_arch()) == ()
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
    many = plain.of(100, 1000, ()).weights_s
    read = marlin.of(1, 10, (), 1e-9, 1.0).weights_s  # reading binds altogether
    assert plain.of(1, 10, (), 1e-9, 1.0).weights_s == pytest.approx(read, rel=0.1)
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


def test_sglang_runs_fewer_with_drafts() -> None:
    assert engine_of("sglang", find_gpu("H200"), drafts=True).max_running == 48
    plain = engine_of("vllm", find_gpu("H200"))
    assert engine_of("vllm", find_gpu("H200"), drafts=True) == plain


# sgl-project/sglang qwen3.8-27b-benchmarks (GB300, P50): the fit has seen these groups' rows only
# through coefficients that all models share.
@pytest.mark.parametrize(("concurrency", "measured_ms"), [(1, 10.3), (16, 12.5), (64, 18.4)])
def test_published_time_between_tokens_of_the_hybrid(concurrency: int, measured_ms: float) -> None:
    cost = FittedCost(catalogue.load("Qwen/Qwen3.8-27B"), find_gpu("GB300"), engine="sglang")
    step_s = cost.batch_seconds(concurrency, concurrency * 1536, ())
    # Measured between tokens, prompts of others included: the more, the more are in flight.
    assert step_s == pytest.approx(measured_ms / 1e3, rel=0.1 + concurrency / 640)


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
