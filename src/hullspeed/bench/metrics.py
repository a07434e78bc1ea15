"""Metrics of a recorded load. Definitions are those of :class:`hullspeed.bench.result.Cell`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hullspeed.bench.reply import Chunk, Reply
from hullspeed.bench.result import Distribution, Goodput
from hullspeed.bench.spec import Objective

_Z_95 = 1.959963985  # two-sided 95 % quantile of the normal distribution
_STEADY_SHARE = 0.9  # of the asked requests in flight
_STEADY_MIN_SHARE = 0.2  # of the cell's time


def distribution(values: Iterable[float]) -> Distribution:
    """Mean and percentiles (linear interpolation between order statistics)."""
    sample = np.fromiter(values, dtype=np.float64)
    if not sample.size:
        return Distribution()
    p50, p90, p99 = np.percentile(sample, (50, 90, 99))
    return Distribution(
        int(sample.size), float(sample.mean()), float(p50), float(p90), float(p99),
        float(sample.max()),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of one successful request, in seconds.

    Attributes:
        ttfot_s: None when only reasoning arrived.
        tpot_s: None when all tokens came in the first chunk.
    """

    ttft_s: float
    ttfot_s: float | None
    tpot_s: float | None
    e2e_s: float
    chunk_gaps_s: list[float]
    itl_s: list[float]

    @property
    def max_gap_s(self) -> float | None:
        """Longest silence between two chunks; None with a single chunk."""
        return max(self.chunk_gaps_s, default=None)


def latency_of(reply: Reply) -> Latency:
    """Latencies of ``reply``, which must hold at least one chunk."""
    chunks, start_s = reply.chunks, reply.exchange.intended_s
    first, last = chunks[0], chunks[-1]
    later_tokens = reply.tokens - first.tokens
    gaps = [now.at_s - before.at_s for before, now in itertools.pairwise(chunks)]
    return Latency(
        ttft_s=first.at_s - start_s,
        ttfot_s=next((chunk.at_s - start_s for chunk in chunks if chunk.is_answer), None),
        tpot_s=(last.at_s - first.at_s) / later_tokens if later_tokens > 0 else None,
        e2e_s=reply.exchange.end_s - start_s,
        chunk_gaps_s=gaps,
        itl_s=token_gaps(chunks),
    )


def token_gaps(chunks: Sequence[Chunk]) -> list[float]:
    """Time between tokens: a gap before k tokens counts as k gaps of a k-th.

    The first chunk has no gap before it; a chunk without a whole token lends its time to the next.
    """
    gaps: list[float] = []
    since_s = chunks[0].at_s
    for chunk in chunks[1:]:
        if chunk.tokens > 0:
            gaps.extend([(chunk.at_s - since_s) / chunk.tokens] * chunk.tokens)
            since_s = chunk.at_s
    return gaps


