"""make_plan: verdicts, limits, remedies, cost, engines and derivations hang together."""

from __future__ import annotations

import time
from itertools import pairwise

import msgspec
import pytest

from hullspeed.errors import UsageError
from hullspeed.findings import Severity
from hullspeed.hardware.catalogue import gpus
from hullspeed.memory.budget import Term
from hullspeed.plan.case import Case
from hullspeed.plan.cost import given_managed, make_cost, managed_price
from hullspeed.plan.engines import FACTS, choose
from hullspeed.plan.plan import make_plan
from hullspeed.plan.remedies import find_remedies
from hullspeed.plan.workload import Workload
from hullspeed.units import GIB
from support.patience import calls_of

from .conftest import MakeCase

FP8 = "Qwen/Qwen3.6-27B-FP8"


def test_the_stack_adds_up_to_the_card(make_case: MakeCase) -> None:
    plan = make_plan(make_case(FP8, "h100-sxm", context=8192))
    total = sum(item.bytes for item in plan.stack.items)
    assert total + plan.stack.free_bytes == plan.stack.total_bytes
    assert total == pytest.approx(79.2 * GIB, rel=0.001)
    assert {item.term for item in plan.stack.items} == set(Term)


def test_capacity_falls_with_context_and_context_with_concurrency(make_case: MakeCase) -> None:
    capacity = make_plan(make_case(FP8, "h100-sxm", context=8192)).capacity
    served = [row.served for row in capacity.by_context]
    longest = [row.max_context_tokens for row in capacity.by_concurrency]
    assert served == sorted(served, reverse=True)
    assert longest == sorted(longest, reverse=True)
    for row in capacity.by_context:
        assert row.served <= row.engine <= row.divided + 1e-9


def test_the_longest_context_really_fits_and_one_block_more_does_not(make_case: MakeCase) -> None:
    plan = make_plan(make_case(FP8, "a40", context=8192, concurrency=1))
    longest = plan.capacity.by_concurrency[0].max_context_tokens
    fits = make_plan(make_case(FP8, "a40", context=longest, concurrency=1))
    assert fits.capacity.longest_served >= 1
    more = longest + 2 * plan.capacity.block_tokens
    assert make_plan(make_case(FP8, "a40", context=more, concurrency=1)).verdict == "does not fit"


def test_too_many_requests_says_how_many_run(make_case: MakeCase) -> None:
    plan = make_plan(make_case(FP8, "a40", context=32768, isl=32000, concurrency=64))
    assert plan.verdict == "too many requests"
    assert not plan.ok
    assert f"runs {plan.capacity.served} at once" in plan.summary
    assert plan.limit == "memory for sequences"
    finding = next(f for f in plan.findings if f.code == "PLAN002")
    assert finding.severity is Severity.ERROR
    assert plan.speed is not None
    assert plan.speed.concurrency == 64
    assert plan.speed.running == plan.capacity.served
    # 61 wait for answers of the 3 that run, which come at their rate.
    waits_s = 61 / plan.speed.requests_per_s
    assert 0.8 * waits_s < plan.speed.ttft_s.value < 1.3 * waits_s
    assert plan.speed.ttft_s.low < plan.speed.ttft_s.value < plan.speed.ttft_s.high


def test_where_memory_is_the_limit_the_wait_is_predicted(make_case: MakeCase) -> None:
    """Llama 70B FP8 on 2 x H100, 8,192/1,024: published TTFT is 1.28 s at 16 in flight and 59.2 s
    at 64. A formula without a queue says about a second for both.
    """
    plans = [
        make_plan(make_case("nvidia/Llama-3.1-70B-Instruct-FP8", "h100-sxm", isl=8192, osl=1024,
                            context=9216, concurrency=n, tp=2, kv_dtype="bf16",
                            memory_fraction=0.9))
        for n in (16, 64)
    ]  # fmt: skip
    free, queued = (plan.speed for plan in plans)
    assert free is not None
    assert queued is not None
    assert free.ttft_s.value < 2.0
    assert queued.ttft_s.low < 59.2 < queued.ttft_s.high
    assert queued.ttft_s.value > 40


def test_slots_that_never_run_take_no_memory(make_case: MakeCase) -> None:
    many = make_plan(make_case("Qwen/Qwen3-32B", "h100-sxm", isl=4000, osl=300, concurrency=1000))
    few = make_plan(make_case("Qwen/Qwen3-32B", "h100-sxm", isl=4000, osl=300, concurrency=16))
    assert many.capacity.served == few.capacity.served
    assert int(many.flags["--max-num-seqs"]) <= 32


