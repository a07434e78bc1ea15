from __future__ import annotations

import math
import random
from itertools import islice, pairwise

import pytest

from hullspeed.errors import UsageError
from hullspeed.twin.agents import AgentLoad, agent_sessions
from hullspeed.twin.arrivals import Arrivals
from hullspeed.twin.generate import closed_loop, open_loop
from hullspeed.twin.lengths import Lengths


def gaps(arrivals: Arrivals, n: int = 20_000) -> list[float]:
    times = list(islice(arrivals.times(random.Random(1)), n))
    assert times[0] == 0.0
    return [b - a for a, b in pairwise(times)]


def variation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)) / mean


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (Arrivals(rate=50.0), 1.0),
        (Arrivals(rate=50.0, kind="constant"), 0.0),
        (Arrivals(rate=50.0, kind="gamma", cv=3.0), 3.0),
        (Arrivals(rate=50.0, kind="gamma", cv=0.5), 0.5),
    ],
)
def test_gaps_have_the_rate_and_the_spread_that_was_asked_for(
    arrivals: Arrivals, cv: float
) -> None:
    found = gaps(arrivals)
    assert sum(found) / len(found) == pytest.approx(1 / 50, rel=0.06)
    assert variation(found) == pytest.approx(cv, abs=0.12)


def test_a_ramp_ends_at_its_end_rate() -> None:
    times = list(
        islice(
            Arrivals(rate=10, kind="ramp", end_rate=100, over_s=50).times(random.Random(2)), 8000
        )
    )
    assert sum(t < 50 for t in times) == pytest.approx(50 * 55, rel=0.1)
    after = [t for t in times if t > 50]
    assert len(after) / (after[-1] - 50) == pytest.approx(100, rel=0.1)


def test_lengths() -> None:
    rng = random.Random(0)
    uniform = [Lengths(tokens=1000, kind="uniform", range_ratio=0.8).draw(rng) for _ in range(4000)]
    assert (min(uniform), max(uniform)) == (800, 1000)
    drawn = sorted(Lengths(tokens=500, kind="lognormal", sigma=0.7).draw(rng) for _ in range(4001))
    assert drawn[2000] == pytest.approx(500, rel=0.06)
    assert drawn[-1] > 3000
    cut = Lengths(tokens=500, kind="lognormal", sigma=2.0, most=600)
    assert max(cut.draw(rng) for _ in range(500)) == 600


def test_shared_prefixes_are_shared_and_the_rest_is_not() -> None:
    workload = closed_loop(
        Lengths(tokens=100), Lengths(tokens=8), requests=40, concurrency=4, warm_up=2,
        shared_tokens=60, n_shared=3,
    )  # fmt: skip
    turns = [session.turns[0] for session in workload.sessions]
    assert [t.measured for t in turns[:3]] == [False, False, True]
    assert {t.prompt[0].content for t in turns} == {1, 2, 3}
    assert all(t.isl_tokens == 100 == len(t.tokens()) for t in turns)
    assert len({t.prompt[1].content for t in turns}) == len(turns) == 42


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: Arrivals(rate=-1.0).check(), "rate"),
        (lambda: Arrivals(rate=math.nan).check(), "rate"),
        (lambda: Arrivals(rate=1.0, kind="ramp").check(), "ramp"),
        (lambda: Arrivals(rate=1.0, kind="gamma", cv=0.0).check(), "variation"),
        (lambda: Lengths(tokens=0).check("--isl"), "--isl"),
        (lambda: Lengths(tokens=5, range_ratio=0.0).check("--isl"), "range ratio"),
        (lambda: agent_sessions(AgentLoad(sessions=0)), "sessions"),
        (lambda: agent_sessions(AgentLoad(turns=(5, 2))), "turns"),
        (lambda: agent_sessions(AgentLoad(think_s=-1.0)), "think_s"),
        (
            lambda: closed_loop(Lengths(tokens=5), Lengths(tokens=5), requests=3, concurrency=0),
            "concurrency",
        ),
        (
            lambda: open_loop(
                Lengths(tokens=5), Lengths(tokens=5), Arrivals(rate=1), requests=1, shared_tokens=5
            ),
            "shared prefix",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: object, wrong: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=wrong):
        make()


def test_agents_carry_what_was_said_and_drop_what_was_thought() -> None:
    workload = agent_sessions(AgentLoad(sessions=30, seed=5))
    for session in workload.sessions:
        system = session.turns[0].prompt[0]
        for before, after in pairwise(session.turns):
            # All of the earlier prompt but its generation tail, then answer and new message.
            assert after.prompt[: len(before.prompt) - 1] == before.prompt[:-1]
            assert all(part.content != before.answer for part in after.prompt)
            assert before.checkpoints == (system.n_tokens, before.isl_tokens - 5)
    kept = agent_sessions(AgentLoad(sessions=30, seed=5, strip_thinking=False))
    for session in kept.sessions:
        for before, after in pairwise(session.turns):
            assert after.prompt[: len(before.prompt)] == before.prompt
            answer = after.prompt[len(before.prompt)]
            assert answer == (before.answer, before.osl_tokens)


def test_the_agent_trace_is_the_one_of_the_field_report() -> None:
    """About 1,516 requests of 160 sessions, 15.5 M prompt tokens, system prompts of 3-9k."""
    workload = agent_sessions(AgentLoad())
    prompts = [t.isl_tokens for s in workload.sessions for t in s.turns]
    assert len(prompts) == pytest.approx(1516, rel=0.05)
    assert sum(prompts) == pytest.approx(15.5e6, rel=0.1)
    systems = {s.turns[0].prompt[0].n_tokens for s in workload.sessions}
    assert (min(systems), max(systems), len(systems)) == (3000, 9000, 4)