def wilson(good: int, total: int) -> tuple[float, float]:
    """95 % Wilson score interval of a share (E. B. Wilson, JASA 22, 1927)."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = good / total, _Z_95**2
    centre = share + z2 / (2 * total)
    spread = _Z_95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    scale = 1 + z2 / total
    return max((centre - spread) / scale, 0.0), min((centre + spread) / scale, 1.0)


def goodput(replies: Sequence[Reply], objective: Objective, duration_s: float) -> Goodput:
    """Judge every request; failures are misses."""
    good = sum(not reply.failure and _is_good(reply, objective) for reply in replies)
    by_means = sum(not reply.failure and _is_good_by_means(reply, objective) for reply in replies)
    total = len(replies)
    low, high = wilson(good, total)
    share = good / total if total else 0.0
    return Goodput(
        good=good,
        total=total,
        share=share,
        low=low,
        high=high,
        good_per_s=good / duration_s if duration_s > 0 else 0.0,
        share_by_means=by_means / total if total else 0.0,
        held=total > 0 and share >= objective.attainment,
    )


def _within(value_s: float | None, limit_s: float | None) -> bool:
    return limit_s is None or value_s is None or value_s <= limit_s


def _is_good_by_means(reply: Reply, objective: Objective) -> bool:
    latency = latency_of(reply)
    return _within(latency.ttft_s, objective.ttft_s) and _within(latency.tpot_s, objective.tpot_s)


def _is_good(reply: Reply, objective: Objective) -> bool:
    latency = latency_of(reply)
    itl_p99_s = float(np.percentile(latency.itl_s, 99)) if latency.itl_s else None
    return (
        _is_good_by_means(reply, objective)
        and _within(itl_p99_s, objective.itl_s)
        and _within(latency.max_gap_s, objective.max_gap_s)
        and _keeps_deadlines(reply, objective)
    )


def _keeps_deadlines(reply: Reply, objective: Objective) -> bool:
    """Whether token i arrived by TTFT limit + i * TPOT limit, for every i."""
    if objective.ttft_s is None or objective.tpot_s is None:
        return True
    due_s = reply.exchange.intended_s + objective.ttft_s
    for chunk in reply.chunks:
        if chunk.at_s > due_s:
            return False
        due_s += chunk.tokens * objective.tpot_s
    return True


@dataclass(frozen=True, slots=True)
class InFlight:
    """Requests under way over time: ``counts[i]`` of them from ``times_s[i]`` on."""

    times_s: list[float]
    counts: list[int]

    @classmethod
    def of(cls, spans_s: Iterable[tuple[float, float]]) -> InFlight:
        """From (start, end) of every request."""
        changes: Counter[float] = Counter()
        for start_s, end_s in spans_s:
            changes[start_s] += 1
            changes[end_s] -= 1
        times_s = sorted(changes)
        return cls(times_s, np.cumsum([changes[at_s] for at_s in times_s]).tolist())

    @property
    def peak(self) -> int:
        """The most at once."""
        return max(self.counts, default=0)

    @property
    def mean(self) -> float:
        """Mean over the time in which there was any."""
        lengths = np.diff(self.times_s)
        counts = np.array(self.counts[:-1])
        busy_s = float(lengths[counts > 0].sum()) if lengths.size else 0.0
        return float((lengths * counts).sum()) / busy_s if busy_s else 0.0

    def spans_with(self, at_least: float) -> list[tuple[float, float]]:
        """The time spans with at least so many requests under way."""
        steps = zip(self.times_s, self.times_s[1:], self.counts, strict=False)
        return [(start_s, end_s) for start_s, end_s, count in steps if count >= at_least]


def in_flight_of(replies: Iterable[Reply]) -> InFlight:
    """Requests under way, from the write to the last byte."""
    exchanges = (reply.exchange for reply in replies)
    return InFlight.of((sent.sent_s, sent.end_s) for sent in exchanges if sent.sent_s)


def steady_rate(replies: Sequence[Reply], in_flight: InFlight, asked: int) -> float | None:
    """Output tokens per second, credited when received, while the load was complete.

    None when it was complete for under a fifth of the time: then there was no steady state.
    """
    spans = in_flight.spans_with(_STEADY_SHARE * asked)
    steady_s = sum(end_s - start_s for start_s, end_s in spans)
    if not spans or steady_s < _STEADY_MIN_SHARE * (in_flight.times_s[-1] - in_flight.times_s[0]):
        return None
    times_s = np.array([chunk.at_s for reply in replies for chunk in reply.chunks])
    tokens = np.array([chunk.tokens for reply in replies for chunk in reply.chunks])
    edges = np.array(spans)
    span = np.searchsorted(edges[:, 0], times_s, side="left") - 1
    inside = (span >= 0) & (times_s <= edges[np.maximum(span, 0), 1])
    return float(tokens[inside].sum()) / steady_s


def longest_silence_s(replies: Sequence[Reply]) -> float:
    """Longest time without a byte on any stream while a started one was not finished."""
    marks: list[tuple[float, int]] = []
    for reply in replies:
        pieces = reply.exchange.pieces
        if pieces:
            marks.append((pieces[0][0], 1))
            marks.extend((at_s, 0) for at_s, _ in pieces[1:])
            marks.append((reply.exchange.end_s, -1))
    marks.sort()
    longest_s, streams, before_s = 0.0, 0, 0.0
    for at_s, change in marks:
        if streams:
            longest_s = max(longest_s, at_s - before_s)
        streams, before_s = streams + change, at_s
    return longest_s
