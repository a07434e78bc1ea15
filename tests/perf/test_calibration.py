"""Calibration: a box with known factors is found again from what it would have shown."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from hullspeed.arch import catalogue
from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.perf.calibration import (
    DECODE,
    PROMPT,
    Calibration,
    calibrate,
    load_calibration,
    save_calibration,
)
from hullspeed.perf.fitted import FittedCost, coefficients_of, engine_of
from hullspeed.perf.observed import (
    Observed,
    ObservedLoad,
    ObservedStep,
    observed_of_bench,
    observed_of_log,
)
from hullspeed.perf.replay import Ask, replay
from hullspeed.perf.terms import Terms

GPU = find_gpu("H200")
ENGINE = engine_of("vllm", GPU)


def cost_of(decode: float = 1.0, prompt: float = 1.0) -> FittedCost:
    factors = dict.fromkeys(DECODE, decode) | dict.fromkeys(PROMPT, prompt)
    scaled = coefficients_of("vllm").scaled(factors, "a test")
    return FittedCost(catalogue.load("Qwen/Qwen3-8B"), GPU, coefficients=scaled)


def observe(cost: FittedCost, concurrency: int, isl: int = 2000, osl: int = 100) -> ObservedLoad:
    played = replay(cost, [Ask(isl, osl)] * (8 * concurrency), ENGINE, concurrency=concurrency)
    return ObservedLoad(
        isl=isl,
        osl=osl,
        concurrency=concurrency,
        requests=8 * concurrency,
        ttft_s=statistics.fmean(s.ttft_s for s in played.served),
        tpot_s=statistics.fmean(s.tpot_s for s in played.served),
        output_tokens_per_s=played.output_tokens_per_s,
    )


def calibrated(observed: list[Observed]) -> Calibration:
    return calibrate(
        cost_of(), ENGINE, observed, model="Qwen/Qwen3-8B", gpu="H200", tp=1, engine_name="vllm",
        origin="a test",
    )  # fmt: skip


def test_every_term_belongs_to_one_factor() -> None:
    assert sorted(DECODE + PROMPT) == sorted(Terms._fields)


@pytest.mark.parametrize(("decode", "prompt"), [(1.3, 0.8), (0.7, 1.5), (1.0, 1.0)])
def test_a_box_is_found_again(decode: float, prompt: float) -> None:
    box = cost_of(decode, prompt)
    found = calibrated([observe(box, c) for c in (1, 4, 16)])
    assert found.decode == pytest.approx(decode, rel=0.06)
    assert found.prompt == pytest.approx(prompt, rel=0.12)
    assert found.error_after <= max(found.error_before, 0.02)
    ours = FittedCost(
        catalogue.load("Qwen/Qwen3-8B"), GPU, coefficients=found.apply(coefficients_of("vllm"))
    )
    unseen, truth = observe(ours, 4, 3000, 200), observe(box, 4, 3000, 200)
    assert unseen.tpot_s == pytest.approx(truth.tpot_s, rel=0.06)
    assert unseen.ttft_s == pytest.approx(truth.ttft_s, rel=0.15)
    assert "scaled to this box" in ours.coefficients.origin


def test_steps_alone_move_decoding_alone() -> None:
    box = cost_of(1.4)
    steps = [
        ObservedStep(
            n_decode=n, context_tokens=1000 * n, seconds=box.batch_seconds(n, 1000 * n, ())
        )
        for n in (1, 8, 32)
    ]
    found = calibrated(list(steps))
    assert found.decode == pytest.approx(1.4, rel=0.03)
    assert found.prompt == pytest.approx(1.0, abs=0.1)


def test_another_box_altogether_is_refused() -> None:
    steps: list[Observed] = [ObservedStep(n_decode=1, context_tokens=100, seconds=1.0)]
    with pytest.raises(UsageError, match="like no such box"):
        calibrated(steps)
    with pytest.raises(UsageError, match="nothing was observed"):
        calibrated([])


def test_kept_and_found_for_the_same_case_only(tmp_path: Path) -> None:
    found = calibrated([observe(cost_of(1.2), 4)])
    path = save_calibration(found, tmp_path)
    assert load_calibration("Qwen/Qwen3-8B", "H200", 1, "vllm", tmp_path) == found
    assert load_calibration("Qwen/Qwen3-8B", "H200", 2, "vllm", tmp_path) is None
    path.write_text("{", encoding="utf-8")
    assert load_calibration("Qwen/Qwen3-8B", "H200", 1, "vllm", tmp_path) is None


VLLM = """INFO GPU KV cache size: 100,000 tokens
INFO Engine 000: Avg prompt throughput: 3000.0 tokens/s, Avg generation throughput: 200.0 \
tokens/s, Running: 8 reqs, Waiting: 0 reqs, GPU KV cache usage: 10.0%, Prefix cache hit rate: 0.0%
INFO Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 400.0 tokens/s, \
Running: 8 reqs, Waiting: 0 reqs, GPU KV cache usage: 12.0%, Prefix cache hit rate: 0.0%
INFO Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 100.0 tokens/s, \
Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 4.0%, Prefix cache hit rate: 0.0%
(APIServer pid=3646) INFO 05-19 10:13:21 [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 \
tokens/s, Avg generation throughput: 100.0 tokens/s, Running: 3 reqs, Waiting: 42 reqs, GPU KV \
cache usage: 95.0%, Prefix cache hit rate: 0.0%
"""


def sglang(rank: str, running: int, tokens: int, rate: float, drafts: str = "") -> str:
    return (
        f"[2026-04-08 14:05:21{rank}] Decode batch, #running-req: {running}, #token: {tokens}, "
        f"token usage: 0.29, {drafts}cuda graph: True, gen throughput (token/s): {rate}, "
        "#queue-req: 0"
    )


PREFILL = "[2026-04-08 14:05:22] Prefill batch, #new-seq: 1, #new-token: 158, #cached-token: 0"
SGLANG = [
    sglang("", 16, 31000, 640.0),  # of an interval that began before the log
    sglang("", 16, 32000, 800.0),
    PREFILL,
    sglang("", 16, 32800, 500.0),  # a prompt was in it
    sglang("", 12, 30000, 700.0),  # requests left in it
    sglang(" DP1 TP0", 12, 30000, 700.0),  # another rank's
    sglang("", 12, 30400, 600.0),
    sglang("", 12, 30800, 1740.0, "accept len: 2.90, "),  # verifies drafts
]


def test_engine_logs() -> None:
    assert observed_of_log(VLLM) == [
        ObservedStep(n_decode=8, context_tokens=12_000, seconds=0.02),
        # The first carries prompts, the third has lost requests on the way; that others wait for
        # pages is no matter.
        ObservedStep(n_decode=3, context_tokens=95_000, seconds=0.03),
    ]
    assert observed_of_log("\n".join(SGLANG)) == [
        ObservedStep(n_decode=16, context_tokens=32_000, seconds=0.02),
        ObservedStep(n_decode=12, context_tokens=30_400, seconds=0.02),
    ]
    with pytest.raises(UsageError, match="no interval of plain decoding"):
        observed_of_log("INFO started\n")


def test_benchmarks(tmp_path: Path) -> None:
    vllm = {
        "completed": 100, "total_input_tokens": 102_400, "total_output_tokens": 12_800,
        "max_concurrency": 16, "mean_ttft_ms": 80.0, "mean_tpot_ms": 9.0,
        "output_throughput": 1500.0,
    }  # fmt: skip
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(vllm), encoding="utf-8")
    (load,) = observed_of_bench(path)
    assert load == ObservedLoad(
        isl=1024, osl=128, concurrency=16, requests=100, ttft_s=0.08, tpot_s=0.009,
        output_tokens_per_s=1500.0,
    )  # fmt: skip
    sglang = [vllm | {"request_rate": float("inf"), "max_concurrency": n} for n in (1, 8)]
    at_a_rate = vllm | {"request_rate": 4.0}
    path.write_text("\n".join(map(json.dumps, [*sglang, at_a_rate])) + "\n", encoding="utf-8")
    loads = observed_of_bench(path)
    assert [one.concurrency for one in loads if isinstance(one, ObservedLoad)] == [1, 8]
    path.write_text(json.dumps(vllm | {"request_rate": "inf"}), encoding="utf-8")
    assert observed_of_bench(path) == [load]
    cell = {
        "load": "closed 4", "ok": 16, "prompt_tokens": {"mean": 512.0},
        "output_tokens": {"mean": 64.0}, "cached_tokens": {"mean": 112.0},
        "ttft_s": {"mean": 0.05}, "tpot_s": {"mean": 0.01}, "output_tok_s": 300.0,
    }  # fmt: skip
    path.write_text(json.dumps({"cells": [cell, {"load": "poisson 4/s", "ok": 3}]}), "utf-8")
    (ours,) = observed_of_bench(path)
    assert isinstance(ours, ObservedLoad)
    assert (ours.isl, ours.concurrency) == (400, 4)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "cannot read"),
        ('{"mean_ttft_ms": 1, "request_rate": 4.0}', "no closed loop"),
        ('{"mean_ttft_ms": 1, "request_rate": "fast"}', "lacks a field"),
        ("[]", "no benchmark result"),
        ('{"cells": []}', "no closed loop"),
        ('{"mean_ttft_ms": 1}', "lacks a field"),
        ('{"cells": [{"load": "closed 4", "ok": 1}]}', "lacks a field"),
    ],
)
def test_bad_benchmarks_are_one_error(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=wrong):
        observed_of_bench(path)