def test_a_rate_beyond_what_is_completed_says_what_is(make_case: MakeCase) -> None:
    plan = make_plan(make_case("Qwen/Qwen3-32B", "h100-sxm", isl=4000, osl=300, rate=2.0))
    assert not plan.ok
    assert plan.speed is not None
    assert plan.speed.requests_per_s < 2
    assert f"completes {plan.speed.requests_per_s:.3g} requests/s" in plan.summary
    assert [f.code for f in plan.findings if f.severity is Severity.ERROR] == ["PLAN004"]
    # One that is completed is answered as arrivals, with room for more than the usual number.
    kept = make_plan(make_case("Qwen/Qwen3-32B", "h200-sxm", isl=4000, osl=300, rate=1.0))
    assert kept.ok
    assert kept.speed is not None
    assert kept.speed.output_tokens_per_s.value == pytest.approx(300)
    assert kept.speed.ttft_p99_s is not None
    assert kept.speed.ttft_s.value < kept.speed.ttft_p99_s.value


def test_weights_that_do_not_fit_have_no_speed_and_no_flags(make_case: MakeCase) -> None:
    plan = make_plan(make_case("Qwen/Qwen3-32B", "rtx 4090", context=2048))
    assert plan.verdict == "does not fit"
    assert plan.speed is None
    assert plan.cost is None
    assert plan.flags == {}
    assert plan.limit.startswith("memory")


def test_an_objective_is_met_or_missed_at_the_prediction(make_case: MakeCase) -> None:
    loose = make_plan(make_case(FP8, "h100-sxm", context=8192, ttft_s=60.0, tpot_s=1.0))
    assert loose.verdict == "fits"
    tight = make_plan(make_case(FP8, "h100-sxm", context=8192, tpot_s=0.001))
    assert tight.verdict == "misses objective"
    assert "TPOT" in tight.summary
    assert tight.limit.startswith("speed:")


def test_a_rate_becomes_requests_in_flight(make_case: MakeCase) -> None:
    slow = make_plan(make_case(FP8, "h100-sxm", isl=1000, osl=200, rate=0.5))
    fast = make_plan(make_case(FP8, "h100-sxm", isl=1000, osl=200, rate=3.0))
    assert slow.ok
    assert 1 <= slow.workload.concurrency < fast.workload.concurrency
    assert fast.speed is not None
    assert fast.speed.requests_per_s >= 3.0
    # Little's law: in flight = rate x time in the system.
    seconds = fast.speed.ttft_s.value + 199 * fast.speed.itl_s.value
    in_flight = fast.speed.requests_per_s * seconds
    assert fast.workload.concurrency == pytest.approx(in_flight, abs=1.5)  # a whole number


def test_a_rate_beyond_the_card_is_said(make_case: MakeCase) -> None:
    plan = make_plan(make_case(FP8, "a40", isl=4000, osl=200, rate=500.0))
    assert not plan.ok
    assert "PLAN004" in {finding.code for finding in plan.findings}


def test_remedies_keep_what_they_promise(make_case: MakeCase) -> None:
    """Each remedy's figures are those of a plan with that change made."""
    case = make_case("Qwen/Qwen3.6-27B", "h100-sxm", context=32768, isl=32000, concurrency=8,
                     max_num_seqs=8)  # fmt: skip
    remedies = {remedy.change: remedy for remedy in find_remedies(case)}
    assert {"FP8 weights", "FP8 KV cache", "2 GPUs"} <= remedies.keys()
    changed = make_plan(case.with_settings(kv_dtype="fp8"))
    assert remedies["FP8 KV cache"].served_after == changed.capacity.served
    assert remedies["FP8 KV cache"].flags == "--kv-cache-dtype fp8"
    two = make_plan(case.with_settings(tp=2))
    assert remedies["2 GPUs"].served_after == two.capacity.served
    before = make_plan(case)
    for remedy in remedies.values():
        assert remedy.served_before == before.capacity.served
        better = (
            remedy.served_after > remedy.served_before
            or remedy.longest_after > remedy.longest_before
            or remedy.output_after > remedy.output_before
        )
        assert better, remedy.change


def test_remedies_fit_the_case(make_case: MakeCase) -> None:
    dense = find_remedies(make_case("Qwen/Qwen3-32B", "h100-sxm", context=32768, concurrency=8))
    names = {remedy.change for remedy in dense}
    assert "16-bit recurrent state" not in names
    assert "text only" not in names
    fp8 = find_remedies(make_case(FP8, "h100-sxm", context=8192, concurrency=64))
    assert "FP8 weights" not in {remedy.change for remedy in fp8}
    mtp = find_remedies(
        make_case(FP8, "h100-sxm", context=8192, concurrency=64, draft_tokens=3), most=20
    )
    assert "no speculative tokens" in {remedy.change for remedy in mtp}


