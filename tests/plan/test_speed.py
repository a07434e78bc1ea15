"""Speeds on this machine: intervals say what the ceilings were measured on."""

from __future__ import annotations

import msgspec
import pytest

from hullspeed.arch import catalogue
from hullspeed.hardware.ceilings import Ceilings, Curve, Overheads
from hullspeed.plan.model import PlannedModel
from hullspeed.plan.speed import Predictor
from hullspeed.plan.workload import Workload

WORKLOAD = Workload(context_tokens=1000, isl=400, osl=40)


@pytest.fixture(scope="module")
def calibrated() -> Ceilings:
    """A processor that reads weights once for up to 64 rows, 100 GFLOP/s at most."""
    reading = Curve((1.0, 64.0, 512.0), (1.5e9, 96e9, 100e9))
    return Ceilings(
        fingerprint="test",
        source="calibrated",
        measured_at="now",
        threads=2,
        dram_bytes_per_s=20e9,
        linear_flops_per_s={"fp16": reading},
        head_flops_per_s={"fp16": reading},
        decode_bytes_per_s=Curve((1.0,), (10e9,)),
        chunk_flops_per_s=Curve((1.0,), (50e9,)),
        overheads=Overheads(
            step_s=1e-3,
            layer_s=5e-5,
            layer_token_s=1e-6,
            sequence_s=1e-4,
            request_s=3e-3,
            prompt_token_s=1e-6,
            stream_token_s=1e-4,
        ),
        relative_error=0.2,
        hidden=576,
    )


@pytest.fixture(scope="module")
def smollm() -> PlannedModel:
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    return PlannedModel.of(name, catalogue.load(name), "catalogue").embedded("fp16")


def test_the_interval_is_that_of_the_measurement(
    calibrated: Ceilings, smollm: PlannedModel
) -> None:
    speed = Predictor.on_machine(smollm, calibrated, "fp16", None).speed(WORKLOAD, 1)
    itl = speed.itl_s
    assert itl.low == pytest.approx(itl.value / 1.2)
    assert itl.high == pytest.approx(itl.value * 1.2)
    assert "this machine" in speed.source


def test_other_shapes_and_noise_are_said(calibrated: Ceilings, smollm: PlannedModel) -> None:
    odd = msgspec.structs.replace(calibrated, hidden=4096, quiet=False)
    speed = Predictor.on_machine(smollm, odd, "fp16", None).speed(WORKLOAD, 1)
    assert speed.itl_s.high == pytest.approx(speed.itl_s.value * 1.5)
    assert "width 4,096" in speed.source
    assert "disturbed" in speed.source


def test_a_cached_prefix_is_told_apart(calibrated: Ceilings, smollm: PlannedModel) -> None:
    shared = msgspec.structs.replace(WORKLOAD, shared_prefix=320)
    predictor = Predictor.on_machine(smollm, calibrated, "fp16", None)
    speed = predictor.speed(shared, 4)
    assert speed.ttft_cached_s is not None
    assert speed.ttft_cached_s.value < 0.5 * speed.ttft_s.value
    # What most requests see is with the prefix cached: the slowest of them and ITL too.
    plain = predictor.speed(WORKLOAD, 4)
    assert plain.ttft_cached_s is None
    assert speed.ttft_p99_s is not None
    assert plain.ttft_p99_s is not None
    assert speed.ttft_p99_s.value < plain.ttft_p99_s.value
    assert speed.itl_s.value < plain.itl_s.value


def test_the_bound_names_the_largest_part(calibrated: Ceilings, smollm: PlannedModel) -> None:
    slow_kv = msgspec.structs.replace(
        calibrated,
        decode_bytes_per_s=msgspec.structs.replace(calibrated.decode_bytes_per_s, values=(1e6,)),
    )
    speed = Predictor.on_machine(smollm, slow_kv, "fp16", None).speed(WORKLOAD, 4)
    assert speed.bound.startswith("reading the KV cache")


def test_requests_in_flight_for_a_rate(calibrated: Ceilings, smollm: PlannedModel) -> None:
    predictor = Predictor.on_machine(smollm, calibrated, "fp16", None)
    alone = predictor.speed(WORKLOAD, 1).requests_per_s
    assert predictor.concurrency_for(WORKLOAD, alone * 0.99, 64) == 1
    some = predictor.concurrency_for(WORKLOAD, alone * 1.2, 64)
    assert some is not None
    assert some > 1
    assert predictor.speed(WORKLOAD, some).requests_per_s >= alone * 1.2
    assert predictor.speed(WORKLOAD, some - 1).requests_per_s < alone * 1.2
    assert predictor.concurrency_for(WORKLOAD, alone * 1e6, 64) is None
