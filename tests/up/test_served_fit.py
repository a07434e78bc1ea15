"""served_fit: costs that a synthetic server has are found again from what a client would see."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.hardware.ceilings import Ceilings, Curve, Overheads
from hullspeed.perf.step import StepCost
from hullspeed.perf.work import Shape
from hullspeed.runtime.ceilings import default_arch
from hullspeed.twin.closed_loop import TwinEngine, simulate
from hullspeed.twin.load import Load
from hullspeed.twin.outcome import percentile
from hullspeed.up.served_fit import Cached, Seen, fit

ARCH = default_arch()
LENGTHS = ((64, 32), (768, 16))  # prompt and output tokens
STREAMS = {1: 8, 6: 24, 24: 72}
COLD = (192, 640)
STEP_TOKENS = 256


def kernels() -> Ceilings:
    """Some machine, with kernels alone."""
    rates = Curve((1.0, 64.0), (8e10, 3e11))
    none = Overheads(
        step_s=1e-3, layer_s=5e-5, layer_token_s=5e-6, sequence_s=1e-4, request_s=9e-3,
        prompt_token_s=9e-6, stream_token_s=9e-4,
    )  # fmt: skip
    return Ceilings(
        fingerprint="test", source="calibrated", measured_at="2026-01-01T00:00:00Z", threads=2,
        dram_bytes_per_s=3e10, linear_flops_per_s={"native": rates},
        head_flops_per_s={"native": rates}, decode_bytes_per_s=Curve((1.0,), (2e10,)),
        chunk_flops_per_s=Curve((1.0,), (1e11,)), overheads=none, relative_error=0.2,
        shared_bytes_per_s=Curve((1.0,), (6e10,)),
    )  # fmt: skip


def box(slower: float = 1.0, **overheads: float) -> Ceilings:
    """The machine as it serves."""
    bare = kernels()
    over = msgspec.structs.replace(bare.overheads, sequence_s=0.0, **overheads)
    decode = Curve((1.0,), (slower,))
    return msgspec.structs.replace(bare, overheads=over, decode_factor=decode)


def play(ceilings: Ceilings, isl: int, osl: int, streams: int, cache: str) -> tuple[float, float]:
    over = ceilings.overheads
    engine = TwinEngine(
        vocab=ARCH.vocab, max_context_tokens=ARCH.max_context_tokens, n_pages=4096,
        request_s=over.request_seconds(isl), request_work_s=over.work_seconds(isl),
        stream_token_s=over.stream_token_s,
    )  # fmt: skip
    load = Load(
        isl_tokens=isl, osl_tokens=osl, requests=STREAMS.get(streams, 4 * streams),
        concurrency=streams, cache="cached" if cache == "cached" else "cold",
    )  # fmt: skip
    found = simulate(engine, StepCost(ARCH, ceilings, "native"), load)
    itl_s = percentile(found.itl_s, 0.5) if found.itl_s else 0.0
    return percentile(found.ttft_s, 0.5), itl_s


def seen_at(ceilings: Ceilings) -> Seen:
    return Seen(
        cached=tuple(
            Cached(n, requests, isl, osl, *play(ceilings, isl, osl, n, "cached"))
            for isl, osl in LENGTHS
            for n, requests in STREAMS.items()
        ),
        cold_ttft_s={isl: play(ceilings, isl, 2, 1, "cold")[0] for isl in COLD},
    )


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    step_s=st.floats(0.0, 3e-3),
    token_s=st.floats(0.0, 5e-4),
    request_s=st.floats(1e-3, 1e-2),
    prompt_token_s=st.floats(0.0, 5e-6),
    work_s=st.floats(0.0, 3e-3),
    work_token_s=st.floats(0.0, 3e-6),
)
def test_costs_are_found_again(
    step_s: float, token_s: float, request_s: float, prompt_token_s: float,
    work_s: float, work_token_s: float,
) -> None:  # fmt: skip
    truth = box(
        step_s=step_s, stream_token_s=token_s, request_s=request_s,
        prompt_token_s=prompt_token_s, request_work_s=min(work_s, request_s),
        work_token_s=min(work_token_s, prompt_token_s),
    )  # fmt: skip
    found = fit(seen_at(truth), kernels(), ARCH, "native", STEP_TOKENS)
    for isl, streams, cache in ((90, 1, "cached"), (700, 1, "cold"), (700, 16, "cold")):
        expected = play(truth, isl, 40, streams, cache)
        assert play(found, isl, 40, streams, cache) == pytest.approx(expected, rel=0.08)
    # Of prompts that come at once, one that misses a step comes with the next.
    for isl in (90, 400):
        first_s, between_s = play(truth, isl, 40, 16, "cached")
        found_first_s, found_between_s = play(found, isl, 40, 16, "cached")
        assert found_between_s == pytest.approx(between_s, rel=0.08)
        assert found_first_s == pytest.approx(first_s, abs=between_s)


@pytest.mark.parametrize(("work_s", "work_token_s"), [(8e-4, 3e-6), (2e-3, 0.0), (0.0, 2e-6)])
def test_what_long_prompts_keep_a_core_for_is_found_again(
    work_s: float, work_token_s: float
) -> None:
    truth = box(
        step_s=5e-4, stream_token_s=2e-4, request_s=4e-3, prompt_token_s=1e-6,
        request_work_s=work_s, work_token_s=work_token_s,
    )  # fmt: skip
    found = fit(seen_at(truth), kernels(), ARCH, "native", STEP_TOKENS)
    for isl in (128, 512, 900):
        expected_s = truth.overheads.work_seconds(isl)
        assert found.overheads.work_seconds(isl) == pytest.approx(expected_s, abs=3e-4)


def test_an_api_process_with_a_core_of_its_own_keeps_none_from_steps() -> None:
    over = {"step_s": 5e-4, "stream_token_s": 0.0, "request_s": 4e-3, "prompt_token_s": 0.0}
    truth = box(**over, request_work_s=2e-3)
    seen = seen_at(truth)
    shared = fit(seen, kernels(), ARCH, "native", STEP_TOKENS)
    apart = fit(seen, kernels(), ARCH, "native", STEP_TOKENS, own_core=True)
    assert shared.overheads.request_work_s == pytest.approx(2e-3, abs=3e-4)
    # The same wait without steps that are held up means more work.
    assert apart.overheads.request_work_s >= shared.overheads.request_work_s


def test_steps_faster_than_their_kernels_scale_the_kernels() -> None:
    truth = box(slower=0.8, step_s=0.0, stream_token_s=0.0)
    found = fit(seen_at(truth), kernels(), ARCH, "native", STEP_TOKENS)
    assert found.overheads.step_s == found.overheads.stream_token_s == 0.0
    for n in (1, 4, 32):
        shapes = [Shape(1, 80)] * n
        expected = StepCost(ARCH, truth, "native").seconds(shapes)
        assert StepCost(ARCH, found, "native").seconds(shapes) == pytest.approx(expected, rel=0.08)


def test_cold_prompts_that_come_later_are_met_half_way_and_said() -> None:
    seen = seen_at(box())
    exact = fit(seen, kernels(), ARCH, "native", STEP_TOKENS)
    late = {isl: 1.3 * ttft_s for isl, ttft_s in seen.cold_ttft_s.items()}
    slow = fit(seen._replace(cold_ttft_s=late), kernels(), ARCH, "native", STEP_TOKENS)
    chunk = [Shape(256, 512)]
    before_s = StepCost(ARCH, exact, "native").seconds(chunk)
    after_s = StepCost(ARCH, slow, "native").seconds(chunk)
    assert after_s / before_s == pytest.approx(1.3**0.5, rel=0.02)
    assert exact.relative_error == pytest.approx(0.1)
    assert slow.relative_error == pytest.approx(0.3, rel=0.1)
    assert "192 and 640 tokens came +30% off" in slow.notes[-1]
    assert exact.served
    assert slow.served
