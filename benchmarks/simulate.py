"""How long simulations take, and what the documented tables say.

python benchmarks/simulate.py hour     one hour at 10 requests/s on a 27B, one core
python benchmarks/simulate.py sweep    1,000 configurations on two cores
python benchmarks/simulate.py cache    prefix-cache policies on the agent trace, several seeds
python benchmarks/simulate.py kv       70B FP8 on 2 x H100 against its published measurements
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np

from hullspeed.hardware.catalogue import find_gpu
from hullspeed.memory.budget import EngineSettings
from hullspeed.plan.capacity import memory_of
from hullspeed.plan.source import load_model
from hullspeed.twin.agents import AgentLoad, agent_sessions
from hullspeed.twin.arrivals import Arrivals
from hullspeed.twin.cache_rows import cache_row, policies
from hullspeed.twin.fanout import answers
from hullspeed.twin.generate import closed_loop, open_loop
from hullspeed.twin.lengths import Lengths
from hullspeed.twin.question import Question
from hullspeed.twin.summary import Objective
from hullspeed.twin.sweep import expand, parse_axes

MODEL = "Qwen/Qwen3.6-27B-FP8"
PUBLISHED_S = {16: 1.284, 32: 6.518, 64: 59.175}
SEEDS = (0, 1, 2)
BUDGETS_GIB = (8, 24)


def question(model: str = MODEL, **settings: object) -> Question:
    planned, gpu = load_model(model), find_gpu("h100-sxm")
    asked = EngineSettings(**({"max_model_len": 32_768} | settings))  # type: ignore[arg-type]
    return Question(
        label=model,
        arch=planned.arch,
        weights=planned.weights,
        gpu=gpu,
        memory=memory_of(gpu),
        settings=asked,
        usd_per_hour=2.69,
    )


def hour() -> None:
    isl, osl = Lengths(tokens=2048), Lengths(tokens=200)
    arrivals = Arrivals(rate=10.0)
    begin = time.process_time()
    load = open_loop(isl, osl, arrivals, requests=36_000, shared_tokens=1500, n_shared=4)
    drawn = time.process_time()
    for cache in ("segment", "align"):
        asked = replace(question(tp=2), cache=cache)
        start = time.process_time()
        played = asked.play(load)
        middle = time.process_time()
        summary = asked.sum_up(played, Objective())
        end = time.process_time()
        print(
            f"{cache}: {drawn - begin:.1f} s to draw, {middle - start:.1f} s to play, "
            f"{end - middle:.1f} s to sum up: {summary.requests:,} requests, "
            f"{summary.duration_s:,.0f} s of traffic, {summary.steps:,} steps, "
            f"{played.output_tokens:,} tokens, hits {summary.hit_rate:.1%}, "
            f"TTFT p99 {summary.ttft_s['p99'] * 1e3:.0f} ms"
        )


def sweep() -> None:
    load = open_loop(
        Lengths(tokens=2048), Lengths(tokens=256), Arrivals(rate=3.0), requests=500,
        shared_tokens=1000,
    )  # fmt: skip
    axes = parse_axes(
        ["gpu=h100-sxm,h200-sxm,b200,a40,l40s", "engine=vllm,sglang,trtllm", "tp=1,2",
         "kv-dtype=bf16,fp8", "max-num-batched-tokens=2048,4096,8192,16384",
         "max-num-seqs=32,64,128,256,512"]
    )  # fmt: skip
    questions = expand(question(), axes, memory_of, None)[:1000]
    start = time.perf_counter()
    outcomes = answers(questions, load, Objective(ttft_s=1.0), workers=2)
    seconds = time.perf_counter() - start
    started = sum(o.summary is not None for o in outcomes)
    print(f"{len(outcomes)} configurations, {started} start: {seconds:.0f} s on two processes")


def cache() -> None:
    asked = question()
    steps = asked.cost().steps
    print("| policy | states | " + " | ".join(f"{b} GiB" for b in BUDGETS_GIB) + " |")
    print("|---|---|" + "---|" * len(BUDGETS_GIB))
    loads = [agent_sessions(AgentLoad(seed=seed)) for seed in SEEDS]
    for policy in policies(asked.arch):
        cells = []
        for budget in BUDGETS_GIB:
            hits = [cache_row(asked.arch, steps, w, policy, budget).hit_rate for w in loads]
            cells.append(" / ".join(f"{hit:.3f}" for hit in hits))
        print(f"| {policy.name} | {policy.state_dtype or '-'} | {' | '.join(cells)} |", flush=True)


def kv() -> None:
    planned = load_model("meta-llama/Llama-3.1-70B-Instruct").with_fp8_weights()
    asked = replace(
        question("meta-llama/Llama-3.1-70B-Instruct"),
        arch=planned.arch,
        weights=planned.weights,
        settings=EngineSettings(
            engine="vllm", tp=2, max_model_len=10_240, memory_fraction=0.90, prefix_caching=False
        ),
    )
    for concurrency, published_s in PUBLISHED_S.items():
        isl = Lengths(tokens=8192, kind="uniform", range_ratio=0.8)
        osl = Lengths(tokens=1024, kind="uniform", range_ratio=0.8)
        load = closed_loop(isl, osl, requests=10 * concurrency, concurrency=concurrency)
        played = asked.play(load)
        ttft_s = float(played.ttft_s().mean())
        print(
            f"{concurrency} in flight: TTFT mean {ttft_s:.2f} s, published {published_s:.2f} s "
            f"({ttft_s / published_s - 1:+.0%}); TPOT {np.mean(played.tpot_s()) * 1e3:.1f} ms; "
            f"{played.preemptions} preemptions"
        )


if __name__ == "__main__":
    commands = {"hour": hour, "sweep": sweep, "cache": cache, "kv": kv}
    for name in sys.argv[1:] or list(commands):
        commands[name]()
