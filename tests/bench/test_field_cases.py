"""The field cases B01 to B15: what has fooled a load generator must not fool this one."""

from __future__ import annotations

import asyncio
from statistics import fmean, median, stdev
from typing import Any

import pytest

from hullspeed.bench import BenchSpec, Cell, Objective, Verdict, run

from .mock_endpoint import MockEndpoint, Truth, mock_endpoint

NEAR_S = 0.04  # the mock shares the test's event loop, on a machine that may be busy


async def measure(truth: Truth, **spec: Any) -> tuple[Cell, MockEndpoint]:
    async with mock_endpoint(truth) as mock:
        defaults: dict[str, Any] = {
            "isl_tokens": 20, "osl_tokens": 20, "requests": 8, "timeout_s": 30.0,
        }  # fmt: skip
        if "rates" not in spec and "conversations" not in spec:
            defaults["concurrency"] = (4,)
        result = await run(BenchSpec(url=mock.url, **(defaults | spec)))
        return result.cells[-1], mock


async def test_the_measured_latencies_are_the_schedule() -> None:
    cell, mock = await measure(Truth(ttft_s=0.1, itl_s=0.01), osl_tokens=30)
    assert cell.ok == cell.requests == 8
    assert cell.ttft_s.p50 == pytest.approx(mock.ttft_s(), abs=NEAR_S)
    assert cell.itl_s.mean == pytest.approx(mock.gap_s(), rel=0.05)
    assert cell.tpot_s.mean == pytest.approx(mock.gap_s(), rel=0.05)
    assert cell.e2e_s.p50 == pytest.approx(mock.ttft_s(token=-1), abs=NEAR_S)
    assert cell.output_tok_s == pytest.approx(8 * 30 / cell.duration_s, rel=1e-6)


async def test_b01_prompts_are_new_unless_asked() -> None:
    _, first = await measure(Truth())
    _, second = await measure(Truth())
    prompts = [prompt[:30] for prompt in (*first.prompts, *second.prompts)]
    assert len(set(prompts)) == len(prompts)


async def test_b01_a_cold_load_that_hits_the_cache_is_contaminated() -> None:
    cell, _ = await measure(Truth(cached_tokens=200), isl_tokens=256)
    assert cell.trust.verdict is Verdict.CONTAMINATED
    assert cell.hit_rate == pytest.approx(200 / 256)


async def test_b01_the_shared_prefix_is_allowed_to_hit() -> None:
    cell, mock = await measure(
        Truth(cached_tokens=200), isl_tokens=256, shared_prefix_tokens=200, requests=16
    )
    assert Verdict.CONTAMINATED is not cell.trust.verdict
    measured = mock.prompts[1:]
    assert len({prompt.split()[0] for prompt in measured}) == 1
    assert len(set(measured)) == 16


async def test_a_warm_load_repeats_one_prompt_and_must_hit() -> None:
    cell, mock = await measure(Truth(cached_tokens=0), cache="cached")
    assert len(set(mock.prompts[1:])) == 1
    assert len(mock.prompts) == 1 + 1 + 8  # warm-up, priming, measured
    assert cell.trust.verdict is Verdict.CONTAMINATED
    assert any("warm cache" in reason for reason in cell.trust.reasons)


async def test_b02_asked_and_achieved_rate_are_both_stated() -> None:
    cell, mock = await measure(Truth(), rates=(100.0,), arrival="constant", requests=100)
    assert cell.trust.rate_asked == 100
    assert cell.trust.rate_scheduled == pytest.approx(100, rel=1e-9)
    assert cell.trust.rate_sent == pytest.approx(1 / fmean(mock.arrival_gaps_s()), rel=0.05)


async def test_b03_the_first_token_is_no_inter_token_latency() -> None:
    cell, _ = await measure(Truth(ttft_s=0.3, itl_s=0.005))
    assert cell.itl_s.count == 8 * 19
    assert cell.itl_s.p90 < 0.15


@pytest.mark.parametrize("running_usage", [False, True])
async def test_b04_itl_weighs_tokens_not_chunks(running_usage: bool) -> None:
    truth = Truth(itl_s=0.01, tokens_per_chunk=4, running_usage=running_usage)
    cell, mock = await measure(truth, osl_tokens=40)
    assert cell.itl_s.mean == pytest.approx(mock.gap_s() / 4, rel=0.05)
    assert cell.chunk_gap_s.mean == pytest.approx(mock.gap_s(), rel=0.05)
    assert cell.itl_s.count == 8 * 36
    assert cell.trust.token_counts == {"usage" if running_usage else "length": 8}


async def test_b05_reasoning_counts_and_the_answer_is_timed_apart() -> None:
    cell, mock = await measure(Truth(ttft_s=0.05, itl_s=0.02, reasoning_tokens=10), api="chat")
    assert cell.ttft_s.p50 == pytest.approx(mock.ttft_s(), abs=NEAR_S)
    assert cell.ttfot_s.p50 == pytest.approx(mock.ttft_s(token=10), abs=NEAR_S)


async def test_b06_no_latency_without_both_stamps() -> None:
    cell, _ = await measure(Truth(end="cut", bad_every=2), requests=8, concurrency=(2,))
    assert cell.ttft_s.count == cell.ok < 8
    for latency in (cell.ttft_s, cell.itl_s, cell.e2e_s):
        assert latency.p50 > 0


