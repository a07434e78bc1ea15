from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hullspeed.runtime.token_counts import TokenCounts


@given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=5), st.integers(0, 10))
def test_counts_are_those_of_a_counter(parts: list[list[int]], start: int) -> None:
    counts, tokens = TokenCounts(), []
    for part in parts:
        tokens += part
        counts.extend(tokens, start)
        want = Counter(tokens[start:])
        assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == want
        assert len(counts) == len(want)
