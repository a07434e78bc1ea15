"""ApiProcess: requests one after the other, on cores that steps need too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hullspeed.twin.api_process import ApiProcess

TIMES = st.floats(0.0, 1.0, allow_subnormal=False)


def test_a_request_alone_takes_its_time() -> None:
    api = ApiProcess(2e-3, 1e-3)
    api.send(1, 5.0)
    assert api.next_s() == pytest.approx(5.003)
    assert api.arrived(5.0029) == []
    assert api.arrived(api.next_s()) == [1]
    assert not api


def test_requests_at_once_come_one_after_the_other() -> None:
    api = ApiProcess(2e-3, 1e-3)
    for i in range(4):
        api.send(i, 0.0)
    arrivals = []
    while api:
        at_s = api.next_s()
        arrivals.append((api.arrived(at_s), round(at_s, 6)))
    assert arrivals == [([0], 0.003), ([1], 0.005), ([2], 0.007), ([3], 0.009)]


def test_a_step_beside_them_is_longer_by_their_work() -> None:
    api = ApiProcess(2e-3, 0.0)
    for i in range(3):
        api.send(i, 0.0)
    assert api.beside(0.0, 0.01) == pytest.approx(0.016)
    assert api.arrived(0.016) == [0, 1, 2]
    assert api.beside(0.016, 0.01) == pytest.approx(0.01)


def test_only_what_comes_before_its_end_makes_a_step_longer() -> None:
    api = ApiProcess(2e-3, 0.0)
    api.send(0, 0.005)
    api.send(1, 0.5)
    assert api.beside(0.0, 0.01) == pytest.approx(0.012)
    assert api.arrived(0.012) == [0]
    assert api.next_s() == pytest.approx(0.502)


def test_a_core_of_its_own_keeps_none_from_steps() -> None:
    api = ApiProcess(2e-3, 0.0, own_core=True)
    for i in range(3):
        api.send(i, 0.0)
    assert api.beside(0.0, 0.005) == pytest.approx(0.005)
    assert api.arrived(0.005) == [0, 1]
    assert api.arrived(0.006) == [2]


@given(
    sent_s=st.lists(TIMES, max_size=12),
    steps_s=st.lists(st.floats(1e-4, 0.3), max_size=12),
    work_s=st.floats(0.0, 0.2),
    rest_s=st.floats(0.0, 0.1),
)
def test_every_request_arrives_once_and_in_order_and_none_before_its_work(
    sent_s: list[float], steps_s: list[float], work_s: float, rest_s: float
) -> None:
    api = ApiProcess(work_s, rest_s)
    for i, at_s in enumerate(sorted(sent_s)):
        api.send(i, at_s)
    now_s, ids = 0.0, []
    for step_s in steps_s:
        took_s = api.beside(now_s, step_s)
        assert step_s - 1e-9 <= took_s <= step_s + len(sent_s) * work_s + 1e-9
        now_s += took_s
        ids += api.arrived(now_s)
    while api:
        now_s = max(now_s, api.next_s())
        ids += api.arrived(now_s)
    assert ids == list(range(len(sent_s)))
    last_s = max(sent_s, default=0.0)
    assert not sent_s or now_s >= last_s + work_s + rest_s - 1e-9
