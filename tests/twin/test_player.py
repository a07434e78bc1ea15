"""The player against the production engine loop, and against times added up by hand."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.perf.work import Shape
from hullspeed.twin.agents import AgentLoad, agent_sessions
from hullspeed.twin.closed_loop import TwinEngine, simulate
from hullspeed.twin.engine import EngineModel
from hullspeed.twin.generate import closed_loop
from hullspeed.twin.lengths import Lengths
from hullspeed.twin.load import Load
from hullspeed.twin.player import play
from hullspeed.twin.scheduler import Policy
from hullspeed.twin.workload import Part, Session, Turn, Workload


class PerToken:
    """1 ms a step, 1 ms a token, 1 us for each token before it: sums by hand."""

    def seconds(self, shapes: Sequence[Shape]) -> float:
        tokens = sum(shape.n_tokens for shape in shapes)
        return 1e-3 + 1e-3 * tokens + 1e-6 * sum(shape.context_tokens for shape in shapes)


ENGINE = EngineModel(
    n_pages=512, page_tokens=16, step_tokens=128, max_running=16, max_context_tokens=4096
)


def fixed(isl: int, osl: int, requests: int, concurrency: int, warm_up: int = 0) -> Workload:
    return closed_loop(
        Lengths(tokens=isl),
        Lengths(tokens=osl),
        requests=requests,
        concurrency=concurrency,
        warm_up=warm_up,
    )


def without_checkpoints(workload: Workload) -> Workload:
    """As ``Load`` sends its requests."""
    sessions = tuple(
        Session(turns=tuple(msgspec.structs.replace(turn, checkpoints=()) for turn in s.turns))
        for s in workload.sessions
    )
    return msgspec.structs.replace(workload, sessions=sessions)


@settings(max_examples=40, deadline=None)
@given(
    isl=st.integers(1, 300),
    osl=st.integers(1, 60),
    requests=st.integers(1, 20),
    concurrency=st.integers(1, 8),
    n_pages=st.integers(24, 120),
    slots=st.sampled_from([0, 40]),
    cache=st.sampled_from(["segment", "none"]),
)
def test_it_is_the_engine_loop_but_faster(
    isl: int, osl: int, requests: int, concurrency: int, n_pages: int, slots: int, cache: str
) -> None:
    """Every latency of the run through ``core.EngineLoop``, preemptions included."""
    if isl + osl > n_pages * 16:
        isl, osl = min(isl, 300), 1
    if isl + osl > n_pages * 16:
        return
    slow = simulate(
        TwinEngine(
            vocab=10**9, max_context_tokens=4096, n_pages=n_pages, page_tokens=16,
            step_tokens=128, max_running=16, state_slots=slots, cache=cache,
        ),
        PerToken(),
        Load(isl_tokens=isl, osl_tokens=osl, requests=requests, concurrency=concurrency),
    )  # fmt: skip
    engine = msgspec.structs.replace(ENGINE, n_pages=n_pages, state_slots=slots, cache=cache)
    fast = play(engine, PerToken(), without_checkpoints(fixed(isl, osl, requests, concurrency)))
    assert sorted(fast.ttft_s()) == pytest.approx(sorted(slow.ttft_s))
    assert sorted(fast.tpot_s()) == pytest.approx(sorted(slow.tpot_s))
    assert sorted(fast.itl_s()) == pytest.approx(sorted(slow.itl_s))
    assert fast.duration_s == pytest.approx(slow.duration_s)
    assert (fast.steps, fast.preemptions) == (slow.steps, slow.preemptions)
    assert (fast.prompt_tokens, fast.output_tokens) == (slow.prompt_tokens, slow.output_tokens)


@settings(max_examples=25, deadline=None)
@given(
    isl=st.integers(1, 300),
    osl=st.integers(1, 40),
    concurrency=st.integers(1, 8),
    work_s=st.sampled_from([0.0, 0.0004, 0.03]),
    own_core=st.booleans(),
    interrupted_every_s=st.sampled_from([0.05, float("inf")]),
)
def test_the_api_process_and_others_take_what_they_take_in_the_engine_loop(
    isl: int, osl: int, concurrency: int, work_s: float, own_core: bool, interrupted_every_s: float
) -> None:
    host = {
        "request_s": 0.01 + work_s, "request_work_s": work_s, "own_core": own_core,
        "stream_token_s": 1e-4, "interrupted_every_s": interrupted_every_s, "interrupted_s": 0.007,
    }  # fmt: skip
    slow = simulate(
        TwinEngine(
            vocab=10**9, max_context_tokens=4096, n_pages=512, page_tokens=16, step_tokens=128,
            max_running=16, **host,  # type: ignore[arg-type]
        ),
        PerToken(),
        Load(isl_tokens=isl, osl_tokens=osl, requests=12, concurrency=concurrency),
    )  # fmt: skip
    engine = msgspec.structs.replace(ENGINE, **host)
    fast = play(engine, PerToken(), without_checkpoints(fixed(isl, osl, 12, concurrency)))
    assert sorted(fast.ttft_s()) == pytest.approx(sorted(slow.ttft_s))
    assert sorted(fast.itl_s()) == pytest.approx(sorted(slow.itl_s))
    assert fast.duration_s == pytest.approx(slow.duration_s)


def test_one_request_by_hand() -> None:
    """100 prompt tokens in one step, then nine steps over 100, 101, ... tokens."""
    played = play(ENGINE, PerToken(), fixed(100, 10, 1, 1), paranoid=True)
    assert played.ttft_s() == pytest.approx([0.101])
    assert played.itl_s() == pytest.approx([0.002 + 1e-6 * (100 + i) for i in range(9)])
    assert played.busy_s == pytest.approx(played.duration_s)


def test_warm_up_is_not_counted() -> None:
    played = play(ENGINE, PerToken(), fixed(50, 5, 6, 2, warm_up=3))
    assert len(played.served) == 6
    assert played.duration_s < played.busy_s


def turn(content: int, isl: int, osl: int = 4, wait_s: float = 0.0, *more: Part) -> Turn:
    return Turn(
        prompt=(*more, Part(content, isl)), osl_tokens=osl, answer=content + 1000, wait_s=wait_s
    )


def test_an_open_loop_keeps_its_times() -> None:
    sessions = tuple(Session(turns=(turn(i + 1, 10, 2),), at_s=10.0 * i) for i in range(3))
    played = play(ENGINE, PerToken(), Workload(name="", sessions=sessions))
    assert [request.sent_s for request in played.served] == [0.0, 10.0, 20.0]
    assert played.ttft_s() == pytest.approx([0.011] * 3)


def test_a_session_waits_for_the_answer_and_then_thinks() -> None:
    first = turn(1, 32, 4)
    second = turn(9, 16, 4, 5.0, Part(1, 32), Part(1001, 4))
    played = play(ENGINE, PerToken(), Workload(name="", sessions=(Session(turns=(first, second)),)))
    one, two = played.served
    assert two.sent_s == pytest.approx(one.token_s[-1] + 5.0)
    # Prompt and answer of the first turn, but for the last answer token, which was not computed.
    assert two.cached_tokens == 35


def test_what_can_never_fit_is_refused_and_its_session_ends_there() -> None:
    engine = msgspec.structs.replace(ENGINE, n_pages=4)
    sessions = (Session(turns=(turn(1, 200), turn(2, 10))), Session(turns=(turn(3, 10),)))
    played = play(engine, PerToken(), Workload(name="", sessions=sessions, concurrency=1))
    assert (played.refused, len(played.served)) == (1, 1)


def test_no_evict_reserves_the_whole_length() -> None:
    """Eight requests of 64 + 192 tokens on 32 pages of 16: two at a time, none preempted."""
    engine = msgspec.structs.replace(ENGINE, n_pages=32)
    on_demand = play(engine, PerToken(), fixed(64, 192, 8, 8), paranoid=True)
    policy = Policy(reserve="whole")
    whole = play(
        msgspec.structs.replace(engine, policy=policy), PerToken(), fixed(64, 192, 8, 8),
        paranoid=True,
    )  # fmt: skip
    assert on_demand.preemptions > 0
    assert whole.preemptions == 0
    assert max(moment.running for moment in whole.timeline) <= 2


def test_prefill_first_lets_decodes_wait() -> None:
    """While the second prompt's three chunks are computed, the first request gets no token."""
    sessions = (
        Session(turns=(turn(1, 16, 40),)),
        Session(turns=(turn(2, 384, 2),), at_s=0.02),
    )
    workload = Workload(name="", sessions=sessions)
    mixed = play(ENGINE, PerToken(), workload, paranoid=True)
    first = msgspec.structs.replace(ENGINE, policy=Policy(order="prefill_first"))
    alone = play(first, PerToken(), workload, paranoid=True)
    assert alone.itl_s().max() > 3 * 0.128
    assert mixed.itl_s().max() < 2 * 0.130
    assert min(r.ttft_s for r in alone.served) <= min(r.ttft_s for r in mixed.served)
    assert alone.output_tokens == mixed.output_tokens == 42


