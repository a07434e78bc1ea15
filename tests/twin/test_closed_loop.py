"""The twin: the production scheduler on a virtual clock, with step times we can add up by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

from hullspeed.errors import CapacityError, ContextOverflowError, HullspeedError, UsageError
from hullspeed.perf.work import Shape
from hullspeed.twin.closed_loop import TwinEngine, simulate
from hullspeed.twin.load import Load, Prompts
from hullspeed.twin.outcome import percentile, percentiles
from support.patience import calls_of


class PerToken:
    """1 ms a step and 1 ms a token: sums by hand."""

    def seconds(self, shapes: Sequence[Shape]) -> float:
        return 1e-3 + 1e-3 * sum(shape.n_tokens for shape in shapes)


ENGINE = TwinEngine(
    vocab=1000,
    max_context_tokens=4096,
    n_pages=512,
    page_tokens=16,
    step_tokens=128,
    max_running=16,
)


def test_one_request_by_hand() -> None:
    """100 prompt tokens in one step of 101 ms, then nine steps of 2 ms."""
    outcome = simulate(
        ENGINE, PerToken(), Load(isl_tokens=100, osl_tokens=10, requests=1), paranoid=True
    )
    assert outcome.ttft_s == pytest.approx([0.101])
    assert outcome.itl_s == pytest.approx([0.002] * 9)
    assert outcome.duration_s == pytest.approx(0.101 + 9 * 0.002)
    assert (outcome.requests, outcome.output_tokens, outcome.steps) == (1, 10, 10)
    assert outcome.output_tokens_per_s == pytest.approx(10 / outcome.duration_s)


def test_chunks_follow_the_token_budget() -> None:
    """300 tokens in steps of 128, 128 and 44."""
    outcome = simulate(ENGINE, PerToken(), Load(isl_tokens=300, osl_tokens=1, requests=1))
    assert outcome.ttft_s == pytest.approx([0.129 + 0.129 + 0.045])
    assert outcome.steps == 3


def test_overheads_are_added_where_they_arise() -> None:
    engine = msgspec.structs.replace(ENGINE, request_s=0.5, stream_token_s=0.01)
    outcome = simulate(engine, PerToken(), Load(isl_tokens=100, osl_tokens=3, requests=1))
    assert outcome.ttft_s == pytest.approx([0.5 + 0.101 + 0.01])
    assert outcome.itl_s == pytest.approx([0.012, 0.012])


def test_closed_loop_keeps_its_number_in_flight() -> None:
    """Four at a time: the last of eight is sent when the fourth is done, not before."""
    load = Load(isl_tokens=10, osl_tokens=5, requests=8, concurrency=4)
    outcome = simulate(ENGINE, PerToken(), load, paranoid=True)
    assert outcome.requests == 8
    # Two waves of 4 x 10 prompt tokens in one step and 4 steps of 4 tokens.
    wave = 0.041 + 4 * 0.005
    assert outcome.duration_s == pytest.approx(2 * wave)


def test_open_loop_does_not_wait_for_answers() -> None:
    load = Load(
        isl_tokens=100, osl_tokens=1, requests=5, concurrency=0, rate=100.0, arrival="constant"
    )
    outcome = simulate(ENGINE, PerToken(), load)
    # One every 10 ms against 101 ms each: every request waits longer than the one before.
    assert outcome.ttft_s == sorted(outcome.ttft_s)
    assert outcome.ttft_s[-1] > 0.3


def test_poisson_gaps_have_the_rate_and_the_spread_of_poisson() -> None:
    load = Load(isl_tokens=1, osl_tokens=1, requests=4000, concurrency=0, rate=50.0)
    times = list(Prompts(load, 100).arrivals())
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    cv = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps)) / mean
    assert times[0] == 0
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert cv == pytest.approx(1.0, abs=0.1)


def test_a_shared_prefix_is_found_by_those_who_come_later() -> None:
    load = Load(isl_tokens=128, osl_tokens=2, requests=6, concurrency=1, shared_prefix_tokens=96)
    outcome = simulate(ENGINE, PerToken(), load, paranoid=True)
    assert outcome.ttft_s[0] == pytest.approx(0.129)
    assert outcome.ttft_s[1:] == pytest.approx([0.033] * 5)
    assert outcome.hit_rate == pytest.approx(5 * 96 / (6 * 128))


def test_a_repeated_prompt_is_warm_from_the_first_measured_request() -> None:
    load = Load(isl_tokens=128, osl_tokens=2, requests=4, concurrency=2, cache="cached")
    outcome = simulate(ENGINE, PerToken(), load, paranoid=True)
    # All but the last token, which is always computed.
    assert outcome.cached_tokens == 4 * 127
    assert max(outcome.ttft_s) == pytest.approx(1e-3 + 2e-3)
    cold = simulate(ENGINE, PerToken(), msgspec.structs.replace(load, cache="cold"))
    assert min(cold.ttft_s) > 10 * max(outcome.ttft_s)


def test_conversations_carry_what_was_said() -> None:
    load = Load(
        isl_tokens=64, osl_tokens=16, concurrency=2, conversations=3, turns=4, turn_tokens=16
    )
    outcome = simulate(ENGINE, PerToken(), load, paranoid=True)
    assert outcome.requests == 12
    # Turn t has 64 + t x (16 said + 16 new) tokens.
    assert outcome.prompt_tokens == 3 * sum(64 + 32 * t for t in range(4))
    # Later turns find all of the earlier ones but the last token's page remainder.
    assert outcome.hit_rate > 0.55


@pytest.mark.parametrize("cache", ["segment", "hash", "none"])
def test_the_same_seed_gives_the_same_run_and_another_does_not(cache: str) -> None:
    engine = msgspec.structs.replace(ENGINE, cache=cache, n_pages=60)
    load = Load(
        isl_tokens=120, osl_tokens=20, requests=40, concurrency=0, rate=20.0,
        shared_prefix_tokens=40, seed=7,
    )  # fmt: skip
    first, again = (simulate(engine, PerToken(), load, paranoid=True) for _ in range(2))
    assert first == again
    other = simulate(engine, PerToken(), msgspec.structs.replace(load, seed=8))
    assert other != first
    assert other.output_tokens == first.output_tokens


def test_memory_that_runs_out_shows_as_preemption_not_as_loss() -> None:
    engine = msgspec.structs.replace(ENGINE, n_pages=20)
    load = Load(isl_tokens=60, osl_tokens=80, requests=12, concurrency=6)
    outcome = simulate(engine, PerToken(), load, paranoid=True)
    assert outcome.requests == 12
    assert outcome.output_tokens == 12 * 80
    roomy = simulate(ENGINE, PerToken(), load)
    assert outcome.duration_s > roomy.duration_s


def test_recurrent_state_is_scheduled_too() -> None:
    engine = msgspec.structs.replace(ENGINE, state_slots=40)
    load = Load(isl_tokens=100, osl_tokens=8, requests=10, concurrency=4)
    outcome = simulate(engine, PerToken(), load, paranoid=True)
    assert outcome.requests == 10


def test_what_cannot_fit_is_said_as_the_engine_says_it() -> None:
    engine = msgspec.structs.replace(ENGINE, n_pages=4)
    with pytest.raises((CapacityError, ContextOverflowError)):
        simulate(engine, PerToken(), Load(isl_tokens=100, osl_tokens=10, requests=1))
    with pytest.raises(ContextOverflowError):
        simulate(ENGINE, PerToken(), Load(isl_tokens=4090, osl_tokens=10, requests=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"isl_tokens": 0},
        {"osl_tokens": -1},
        {"requests": 0},
        {"concurrency": 0},
        {"rate": 1.0},
        {"shared_prefix_tokens": 11},
        {"conversations": 2, "cache": "cached"},
    ],
)
def test_loads_that_cannot_be(wrong: dict[str, object]) -> None:
    load = msgspec.convert({"isl_tokens": 10, "osl_tokens": 2} | wrong, Load)
    with pytest.raises(UsageError) as caught:
        simulate(ENGINE, PerToken(), load)
    assert isinstance(caught.value, HullspeedError)


def test_percentiles_are_those_of_numpy() -> None:
    import numpy as np

    values = [5.0, 1.0, 9.0, 2.5, 2.5, 100.0, 0.1]
    for share in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))
    assert math.isnan(percentile([], 0.5))
    assert list(percentiles(values)) == ["p50", "p90", "p99"]


def test_goodput_counts_requests_that_met_both_limits() -> None:
    load = Load(isl_tokens=100, osl_tokens=4, requests=8, concurrency=4)
    outcome = simulate(ENGINE, PerToken(), load)
    everything = outcome.goodput(None, None)
    assert everything == pytest.approx(outcome.requests_per_s)
    assert outcome.goodput(1e-6, None) == 0
    median = percentile(outcome.ttft_s, 0.5)
    assert 0 < outcome.goodput(median, None) < everything


def test_a_request_costs_the_same_in_a_long_load_and_takes_few_calls() -> None:
    calls = []
    for requests in (500, 1000):
        load = Load(isl_tokens=200, osl_tokens=20, requests=requests, concurrency=16)
        outcomes = []
        calls.append(calls_of(lambda: outcomes.append(simulate(ENGINE, PerToken(), load))))  # noqa: B023
        assert outcomes[0].requests == requests
    assert calls[1] < 2.2 * calls[0]
    assert calls[1] / 1000 < 4_000