async def test_b07_requests_in_flight_are_counted() -> None:
    cell, mock = await measure(Truth(), concurrency=(32,), requests=64)
    assert mock.in_flight_max == cell.trust.in_flight_max == 32
    assert 16 < cell.trust.in_flight_mean <= 32


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ("error", "error_event"),
        ("cut", "disconnected"),
        ("no_finish", "no_finish_reason"),
        ("no_done", "no_done"),
        ("abort", "aborted"),
        ("http_500", "http_500"),
    ],
)
async def test_b08_what_looks_like_success_is_a_failure_by_kind(end: str, kind: str) -> None:
    cell, _ = await measure(Truth(end=end, bad_every=3), requests=8, concurrency=(1,))
    assert cell.failures == {kind: 3}  # requests 3, 6 and 9; the first was the warm-up
    assert cell.ok == 5


async def test_b08_failures_do_not_count_as_received_tokens() -> None:
    cell, _ = await measure(Truth(end="error", bad_every=3), requests=8, concurrency=(1,))
    received = cell.output_tok_s * cell.duration_s
    assert received == pytest.approx(5 * 20 + 3 * 10)


async def test_b09_a_role_is_no_token() -> None:
    cell, mock = await measure(Truth(ttft_s=0.2, early_role_s=0.005), api="chat")
    assert cell.ttft_s.p50 >= 0.2
    assert cell.ttft_s.p50 == pytest.approx(mock.ttft_s(), abs=NEAR_S)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
async def test_b10_any_legal_framing_is_read(line_end: bytes) -> None:
    truth = Truth(line_end=line_end, piece_bytes=7, pings=True)
    cell, _ = await measure(truth)
    assert cell.ok == 8
    assert cell.output_tokens.mean == 20


async def test_b10_zero_tokens_are_a_failure() -> None:
    async with mock_endpoint(Truth()) as mock:
        task = asyncio.ensure_future(
            run(BenchSpec(url=mock.url, osl_tokens=20, isl_tokens=20, concurrency=(1,), requests=4))
        )
        while not mock.prompts and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        mock.truth.max_tokens_kept = 0
        cell = (await task).cells[0]
    assert cell.ok == 0
    assert cell.failures == {"no_tokens": 4}


async def test_b11_steady_throughput_stays_below_the_ceiling() -> None:
    cell, _ = await measure(
        Truth(ttft_s=0.05, itl_s=0.01), concurrency=(8,), requests=40, osl_tokens=10
    )
    assert cell.steady_output_tok_s is not None
    assert cell.steady_output_tok_s <= 8 / 0.01
    assert cell.steady_output_tok_s <= 1.02 * 8 * 10 / (0.05 + 0.09)


async def test_b12_the_open_loop_sees_a_stall() -> None:
    spec: dict[str, Any] = {"osl_tokens": 2, "requests": 60}
    stalled = Truth(ttft_s=0.01, stall=(0.5, 1.5))
    open_cell, _ = await measure(stalled, rates=(40.0,), arrival="constant", **spec)
    assert open_cell.ttft_s.p99 > 0.7
    assert open_cell.ttft_s.p90 > 0.5  # 40 of 60 requests came during the stall


async def test_b13_a_freeze_fails_the_token_deadlines() -> None:
    # By its mean an answer may take 12 s, and takes 3 s; by its deadlines the 11th token has 2 s.
    objective = Objective(ttft_s=1.8, tpot_s=0.02)
    truth = Truth(itl_s=0.0005, freeze=(10, 2.5))
    cell, mock = await measure(truth, osl_tokens=600, requests=4, objective=objective)
    assert cell.goodput is not None
    assert cell.goodput.share_by_means == 1.0
    assert cell.goodput.share == 0.0
    assert not cell.goodput.held
    assert cell.max_gap_s.p50 == pytest.approx(median(mock.longest_gaps_s()), abs=NEAR_S)
    assert 2.4 < cell.trust.longest_silence_s <= cell.max_gap_s.max + NEAR_S


async def test_b14_lengths_are_asked_for_exactly_and_checked() -> None:
    cell, mock = await measure(Truth(max_tokens_kept=12))
    assert mock.bodies[-1]["min_tokens"] == mock.bodies[-1]["max_tokens"] == 20
    assert mock.bodies[-1]["ignore_eos"] is True
    assert cell.failures == {"length": 8}
    assert any("20 tokens long" in reason for reason in cell.trust.reasons)


async def test_b14_any_length_will_do_when_not_exact() -> None:
    cell, mock = await measure(Truth(max_tokens_kept=12), exact_osl=False)
    assert cell.ok == 8
    assert cell.output_tokens.mean == 12
    assert "ignore_eos" not in mock.bodies[-1]


async def test_b15_the_arrival_process_is_what_its_name_says() -> None:
    truth = Truth(ttft_s=0.005)
    spec: dict[str, Any] = {"rates": (100.0,), "requests": 100, "osl_tokens": 1, "seed": 1}
    for arrival in ("constant", "poisson"):
        cell, mock = await measure(truth, arrival=arrival, **spec)
        assert cell.load.startswith(arrival)
        gaps_s = mock.arrival_gaps_s()
        assert cell.trust.gap_cv == pytest.approx(stdev(gaps_s) / fmean(gaps_s), abs=0.1)
