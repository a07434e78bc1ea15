"""served_costs: costs that a synthetic server has are found again from what a client would see."""

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
from hullspeed.up.served_costs import Seen, fit

ARCH = default_arch()
SHORT, LONG, OSL, COLD = 64, 1024, 16, 512
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
        isl_tokens=isl, osl_tokens=osl, requests=24 if streams == 1 else max(64, 3 * streams),
        concurrency=streams, cache="cached" if cache == "cached" else "cold",
    )  # fmt: skip
    found = simulate(engine, StepCost(ARCH, ceilings, "native"), load)
    itl_s = percentile(found.itl_s, 0.5) if found.itl_s else 0.0
    return percentile(found.ttft_s, 0.5), itl_s


def seen_at(ceilings: Ceilings) -> Seen:
    short = {n: play(ceilings, SHORT, OSL, n, "cached") for n in (1, 8, 32)}
    return Seen(
        SHORT, OSL,
        itl_s={n: itl for n, (_, itl) in short.items()},
        ttft_s={SHORT: short[1][0], LONG: play(ceilings, LONG, 2, 1, "cached")[0]},
        wave_ttft_s={n: short[n][0] for n in (8, 32)},
        cold_tokens=COLD, cold_ttft_s=play(ceilings, COLD, 2, 1, "cold")[0],
    )  # fmt: skip


@settings(max_examples=5, deadline=None)
@given(
    step_s=st.floats(0.0, 3e-3),
    token_s=st.floats(0.0, 5e-4),
    request_s=st.floats(1e-3, 1e-2),
    prompt_token_s=st.floats(0.0, 5e-6),
    work_s=st.floats(0.0, 5e-3),
)
def test_costs_are_found_again(
    step_s: float, token_s: float, request_s: float, prompt_token_s: float, work_s: float
) -> None:
    truth = box(
        step_s=step_s, stream_token_s=token_s, request_s=request_s,
        prompt_token_s=prompt_token_s, request_work_s=min(work_s, request_s),
    )  # fmt: skip
    found = fit(seen_at(truth), kernels(), ARCH, "native", STEP_TOKENS)
    for isl, streams, cache in ((SHORT, 1, "cached"), (700, 1, "cold"), (700, 16, "cold")):
        expected = play(truth, isl, 40, streams, cache)
        assert play(found, isl, 40, streams, cache) == pytest.approx(expected, rel=0.08)
    # What a wave waits for is tried at steps of half a millisecond, and a first token that misses
    # a step comes with the next.
    first_s, between_s = play(truth, SHORT, 40, 16, "cached")
    found_first_s, found_between_s = play(found, SHORT, 40, 16, "cached")
    assert found_between_s == pytest.approx(between_s, rel=0.08)
    assert found_first_s == pytest.approx(first_s, abs=between_s)


def test_steps_faster_than_their_kernels_scale_the_kernels() -> None:
    truth = box(slower=0.8, step_s=0.0, stream_token_s=0.0)
    half_way = box(slower=0.8**0.5, step_s=0.0, stream_token_s=0.0)
    found = fit(seen_at(truth), kernels(), ARCH, "native", STEP_TOKENS)
    assert found.overheads.step_s == found.overheads.stream_token_s == 0.0
    for n in (1, 4, 32):
        shapes = [Shape(1, 80)] * n
        expected = StepCost(ARCH, half_way, "native").seconds(shapes)
        assert StepCost(ARCH, found, "native").seconds(shapes) == pytest.approx(expected, rel=0.08)


def test_a_first_token_that_is_off_widens_the_interval_and_is_said() -> None:
    seen = seen_at(box())
    exact = fit(seen, kernels(), ARCH, "native", STEP_TOKENS)
    slow = fit(
        seen._replace(cold_ttft_s=1.3 * seen.cold_ttft_s), kernels(), ARCH, "native", STEP_TOKENS
    )
    assert exact.relative_error == pytest.approx(0.1)
    assert slow.relative_error == pytest.approx(2 * (1 - 1 / 1.3), rel=0.1)
    assert "512-token prompt was predicted -23% off" in slow.notes[-1]
    assert exact.served
    assert slow.served
