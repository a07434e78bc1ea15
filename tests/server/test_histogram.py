from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from hullspeed.server.histogram import Histogram, one_two_five

BOUNDS = (0.5, 1.0, 2.0)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0, 1.5, 2.0, 9.0])))
def test_counts_as_prometheus_client_does(values: list[float]) -> None:
    registry = CollectorRegistry()
    reference = Reference("x", "x", buckets=BOUNDS, registry=registry)
    ours = Histogram(BOUNDS)
    for value in values:
        ours.observe(value)
        reference.observe(value)
    expected = [
        (sample.labels["le"], sample.value)
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "x_bucket"
    ]
    assert ours.cumulative() == expected
    assert ours.total == sum(values)


def test_times_is_repetition() -> None:
    one, other = Histogram(BOUNDS), Histogram(BOUNDS)
    one.observe(0.25, 3)
    for _ in range(3):
        other.observe(0.25)
    assert (one.cumulative(), one.total) == (other.cumulative(), other.total)


def test_one_two_five() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(300) == (1, 2, 5, 10, 20, 50, 100, 200, 300)
    assert one_two_five(1) == (1,)
