"""The replay, against the production scheduler step by step and against arithmetic by hand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest

from hullspeed.errors import UsageError
from hullspeed.perf.replay import Ask, Engine, replay
from hullspeed.perf.work import Shape
from hullspeed.twin.closed_loop import TwinEngine, simulate
from hullspeed.twin.load import Load


class Linear:
    """10 ms a step, 1 ms a sequence, 0.1 ms a prompt token, 1 ns a token of context."""

    def seconds(self, shapes: Sequence[Shape]) -> float:
        single = [s for s in shapes if s.n_tokens == 1]
        prompt = sum(s.n_tokens for s in shapes if s.n_tokens > 1)
        context = sum(s.context_tokens for s in single)
        return 0.010 + 0.001 * len(single) + 1e-4 * prompt + 1e-9 * context


def test_one_request_by_hand() -> None:
    played = replay(Linear(), [Ask(100, 11)], Engine(request_s=0.5), concurrency=1)
    (one,) = played.served
    assert one.ttft_s == pytest.approx(0.5 + 0.010 + 0.01)
    assert one.tpot_s == pytest.approx(0.011, rel=1e-4)
    assert played.output_tokens_per_s == pytest.approx(11 / (0.52 + 0.11), rel=1e-3)


def test_a_cached_prefix_is_not_computed() -> None:
    (one,) = replay(Linear(), [Ask(100, 2, 60)], Engine(), concurrency=1).served
    assert one.ttft_s == pytest.approx(0.010 + 0.004)


def test_prompts_first_or_on_decode_steps() -> None:
    """While one decodes, the other's prompt of 1,000 tokens comes in chunks of 100."""
    asks = [Ask(10, 200), Ask(1000, 2, 0, 0.05)]
    mixed = replay(Linear(), asks, Engine(step_tokens=101))
    alone = replay(Linear(), asks, Engine(step_tokens=100, policy="prefill_first"))
    gaps = [{s.osl: s for s in played.served}[200].tpot_s for played in (mixed, alone)]
    # 199 steps of 11 ms, and ten chunks: 10 ms more each where they ride along, 20 where not.
    assert gaps == pytest.approx([0.011 + 0.1 / 199, 0.011 + 0.2 / 199], rel=1e-3)
    late = {s.osl: s.ttft_s for s in mixed.served}[2]
    assert late > {s.osl: s.ttft_s for s in alone.served}[2]  # decoding rides along


def test_prompts_wait_for_company_while_others_decode() -> None:
    """TensorRT-LLM's batch waiting: 20 decode steps at most, or until a step is full enough."""
    engine = Engine(step_tokens=1000, wait_steps=20, wait_tokens=900)

    def second(prompt: int, engine: Engine) -> float:
        asks = [Ask(10, 200), Ask(prompt, 2, 0, 0.05)]
        return min(s.ttft_s for s in replay(Linear(), asks, engine).served if s.osl == 2)

    plain = engine._replace(wait_steps=0)
    assert second(100, engine) == pytest.approx(second(100, plain) + 20 * 0.011, abs=1e-3)
    assert second(950, engine) == pytest.approx(second(950, plain))  # fills a step by itself
    (alone,) = replay(Linear(), [Ask(100, 2)], engine).served
    assert alone.ttft_s == pytest.approx(0.02)  # nobody decodes


@pytest.mark.parametrize(("concurrency", "isl", "osl"), [(1, 300, 40), (8, 300, 40), (16, 700, 24)])
def test_the_same_as_the_production_scheduler(concurrency: int, isl: int, osl: int) -> None:
    requests = 4 * concurrency
    engine = TwinEngine(
        vocab=1000, max_context_tokens=4096, n_pages=4096, max_running=64, step_tokens=512
    )
    load = Load(isl_tokens=isl, osl_tokens=osl, requests=requests, concurrency=concurrency)
    twin = simulate(engine, Linear(), load)
    ours = replay(
        Linear(), [Ask(isl, osl)] * requests, Engine(step_tokens=512, max_running=64),
        concurrency=concurrency,
    )  # fmt: skip
    assert ours.output_tokens_per_s == pytest.approx(twin.output_tokens_per_s, rel=0.04)
    tpot = statistics.fmean(s.tpot_s for s in ours.served)
    assert tpot == pytest.approx(statistics.fmean(twin.tpot_s), rel=0.04)
    ttft = statistics.fmean(s.ttft_s for s in ours.served)
    assert ttft == pytest.approx(statistics.fmean(twin.ttft_s), rel=0.15)


def test_memory_on_demand_preempts_and_everyone_is_served() -> None:
    asks = [Ask(100, 300)] * 8
    tight = replay(Linear(), asks, Engine(pool_tokens=1500), concurrency=8)
    assert len(tight.served) == 8
    assert tight.preemptions > 0
    assert tight.end_s > replay(Linear(), asks, Engine(), concurrency=8).end_s


def test_reserved_memory_never_preempts() -> None:
    asks = [Ask(100, 300)] * 8
    engine = Engine(pool_tokens=900, reserve_output=True)
    played = replay(Linear(), asks, engine, concurrency=8)
    assert played.preemptions == 0
    assert len(played.served) == 8
    waited = sorted(s.ttft_s for s in played.served)
    assert waited[-1] > 3  # two at a time fit: the last pair waits for three others


def test_a_request_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(UsageError, match="more KV"):
        replay(Linear(), [Ask(1000, 10)], Engine(pool_tokens=500), concurrency=1)
    with pytest.raises(UsageError, match="more KV"):
        replay(Linear(), [Ask(100, 1000)], Engine(pool_tokens=500), concurrency=1)


def test_recorded_time_is_all_of_it() -> None:
    spent = 0.0
    before = 0.0

    def record(now: float, k: int, n: int, context: int, chunks: Sequence[Shape]) -> None:
        nonlocal spent, before
        spent += now - before
        before = now
        assert k >= 1
        assert n > 0 or chunks

    played = replay(Linear(), [Ask(50, 20)] * 12, Engine(), concurrency=4, record=record)
    assert spent == pytest.approx(played.end_s)


def test_the_same_twice() -> None:
    asks = [Ask(50 + i, 20 + i % 7, 0, 0.01 * i) for i in range(60)]
    assert replay(Linear(), asks, Engine()) == replay(Linear(), asks, Engine())
