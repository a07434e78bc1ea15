"""The roofline, against arithmetic by hand and published measurements."""

from __future__ import annotations

import pytest

from hullspeed.arch import catalogue
from hullspeed.arch.quant import weight_bytes
from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.hardware.detect import gpu_from_driver
from hullspeed.perf.roofline import Roofline
from hullspeed.perf.steady import prefill_seconds, steady_state
from hullspeed.perf.terms import compute_dtype
from hullspeed.perf.work import Shape
from hullspeed.units import GIB

from .conftest import dense_arch, hybrid_arch


def roofline(model: str, gpu: str, tp: int = 1) -> Roofline:
    arch = catalogue.load(model)
    return Roofline(arch, find_gpu(gpu), weight_bytes=weight_bytes(arch, extras=False), tp=tp)


def test_decode_reads_weights_at_the_assumed_share_of_bandwidth() -> None:
    model = roofline("Qwen/Qwen3-32B", "H100-SXM")
    parts = model.parts([Shape(1, 1000)])
    embedding = 151936 * 5120 * 2
    read = weight_bytes(catalogue.load("Qwen/Qwen3-32B")) - embedding
    assert parts.linear_s == pytest.approx(read / (3350e9 * 0.75), rel=0.01)
    assert parts.kv_s == pytest.approx(262144 * 1001 / (3350e9 * 0.6), rel=0.001)


def test_prefill_multiplies_at_the_assumed_share_of_peak() -> None:
    model = roofline("Qwen/Qwen3-32B", "H100-SXM")
    parts = model.parts([Shape(4096, 0)])
    body = 2 * 4096 * model.work.body_params
    assert parts.linear_s == pytest.approx(body / (989.4e12 * 0.6), rel=0.01)
    assert parts.kv_s == 0


def test_recurrent_state_is_read_and_written() -> None:
    model = Roofline(hybrid_arch(), find_gpu("A40"))
    one, two = (model.parts([Shape(1, 10)] * n).state_s for n in (1, 2))
    assert one > 0
    assert two == pytest.approx(2 * one)
    assert one == pytest.approx(2 * model.work.state_bytes / (696e9 * 0.6))


def test_two_gpus_halve_the_work_and_pay_for_talking() -> None:
    one, two = roofline("Qwen/Qwen3-32B", "H100-SXM"), roofline("Qwen/Qwen3-32B", "H100-SXM", 2)
    shapes = [Shape(1, 1000)] * 8
    assert two.parts(shapes).linear_s == pytest.approx(one.parts(shapes).linear_s / 2)
    assert one.parts(shapes).reduce_s == 0
    assert two.parts(shapes).reduce_s > 0
    slow = roofline("Qwen/Qwen3-32B", "A40", 2)
    assert slow.parts([Shape(2048, 0)]).reduce_s > 10 * two.parts([Shape(2048, 0)]).reduce_s / 4


@pytest.mark.parametrize(
    ("quant", "gpu", "dtype"),
    [
        ("fp8_block", "H100-SXM", "fp8"),
        ("fp8_block", "A40", "bf16"),
        ("nvfp4", "B200", "fp4"),
        ("nvfp4", "H100-SXM", "bf16"),
        ("awq", "H100-SXM", "bf16"),
        ("none", "B200", "bf16"),
    ],
)
def test_what_the_hardware_cannot_multiply_is_expanded(quant: str, gpu: str, dtype: str) -> None:
    assert compute_dtype(quant, find_gpu(gpu)) == dtype


def test_a_gpu_without_known_speeds_is_refused() -> None:
    with pytest.raises(UsageError, match="no speeds"):
        Roofline(dense_arch(), gpu_from_driver("NVIDIA Nothing 1", 8 * GIB, "7.5"))


# Published measurements of single requests and of decode, not used to choose any constant:
# sgl-project/sglang qwen3.8-27b-benchmarks (GB300, no MTP, P50) and a field report of a 28.5k-token
# cold prefill of the FP8 model on an A40 or an A100 80GB.
@pytest.mark.parametrize(("concurrency", "measured_ms"), [(1, 10.3), (16, 12.5), (64, 18.4)])
def test_published_time_between_tokens_of_the_hybrid(concurrency: int, measured_ms: float) -> None:
    model = roofline("Qwen/Qwen3.8-27B", "GB300")
    steady = steady_state(model, isl=1024, osl=1024, concurrency=concurrency, step_tokens=8192)
    low, high = model.itl_interval
    assert low * steady.itl_s <= measured_ms / 1e3 <= high * steady.itl_s
    assert steady.itl_s == pytest.approx(measured_ms / 1e3, rel=0.15)


def test_the_cold_prefill_of_28500_tokens_lies_between_the_two_cards() -> None:
    """12.1 s, on an A40 or an A100: the report does not say which."""
    a40, a100 = (
        prefill_seconds(roofline("Qwen/Qwen3.6-27B-FP8", gpu), 28_500, 0, 2048)
        for gpu in ("A40", "A100-80GB-SXM")
    )
    assert a100 < 12.1 < a40
    assert a40 == pytest.approx(12.1, rel=0.6)
    assert a100 == pytest.approx(12.1, rel=0.4)