def test_at_short_context_state_matters_more_than_kv(make_case: MakeCase) -> None:
    """At 2k the state decides: halving it is worth more than halving the KV."""
    case = make_case("Qwen/Qwen3.6-27B", "h200", context=2048, isl=1800, osl=248, concurrency=400)
    by_name = {remedy.change: remedy for remedy in find_remedies(case, most=20)}
    state, kv = by_name["16-bit recurrent state"], by_name["FP8 KV cache"]
    assert state.served_after > kv.served_after > kv.served_before


def test_cost_by_hand() -> None:
    """$3.60 an hour, one request a second of 1,000 in and 100 out: 0.1 cents a request."""
    workload = Workload(
        context_tokens=1100, isl=1000, osl=100, requests_per_task=10, task_success=0.5
    )
    managed = given_managed(0.5, 5.0)
    cost = make_cost(
        workload, usd_per_hour=3.6, price_source="x", requests_per_s=1.0, managed=managed
    )
    full = cost.curve[-1]
    assert full.utilization == 1.0
    assert full.usd_per_m_output == pytest.approx(0.001 / 100 * 1e6)
    assert full.usd_per_m_total == pytest.approx(0.001 / 1100 * 1e6)
    assert full.usd_per_task == pytest.approx(0.001 * 10 / 0.5)
    # The same request there: 1,000 x 0.5 + 100 x 5 per million = 0.1 cents: break-even when full.
    assert cost.break_even_utilization == pytest.approx(1.0)
    assert cost.break_even_requests_per_day == pytest.approx(86_400)
    assert cost.managed_usd_per_task == pytest.approx(0.001 * 10 / 0.5)
    dearer = make_cost(
        workload, usd_per_hour=7.2, price_source="x", requests_per_s=1.0, managed=managed
    )
    assert dearer.break_even_utilization == pytest.approx(2.0)


def test_idle_gpus_cost_the_same_for_less(make_case: MakeCase) -> None:
    cost = make_plan(make_case(FP8, "h100-sxm", context=8192)).cost
    assert cost is not None
    prices = [row.usd_per_m_output for row in cost.curve]
    assert prices == sorted(prices, reverse=True)
    assert prices[0] == pytest.approx(100 * prices[-1])


def test_two_gpus_cost_twice(make_case: MakeCase) -> None:
    one = make_plan(make_case(FP8, "h100-sxm", context=8192)).cost
    two = make_plan(make_case(FP8, "h100-sxm", context=8192, tp=2)).cost
    assert one is not None
    assert two is not None
    assert two.usd_per_hour == pytest.approx(2 * one.usd_per_hour)


def test_the_managed_price_on_record_is_that_models_own() -> None:
    price = managed_price("Qwen/Qwen3.8-27B")
    assert price is not None
    assert (price.usd_per_m_input, price.usd_per_m_output) == (0.45, 3.20)
    assert managed_price("Qwen/Qwen3.6-27B") is None


@pytest.mark.parametrize("prices", [(-1.0, 1.0), (0.0, 0.0), (1.0, -1.0)])
def test_managed_prices_that_cannot_be(prices: tuple[float, float]) -> None:
    with pytest.raises(UsageError):
        given_managed(*prices)


def test_a_price_that_cannot_be(make_case: MakeCase) -> None:
    with pytest.raises(UsageError, match="price"):
        make_plan(make_case(FP8, "h100-sxm", context=8192), usd_per_hour=-2.0)


def best(*facts: str) -> str:
    return choose(frozenset(facts))[0].engine


def test_the_decision_table_follows_the_seeds() -> None:
    """Hardware gate first, then workload shape, then operations."""
    assert best("gpu", "nvidia", "dense", "concurrent") == "vllm"
    assert best("gpu", "nvidia", "dense", "concurrent", "shared_prefix") == "sglang"
    assert best("gpu", "nvidia", "dense", "concurrent", "shared_prefix", "structured") == "sglang"
    assert best("gpu", "nvidia", "dense", "single", "tight_latency") == "trtllm"
    assert best("no_gpu", "dense", "concurrent") == "hullspeed"
    ranked = choose(frozenset({"gpu", "nvidia", "dense", "single"}))
    assert {"transformers", "vllm"} == {choice.engine for choice in ranked[:2]}


