from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hullspeed.bench.http1 import Exchange
from hullspeed.bench.load import arrival_offsets
from hullspeed.bench.metrics import (
    InFlight,
    distribution,
    longest_silence_s,
    steady_rate,
    token_gaps,
    wilson,
)
from hullspeed.bench.reply import Chunk, Reply, read_reply


def chunks(*times_and_tokens: tuple[float, int]) -> list[Chunk]:
    return [Chunk(at_s, "x" * tokens, True, tokens) for at_s, tokens in times_and_tokens]


def test_token_gaps_share_a_chunk_among_its_tokens() -> None:
    assert token_gaps(chunks((1.0, 1), (1.4, 4), (1.5, 1))) == pytest.approx([0.1] * 5)


def test_a_chunk_without_a_whole_token_lends_its_time() -> None:
    assert token_gaps(chunks((0.0, 1), (0.1, 0), (0.3, 1))) == pytest.approx([0.3])


@given(st.lists(st.tuples(st.floats(0.001, 1), st.integers(1, 5)), min_size=2, max_size=30))
def test_token_gaps_keep_time_and_count(steps: list[tuple[float, int]]) -> None:
    at_s, made = 0.0, []
    for gap_s, tokens in steps:
        at_s += gap_s
        made.append((at_s, tokens))
    gaps = token_gaps(chunks(*made))
    assert sum(gaps) == pytest.approx(made[-1][0] - made[0][0])
    assert len(gaps) == sum(tokens for _, tokens in made[1:])


def test_wilson_against_published_values() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81/263, 15/148, 0/20, 1/29
    for good, total, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(good, total) == pytest.approx((low, high), abs=5e-5)


def test_percentiles_match_the_standard_library() -> None:
    sample = [random.Random(1).random() for _ in range(101)]
    cuts = statistics.quantiles(sample, n=100, method="inclusive")
    found = distribution(sample)
    assert (found.p50, found.p90, found.p99) == pytest.approx((cuts[49], cuts[89], cuts[98]))
    assert distribution([]).count == 0


def test_in_flight() -> None:
    found = InFlight.of([(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (10.0, 11.0)])
    assert found.peak == 2
    assert found.mean == pytest.approx((4 + 1 + 1 + 1) / 5)
    assert found.spans_with(2) == [(1.0, 2.0), (2.0, 3.0)] or found.spans_with(2) == [(1.0, 3.0)]


def reply_at(start_s: float, end_s: float, *times_and_tokens: tuple[float, int]) -> Reply:
    pieces = [(at_s, b"x") for at_s, _ in times_and_tokens]
    exchange = Exchange(start_s, start_s, start_s, end_s, 200, pieces=pieces)
    return Reply(exchange, chunks(*times_and_tokens))


def test_steady_rate_credits_tokens_when_received() -> None:
    # two requests in flight from 1 to 3; only the tokens received in between count
    replies = [reply_at(0, 3, (0.5, 10), (2.0, 3)), reply_at(1, 4, (2.5, 5), (3.5, 7))]
    in_flight = InFlight.of((r.exchange.sent_s, r.exchange.end_s) for r in replies)
    assert steady_rate(replies, in_flight, 2) == pytest.approx((3 + 5) / 2)
    assert steady_rate(replies, in_flight, 3) is None


def test_silence_counts_only_while_a_started_stream_is_open() -> None:
    replies = [reply_at(0, 2, (1.0, 1), (2.0, 1)), reply_at(0, 9.5, (9.0, 1), (9.5, 1))]
    assert longest_silence_s(replies) == pytest.approx(1.0)
    both = [reply_at(0, 9, (1.0, 1), (9.0, 1)), reply_at(0, 4, (3.0, 1), (4.0, 1))]
    assert longest_silence_s(both) == pytest.approx(5.0)


def test_constant_arrivals_do_not_drift() -> None:
    offsets_s = arrival_offsets(10_001, 30.0, "constant", random.Random(0))
    assert offsets_s[-1] == pytest.approx(10_000 / 30, rel=1e-12)


def test_poisson_arrivals_are_exponential() -> None:
    offsets_s = arrival_offsets(20_001, 50.0, "poisson", random.Random(0))
    gaps_s = [b - a for a, b in itertools.pairwise(offsets_s)]
    assert statistics.mean(gaps_s) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps_s) / statistics.mean(gaps_s) == pytest.approx(1, rel=0.03)
    below_mean = sum(gap_s < 1 / 50 for gap_s in gaps_s) / len(gaps_s)
    assert below_mean == pytest.approx(0.632, abs=0.02)


def stream(*events: str) -> Exchange:
    exchange = Exchange(0.0, status=200)
    exchange.pieces = [(float(i), f"data: {event}\n\n".encode()) for i, event in enumerate(events)]
    return exchange


def test_tool_calls_are_tokens() -> None:
    delta = '{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{}"}}]},'
    reply = read_reply(
        stream(delta + '"finish_reason":"tool_calls"}]}', "[DONE]"), asked_tokens=None
    )
    assert reply.failure == ""
    assert reply.tokens == 1
    assert reply.counts == "chunks"


@pytest.mark.parametrize("event", ["{", "[]", '"x"', '{"error": "x"}'])
def test_events_that_are_no_completion_are_errors(event: str) -> None:
    assert read_reply(stream(event, "[DONE]"), asked_tokens=None).failure == "error_event"


def test_two_done_events_are_a_failure() -> None:
    good = '{"choices":[{"text":"a","finish_reason":"stop"}]}'
    assert read_reply(stream(good, "[DONE]", "[DONE]"), asked_tokens=None).failure == "many_done"