@pytest.mark.parametrize("reserve", ["page", "none", "ratio", "whole"])
@pytest.mark.parametrize("order", ["mixed", "prefill_first"])
def test_every_policy_keeps_every_invariant(reserve: str, order: str) -> None:
    policy = msgspec.convert({"reserve": reserve, "order": order, "ratio": 0.7}, Policy)
    for slots in (0, 40):
        engine = msgspec.structs.replace(ENGINE, n_pages=60, policy=policy, state_slots=slots)
        played = play(engine, PerToken(), fixed(120, 60, 25, 9), paranoid=True)
        assert played.output_tokens == 25 * 60


def test_a_long_run_has_a_short_timeline() -> None:
    played = play(ENGINE, PerToken(), fixed(20, 60, 400, 1))
    assert 100 < len(played.timeline) <= 257
    times = np.array([moment.at_s for moment in played.timeline])
    assert (np.diff(times) > 0).all()
    assert times[-1] > 0.9 * played.duration_s


def test_the_same_seed_gives_the_same_run() -> None:
    load = AgentLoad(sessions=12, over_s=20.0, think_s=1.0, seed=3, system_tokens=(100, 300))
    engine = msgspec.structs.replace(ENGINE, n_pages=6000, max_context_tokens=100_000)
    first, again = (play(engine, PerToken(), agent_sessions(load)) for _ in range(2))
    assert first.timeline == again.timeline
    assert (first.itl_s() == again.itl_s()).all()
    other = play(engine, PerToken(), agent_sessions(msgspec.structs.replace(load, seed=4)))
    assert other.duration_s != first.duration_s
