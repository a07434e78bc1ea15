"""Cost of planning: microseconds of scheduler and cache per step, in pure Python.

    python benchmarks/scheduler.py

64 running requests on a cost-model executor that takes no time: decoding alone, and with prompts of
2,000 tokens (1,500 shared) arriving all the time. Bar: 500 us per step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from hullspeed.clock import VirtualClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.core.executor import CostModelExecutor
from hullspeed.core.sampling import SamplingParams

RUNNING = 64


def make_loop(cache: str) -> EngineLoop:
    scheduler = build_scheduler(
        n_pages=8192,
        page_tokens=64,
        max_running=RUNNING,
        step_tokens=512,
        max_context_tokens=8192,
        cache=cache,
    )
    clock = VirtualClock()
    executor = CostModelExecutor(clock, lambda _: 0.02)
    return EngineLoop(scheduler, executor, clock, Limits(vocab=50_000, max_context_tokens=8192))


def timed(loop: EngineLoop, n_steps: int, before: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(n_steps):
        before()
        begin = time.perf_counter()
        loop.step()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def decode(cache: str) -> list[float]:
    loop = make_loop(cache)
    for i in range(RUNNING):
        loop.add(i, [i] * 512, SamplingParams(max_tokens=4000))
    while any(s.pending > 1 for s in loop.scheduler.running) or loop.scheduler.waiting:
        loop.step()
    return timed(loop, 500, lambda: None)


def churn(cache: str) -> list[float]:
    loop = make_loop(cache)
    added = iter(range(10**9))

    def refill() -> None:
        while len(loop.scheduler.running) + len(loop.scheduler.waiting) < RUNNING + 4:
            i = next(added)
            prompt = [7] * 1500 + [i % 50_000] * 500
            loop.add(i, prompt, SamplingParams(max_tokens=32 + i % 64))

    for _ in range(100):
        refill()
        loop.step()
    return timed(loop, 1000, refill)


def main() -> None:
    print(f"{'cache':10}{'load':10}{'p50 us':>10}{'p99 us':>10}")
    for cache in ("segment", "hash", "none"):
        for name, load in (("decode", decode), ("churn", churn)):
            times = sorted(load(cache))
            p99 = times[int(len(times) * 0.99)]
            print(f"{cache:10}{name:10}{statistics.median(times):10.0f}{p99:10.0f}")


if __name__ == "__main__":
    main()