def test_gates_rule_out_whatever_speaks_for_an_engine() -> None:
    facts = frozenset({"gpu", "nvidia", "hybrid", "dense", "concurrent", "tight_latency"})
    ranked = {choice.engine: choice for choice in choose(facts)}
    assert not ranked["trtllm"].possible
    assert not ranked["transformers"].possible
    assert not ranked["hullspeed"].possible
    order = [choice.possible for choice in choose(facts)]
    assert order == sorted(order, reverse=True)


def test_every_choice_says_why_and_what_would_change_it() -> None:
    for fact in FACTS:
        for choice in choose(frozenset({fact, "gpu", "concurrent"})):
            for reason in choice.reasons:
                assert len(reason.why) > 20
                assert len(reason.changes) > 10
    with pytest.raises(ValueError, match="no row can ask"):
        choose(frozenset({"weather"}))


def test_derivations_name_every_number_of_the_memory_side(make_case: MakeCase) -> None:
    plan = make_plan(make_case(FP8, "h100-sxm", context=32768, concurrency=2))
    names = [row.name for row in plan.derivation]
    for item in plan.stack.items:
        assert f"{item.term}: {item.name}" in names
    assert {"parameters", "KV of one token", "state of one sequence"} <= set(names)
    assert all(row.formula and row.source and row.value for row in plan.derivation)


def test_a_plan_is_plain_data(make_case: MakeCase) -> None:
    plan = make_plan(make_case(FP8, "a40", context=8192))
    data = msgspec.json.decode(msgspec.json.encode(plan))
    assert data["verdict"] == plan.verdict
    assert data["capacity"]["served"] == plan.capacity.served
    assert data["stack"]["items"][0]["term"] == "weights"


def test_the_same_case_gives_the_same_plan(make_case: MakeCase) -> None:
    case = make_case(FP8, "a40", context=8192)
    assert make_plan(case) == make_plan(case)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "transformers"])
def test_every_engine_plans_a_dense_model(make_case: MakeCase, engine: str) -> None:
    plan = make_plan(make_case("Qwen/Qwen3-8B", "l40s", engine, context=8192, concurrency=2))
    assert plan.ok, plan.summary
    assert plan.flags
    assert plan.speed is not None


@pytest.mark.parametrize("gpu", [g.name for g in gpus()])
def test_every_gpu_can_be_planned_for(make_case: MakeCase, gpu: str) -> None:
    plan = make_plan(make_case("Qwen/Qwen3-8B", gpu, context=4096, concurrency=1), advice=False)
    assert plan.ok, plan.summary
    assert plan.speed is not None
    assert 0.0005 < plan.speed.itl_s.value < 0.2


def test_more_bandwidth_is_never_slower(make_case: MakeCase) -> None:
    """Sorted by bandwidth, single-stream decode gets no slower (same formats, one card)."""
    cards = sorted((g for g in gpus() if g.memory_gib > 20), key=lambda g: g.bandwidth_bytes_per_s)
    itl = []
    for gpu in cards:
        plan = make_plan(
            make_case("Qwen/Qwen3-8B", gpu.name, context=2048, isl=1000, concurrency=1),
            advice=False,
        )
        assert plan.speed is not None
        itl.append(plan.speed.itl_s.value)
    # Reading hides multiplying but for its ends: a card with little arithmetic behind nearly the
    # same bandwidth (H20) may be a little slower.
    assert all(after <= before * 1.1 for before, after in pairwise(itl))


def sweep(make_case: MakeCase, n_gpus: int) -> list[Case]:
    return [
        make_case(FP8, gpu.name, context=context, concurrency=n)
        for gpu in gpus()[:n_gpus]
        for context in (4096, 16384, 32768)
        for n in (1, 4, 16, 64)
    ]


def test_a_sweep_takes_few_calls_a_case(make_case: MakeCase) -> None:
    """As many as a core makes in some milliseconds, however fast it is."""
    cases = sweep(make_case, 5)
    make_plan(cases[0], advice=False)
    calls = calls_of(lambda: [make_plan(case, advice=False) for case in cases])
    assert calls / len(cases) < 50_000


@pytest.mark.deep
def test_a_sweep_takes_milliseconds_a_case(make_case: MakeCase) -> None:
    """Bar: 10,000 configurations in 30 s of one core; 300 here, with room for a slow machine."""
    cases = sweep(make_case, 25)
    start = time.process_time()
    for case in cases:
        make_plan(case, advice=False)
    assert (time.process_time() - start) / len(cases) < 6e-3
