"""The steady state, against a scheduler that plays it and against its own limits."""

from __future__ import annotations

import pytest

from hullspeed.errors import UsageError
from hullspeed.hardware.ceilings import Ceilings
from hullspeed.perf.steady import prefill_seconds, steady_state
from hullspeed.perf.step import StepCost
from hullspeed.perf.work import Shape
from hullspeed.twin.closed_loop import TwinEngine, simulate
from hullspeed.twin.load import Load

from .conftest import dense_arch


@pytest.fixture
def cost(ceilings: Ceilings) -> StepCost:
    return StepCost(dense_arch(), ceilings)


def test_alone_it_is_prefill_then_decode(cost: StepCost) -> None:
    steady = steady_state(cost, isl=256, osl=10, concurrency=1, step_tokens=128)
    assert steady.ttft_s == pytest.approx(prefill_seconds(cost, 256, 0, 128))
    assert steady.itl_s == pytest.approx(cost.seconds([Shape(1, 261)]), rel=0.15)
    assert steady.ttft_settled_s == steady.ttft_burst_s


def test_chunks_add_up_to_the_prompt(cost: StepCost) -> None:
    whole = cost.seconds([Shape(256, 0)])
    assert prefill_seconds(cost, 256, 0, 256) == pytest.approx(whole)
    assert prefill_seconds(cost, 256, 0, 100) > whole * 0.9
    assert prefill_seconds(cost, 256, 255, 100) < 0.1 * whole


@pytest.mark.parametrize("concurrency", [1, 4, 16])
@pytest.mark.parametrize(("isl", "osl"), [(200, 50), (50, 200), (500, 20)])
def test_throughput_agrees_with_the_scheduler(
    cost: StepCost, concurrency: int, isl: int, osl: int
) -> None:
    steady = steady_state(cost, isl=isl, osl=osl, concurrency=concurrency, step_tokens=256)
    engine = TwinEngine(
        vocab=1000, max_context_tokens=1000, n_pages=1000, step_tokens=256, cache="none"
    )
    load = Load(isl_tokens=isl, osl_tokens=osl, concurrency=concurrency, requests=8 * concurrency)
    played = simulate(engine, cost, load)
    assert steady.output_tokens_per_s == pytest.approx(played.output_tokens_per_s, rel=0.12)
    mean_ttft = sum(played.ttft_s) / len(played.ttft_s)
    assert 0.8 * steady.ttft_settled_s <= mean_ttft <= 1.25 * steady.ttft_burst_s


def test_one_output_token_is_all_prompts_in_a_row(cost: StepCost) -> None:
    steady = steady_state(cost, isl=128, osl=1, concurrency=4)
    assert steady.itl_s == 0
    assert steady.ttft_s == pytest.approx(4 * prefill_seconds(cost, 128, 0, 2048), rel=0.05)


def test_a_cached_prefix_saves_its_prefill(cost: StepCost) -> None:
    cold = steady_state(cost, isl=512, osl=16, concurrency=4)
    warm = steady_state(cost, isl=512, osl=16, concurrency=4, cached_tokens=448)
    assert warm.ttft_s < 0.3 * cold.ttft_s
    assert warm.output_tokens_per_s > cold.output_tokens_per_s


@pytest.mark.parametrize(
    "wrong",
    [
        {"isl": 0},
        {"osl": 0},
        {"concurrency": 0},
        {"cached_tokens": 10},
        {"cached_tokens": -1},
    ],
)
def test_sizes_that_cannot_be(cost: StepCost, wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        steady_state(cost, **({"isl": 10, "osl": 10, "concurrency": 1} | wrong))
