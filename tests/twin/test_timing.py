from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hullspeed.perf.work import Shape
from hullspeed.twin.timing import StepTimer, alike


class Linear:
    """Linear in each context, with everything else as it likes."""

    calls = 0

    def seconds(self, shapes: Sequence[Shape]) -> float:
        self.calls += 1
        context = sum(shape.context_tokens for shape in shapes)
        tokens = sum(shape.n_tokens for shape in shapes)
        return 1e-3 + 2e-5 * max(len(shapes), 12) + 1e-4 * math.sqrt(tokens) + 3e-9 * context


class Batch(Linear):
    def batch_seconds(self, n_decode: int, context_tokens: int, chunks: Sequence[Shape]) -> float:
        return 7.0 + n_decode


@given(contexts=st.lists(st.integers(0, 300_000), min_size=1, max_size=40))
def test_decodes_known_by_number_and_total_cost_what_they_cost_one_by_one(
    contexts: list[int],
) -> None:
    cost = Linear()
    timer = StepTimer(cost)
    exact = cost.seconds([Shape(1, context) for context in contexts])
    assert timer.seconds(len(contexts), sum(contexts), []) == pytest.approx(exact, rel=1e-9)
    chunk = Shape(100, 50, False)
    exact = cost.seconds([*(Shape(1, context) for context in contexts), chunk])
    assert timer.seconds(len(contexts), sum(contexts), [chunk]) == pytest.approx(exact, rel=1e-9)


@given(n=st.integers(0, 50), total=st.integers(0, 10**6))
def test_alike_sums_to_the_total(n: int, total: int) -> None:
    shapes = alike(n, total)
    assert len(shapes) == n
    if n:
        assert sum(shape.context_tokens for shape in shapes) == total


def test_decode_steps_are_remembered() -> None:
    cost = Linear()
    timer = StepTimer(cost, stream_token_s=0.5)
    assert timer.seconds(4, 4 * 1000, []) == pytest.approx(cost.seconds(alike(4, 4000)) + 2.0)
    before = cost.calls
    for context in range(1000, 1020):
        timer.seconds(4, 4 * context, [])
    assert cost.calls == before


def test_a_cost_model_that_takes_batches_is_given_batches() -> None:
    timer = StepTimer(Batch())
    assert timer.seconds(3, 300, [Shape(10, 0)]) == 10.0
