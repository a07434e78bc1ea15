from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hullspeed.text.stops import StopStrings

LETTERS = st.text("ab.", max_size=30)
STOPS = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What is shown of ``text``: cut where the first stop string becomes complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def feed(chunks: list[str], stops: list[str], armed_from: int = 0) -> tuple[list[str], str | None]:
    watch, shown = StopStrings(stops), []
    for i, chunk in enumerate(chunks):
        match = watch.push(chunk, armed=i >= armed_from)
        shown.append(match.text)
        if match.stop is not None:
            return shown, match.stop
    return [*shown, watch.finish()], None


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_the_outcome_does_not_depend_on_the_chunks(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    chunks = [text[a:b] for a, b in pairwise(edges)]
    shown, stop = feed(chunks, stops)
    assert ("".join(shown), stop) == expected(text, stops)


@given(text=LETTERS, stops=STOPS)
def test_text_is_held_back_only_while_it_may_begin_a_stop(text: str, stops: list[str]) -> None:
    watch, shown = StopStrings(stops), ""
    for i, char in enumerate(text):
        match = watch.push(char)
        shown += match.text
        if match.stop is not None:
            return
        held = text[len(shown) : i + 1]
        assert text.startswith(shown)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_to_stop_at_passes_everything() -> None:
    watch = StopStrings([])
    assert watch.push("anything") == ("anything", None)
    assert watch.finish() == ""


def test_unarmed_stops_are_ignored_for_good() -> None:
    assert feed(["a.", "b", "c."], ["."], armed_from=1) == (["a.", "b", "c"], ".")
    assert feed(["a.", "b"], ["."], armed_from=2)[1] is None


def test_a_stop_that_begins_unarmed_and_ends_armed_counts_whole() -> None:
    assert feed(["xEN", "D"], ["END"], armed_from=1) == (["x", ""], "END")


def test_the_longer_of_two_that_end_together_wins() -> None:
    assert feed(["hello\n\n"], ["\n\n", "o\n\n"]) == (["hell"], "o\n\n")
