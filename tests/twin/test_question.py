"""Configurations: memory from the allocators, known measurements, capacity, sweeps."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from hullspeed.errors import CapacityError, UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.memory.allocators import plan_memory
from hullspeed.memory.budget import EngineSettings
from hullspeed.memory.vllm_pool import VllmPool
from hullspeed.plan.capacity import memory_of
from hullspeed.plan.source import load_model
from hullspeed.twin.arrivals import Arrivals
from hullspeed.twin.fanout import answers
from hullspeed.twin.generate import closed_loop, open_loop
from hullspeed.twin.lengths import Lengths
from hullspeed.twin.profiles import profile, profiles
from hullspeed.twin.question import Outcome, Question, capacity, pareto, with_settings
from hullspeed.twin.summary import Objective
from hullspeed.twin.sweep import expand, parse_axes, what_if
from hullspeed.twin.workload import Workload

NO_LIMIT = Objective()


def question(model: str, gpu: str = "h100-sxm", **settings: object) -> Question:
    planned, found = load_model(model), find_gpu(gpu)
    asked = msgspec.convert({"max_model_len": 10_240} | settings, dict)
    return Question(
        label="as asked",
        arch=planned.arch,
        weights=planned.weights,
        gpu=found,
        memory=memory_of(found),
        settings=EngineSettings(**asked),
        usd_per_hour=2.0,
    )


def light(rate: float = 2.0, requests: int = 60) -> Workload:
    lengths = Lengths(tokens=1024), Lengths(tokens=64)
    return open_loop(*lengths, Arrivals(rate=rate), requests=requests, shared_tokens=512)


def benchmark(concurrency: int) -> Workload:
    """InferenceMAX's protocol as far as it is public: ten prompts for each place, lengths from
    0.8 of the nominal ones up to them, all sent as places are free.
    """
    isl = Lengths(tokens=8192, kind="uniform", range_ratio=0.8)
    osl = Lengths(tokens=1024, kind="uniform", range_ratio=0.8)
    return closed_loop(isl, osl, requests=10 * concurrency, concurrency=concurrency)


def test_where_memory_is_the_limit_ttft_is_that_of_the_queue() -> None:
    """Llama-3.1-70B FP8, vLLM on 2 x H100, 8k/1k, measured 2025-10-29 (public field data, mean
    TTFT): 6.52 s with 32 in flight and 59.2 s with 64, where mean-field formulas say about 1 s.
    One configuration for both: vLLM's default utilization then (0.90), 16-bit KV cache.
    """
    planned = load_model("meta-llama/Llama-3.1-70B-Instruct").with_fp8_weights()
    base = question("meta-llama/Llama-3.1-70B-Instruct")
    asked = replace(
        base,
        arch=planned.arch,
        weights=planned.weights,
        settings=EngineSettings(
            engine="vllm", tp=2, max_model_len=10_240, memory_fraction=0.90, prefix_caching=False
        ),
    )
    for concurrency, measured_s in ((32, 6.518), (64, 59.175)):
        played = asked.play(benchmark(concurrency))
        assert played.ttft_s().mean() == pytest.approx(measured_s, rel=0.25)
        assert played.preemptions > 0
    roomy = asked.play(benchmark(16))
    assert roomy.ttft_s().mean() == pytest.approx(1.284, rel=0.25)
    assert roomy.preemptions == 0


def test_pages_are_the_allocators() -> None:
    asked = question("meta-llama/Llama-3.1-8B-Instruct")
    plan = plan_memory(asked.arch, asked.memory, asked.settings, asked.weights)
    engine = asked.engine(light(), asked.cost())
    assert isinstance(plan.pool, VllmPool)
    assert engine.page_tokens == plan.pool.block_tokens == 16
    assert engine.n_pages == pytest.approx(plan.pool.usable_blocks, rel=0.01)
    assert engine.policy.reserve == "none"
    assert engine.cache == "hash"


def test_a_hybrid_takes_states_and_pages_from_the_same_bytes() -> None:
    asked = question("Qwen/Qwen3.6-27B-FP8")
    engine = asked.engine(light(), asked.cost())
    pool = plan_memory(asked.arch, asked.memory, asked.settings, asked.weights).pool
    assert engine.shared_bytes == pool.pool_bytes
    assert engine.state_bytes == pytest.approx(146.8 * 2**20, rel=0.01)
    assert (engine.cache, engine.block_tokens) == ("align", pool.hit_granularity_tokens)
    sglang = with_settings(asked, "sglang", engine="sglang")
    engine = sglang.engine(light(), sglang.cost())
    assert engine.shared_bytes == 0
    assert engine.state_slots >= 2 * engine.max_running + 1
    assert engine.policy.order == "prefill_first"
    whole = with_settings(asked, "trtllm", engine="trtllm")
    assert whole.engine(light(), whole.cost()).policy.reserve == "whole"


def test_a_sliding_window_model_holds_as_many_sequences_as_the_allocator_says() -> None:
    asked = question("google/gemma-3-27b-it", "h200-sxm")
    engine = asked.engine(light(), asked.cost())
    pool = plan_memory(asked.arch, asked.memory, asked.settings, asked.weights).pool
    sequences = engine.n_pages // -(-(1024 + 64) // engine.page_tokens)
    assert sequences == pytest.approx(pool.concurrency(1024 + 64), rel=0.05)


def test_what_does_not_fit_does_not_start() -> None:
    with pytest.raises(CapacityError, match="would not start"):
        question("meta-llama/Llama-3.1-70B-Instruct").play(light())
    with pytest.raises(UsageError, match="no scheduling profile"):
        profile("transformers")
    assert all(p.source for p in profiles().values())


def test_summary_adds_up() -> None:
    asked = question("Qwen/Qwen3.6-27B-FP8")
    played = asked.play(light())
    summary = asked.sum_up(played, Objective(ttft_s=0.2, tpot_s=0.02, attainment=0.5))
    assert summary.requests == 60
    assert summary.ttft_s["p50"] == pytest.approx(np.median(played.ttft_s()), rel=1e-5)
    assert summary.output_tokens_per_s == pytest.approx(60 * 64 / played.duration_s, rel=1e-5)
    per_output = 2.0 / 3600 / summary.output_tokens_per_s * 1e6
    assert summary.usd_per_m_output == pytest.approx(per_output, rel=1e-4)
    good = sum(r.ttft_s <= 0.2 and r.tpot_s <= 0.02 for r in played.served)
    assert summary.attained == pytest.approx(good / 60, rel=1e-5)
    assert summary.goodput_per_s == pytest.approx(good / played.duration_s, rel=1e-5)
    assert summary.meets is (good / 60 >= 0.5)
    assert played.good(None, None) == 60


def test_capacity_is_where_the_objective_breaks() -> None:
    asked = question("Qwen/Qwen3.6-27B-FP8")
    workload, objective = light(4.0, 200), Objective(ttft_s=0.5, tpot_s=0.03)
    found = capacity(asked, workload, objective)
    assert found.bounded
    assert found.unit == "requests/s"
    assert found.summary is not None
    assert found.summary.meets
    assert asked.answer(workload.scaled(found.factor), objective).meets
    assert not asked.answer(workload.scaled(found.factor * 1.1), objective).meets
    closed = closed_loop(Lengths(tokens=512), Lengths(tokens=32), requests=80, concurrency=8)
    limit = capacity(asked, closed, objective)
    assert limit.unit == "in flight"
    more = msgspec.structs.replace(closed, concurrency=int(limit.load) + 1)
    if limit.bounded:
        assert not asked.answer(more, objective).meets
    never = capacity(asked, workload, Objective(ttft_s=1e-6))
    assert (never.load, never.summary) == (0.0, None)


def test_sweeps_are_in_order_whatever_the_number_of_workers() -> None:
    base = question("Qwen/Qwen3.6-27B-FP8")
    axes = parse_axes(["gpu=h100-sxm,a40", "tp=1,2", "kv-dtype=bf16,fp8"])
    questions = expand(base, axes, memory_of, None)
    assert len(questions) == 8
    assert questions[3].label == "gpu=h100-sxm tp=2 kv-dtype=fp8"
    assert questions[3].usd_per_hour == pytest.approx(2 * find_gpu("h100-sxm").price.usd_per_hour)  # type: ignore[union-attr]
    one = answers(questions, light(), NO_LIMIT, workers=1)
    two = answers(questions, light(), NO_LIMIT, workers=2)
    assert one == two
    assert [o.label for o in one] == [q.label for q in questions]
    assert pareto(one) <= {o.label for o in one}


def test_the_front_is_what_nobody_beats() -> None:
    base = question("Qwen/Qwen3.6-27B-FP8").answer(light(), NO_LIMIT)

    def outcome(label: str, usd: float, ttft: float) -> Outcome:
        summary = msgspec.structs.replace(base, usd_per_m_output=usd, ttft_s={"p99": ttft})
        return Outcome(label=label, summary=summary)

    outcomes = [outcome("cheap", 1, 9), outcome("fast", 9, 1), outcome("bad", 9, 9)]
    assert pareto([*outcomes, Outcome(label="none", error="no")]) == {"cheap", "fast"}


def test_what_if_changes_one_thing_at_a_time() -> None:
    base = question("Qwen/Qwen3.6-27B-FP8")
    questions = what_if(base, memory_of, 3.0)
    assert questions[0].label == "as asked"
    labels = [q.label for q in questions]
    assert "tp=2" in labels
    assert "gpu=h100-sxm" not in labels
    assert "engine=vllm" not in labels
    assert len(set(labels)) == len(labels)
    by_label = {q.label: q for q in questions}
    assert by_label["tp=2"].usd_per_hour == 6.0
    assert by_label["gpu=b200"].usd_per_hour != 3.0


@pytest.mark.parametrize(
    ("texts", "wrong"),
    [
        (["colour=red"], "no such axis"),
        (["tp"], "once"),
        (["tp=1", "tp=2"], "once"),
        (["tp=two"], "tp cannot be"),
        (["gpu=abacus"], "unknown GPU"),
        (["engine=magic"], "unknown engine"),
        (["cache=magic"], "unknown prefix cache"),
        (["eviction=magic"], "unknown eviction"),
        (["prefix-caching=maybe"], "prefix-caching cannot be"),
        (["max-num-seqs=" + ",".join(map(str, range(1, 300))),
          "max-num-batched-tokens=" + ",".join(map(str, range(1, 300)))], "too many"),
    ],
)  # fmt: skip
def test_axes_that_cannot_be(texts: list[str], wrong: str) -> None:
    base = question("Qwen/Qwen3.6-27B-FP8")
    with pytest.raises(UsageError, match=wrong):
        expand(base, parse_axes(texts), memory_of, None)


def test_a_configuration_that_cannot_be_is_an_outcome() -> None:
    base = question("Qwen/Qwen3.6-27B-FP8")
    questions = expand(base, parse_axes(["gpu=l4,h100-sxm"]), memory_of, None)
    small, large = answers(questions, light(), NO_LIMIT, workers=1)
    assert "would not start" in small.error
    assert large.summary is not None
