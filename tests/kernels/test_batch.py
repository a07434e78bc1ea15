"""Packing spans, and what a batch may not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hullspeed.errors import EngineError
from hullspeed.kernels.batch import Batch, SpanInput

BATCH = Batch.of(
    [
        SpanInput([7], 70, [4, 2], sample=True),
        SpanInput([1, 2, 3], 15, [9], sample=False),
        SpanInput([5, 6], 0, [3], sample=True),
    ]
)


def check(batch: Batch) -> None:
    batch.check(vocab=10, n_pages=10, page_tokens=64, context_tokens=100)


def test_spans_are_packed_one_after_the_other() -> None:
    assert BATCH.tokens.tolist() == [7, 1, 2, 3, 5, 6]
    assert BATCH.positions.tolist() == [70, 15, 16, 17, 0, 1]
    assert BATCH.span_starts.tolist() == [0, 1, 4, 6]
    assert BATCH.page_table.tolist() == [[4, 2], [9, 0], [3, 0]]
    assert BATCH.logits_rows.tolist() == [0, 5]
    check(BATCH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.array([7, 1, 2, 3, 5, 10])}, "token id"),
        ({"tokens": np.array([7, 1, 2])}, "cover"),
        ({"positions": np.array([70, 15, 16, 18, 0, 1], np.int32)}, "follow"),
        ({"positions": np.array([100, 15, 16, 17, 0, 1], np.int32)}, "position"),
        ({"positions": np.array([70], np.int32)}, "another size"),
        ({"span_starts": np.array([0, 1, 1, 6], np.int32)}, "cover"),
        ({"page_table": np.array([[4, 12], [9, 0], [3, 0]], np.int32)}, "page"),
        ({"page_table": np.array([[4], [9], [3]], np.int32)}, "beyond the page table"),
        ({"logits_rows": np.array([6])}, "logits row"),
    ],
)
def test_what_would_reach_outside_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check(replace(BATCH, **change))


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(EngineError, match="cover"):
        check(Batch.of([]))


def test_padding_may_be_anything() -> None:
    check(replace(BATCH, page_table=np.array([[4, 2], [9, 99], [3, -1]], np.int32)))
