"""Trust: whether a cell's numbers are about the server, and about the load that was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hullspeed.bench.load import Recording
from hullspeed.bench.metrics import (
    InFlight,
    distribution,
    in_flight_of,
    latency_of,
    longest_silence_s,
)
from hullspeed.bench.reply import Reply
from hullspeed.bench.result import Trust, Verdict
from hullspeed.bench.spec import BenchSpec
from hullspeed.bench.workload import Job

# Limits of what passes as the server's own doing.
_LAG_FLOOR_S = 0.001  # libuv's timers have this resolution
_LAG_SHARE_OF_TTFT = 0.05
_LAG_SHARE_OF_ITL = 0.5
_RATE_TOLERANCE = 0.02
_LENGTH_TOLERANCE = 0.02
_CACHED_FLOOR_TOKENS = 16  # one page of most engines
_CHAT_OVERHEAD_TOKENS = 128  # a template and its default system prompt
_WARM_HIT_RATE = 0.5

Reasons = list[tuple[Verdict, str]]


def judge(
    spec: BenchSpec, recording: Recording, replies: Sequence[Reply], *, concurrency: int | None,
    rate: float | None,
) -> Trust:  # fmt: skip
    """The trust block of one cell; ``replies`` in the order of ``recording.samples``."""
    jobs = [job for job, _ in recording.samples]
    in_flight = in_flight_of(replies)
    lag_s = distribution(recording.loop_lags_s).p99
    late_s = distribution(
        max(reply.exchange.sent_s - reply.exchange.intended_s, 0.0) for reply in replies
    ).p99
    rate_sent, gap_cv = _arrivals(replies)
    rate_scheduled = _rate(recording.offsets_s)
    overhead, expected = _overhead_tokens(spec, jobs, replies), _expected_cached(jobs)
    reasons: Reasons = [
        *_client_limits(replies, lag_s, late_s),
        *_load_limits(replies, in_flight, concurrency, rate_scheduled, rate_sent),
        *_cache_state(spec, jobs, replies),
        *_lengths(spec, jobs, replies),
    ]
    order = list(Verdict)
    return Trust(
        verdict=min((verdict for verdict, _ in reasons), key=order.index, default=Verdict.VALID),
        reasons=[reason for _, reason in reasons],
        notes=_notes(spec, replies, rate),
        loop_lag_p99_s=lag_s,
        schedule_lag_p99_s=late_s,
        rate_asked=rate,
        rate_scheduled=rate_scheduled,
        rate_sent=rate_sent,
        gap_cv=gap_cv,
        in_flight_asked=concurrency,
        in_flight_max=in_flight.peak,
        in_flight_mean=in_flight.mean,
        prompt_tokens_asked=None if spec.turns > 1 else spec.isl_tokens,
        output_tokens_asked=spec.osl_tokens if spec.exact_osl else None,
        overhead_tokens=overhead,
        cached_tokens_expected=expected,
        token_counts=dict(Counter(reply.counts for reply in replies if reply.chunks)),
        longest_silence_s=longest_silence_s(replies),
    )


def _rate(times_s: Sequence[float] | None) -> float | None:
    """Events per second over their own span."""
    if times_s is None or len(times_s) < 2 or times_s[-1] == times_s[0]:
        return None
    return (len(times_s) - 1) / (times_s[-1] - times_s[0])


def _arrivals(replies: Sequence[Reply]) -> tuple[float, float]:
    """Rate of the sends, and coefficient of variation of the gaps between them."""
    times_s = sorted(reply.exchange.sent_s for reply in replies if reply.exchange.sent_s)
    gaps_s = np.diff(times_s)
    mean_s = float(gaps_s.mean()) if gaps_s.size else 0.0
    return _rate(times_s) or 0.0, float(gaps_s.std()) / mean_s if mean_s else 0.0


def _client_limits(replies: Sequence[Reply], lag_s: float, late_s: float) -> Reasons:
    latencies = [latency_of(reply) for reply in replies if not reply.failure]
    if not latencies:
        return []
    ttft_s = distribution(latency.ttft_s for latency in latencies).p50
    itl_s = distribution(gap for latency in latencies for gap in latency.itl_s).p50
    reasons: Reasons = []
    for what, seen_s, limit_s in (
        ("event loop woke up", lag_s, _LAG_SHARE_OF_TTFT * ttft_s),
        ("requests left", late_s, _LAG_SHARE_OF_TTFT * ttft_s),
        ("event loop woke up", lag_s, _LAG_SHARE_OF_ITL * itl_s if itl_s else float("inf")),
    ):
        if seen_s > max(limit_s, _LAG_FLOOR_S):
            reasons.append((
                Verdict.CLIENT_LIMITED,
                f"the generator's {what} {seen_s * 1e3:.1f} ms late (p99), more than "
                f"{max(limit_s, _LAG_FLOOR_S) * 1e3:.1f} ms",
            ))  # fmt: skip
    return reasons


def _load_limits(
    replies: Sequence[Reply], in_flight: InFlight, concurrency: int | None,
    rate_scheduled: float | None, rate_sent: float,
) -> Reasons:  # fmt: skip
    reasons: Reasons = []
    if rate_scheduled is not None and abs(rate_sent / rate_scheduled - 1) > _RATE_TOLERANCE:
        reasons.append((
            Verdict.CLIENT_LIMITED,
            f"asked for {rate_scheduled:.4g} requests/s, sent {rate_sent:.4g}",
        ))  # fmt: skip
    asked = min(concurrency or 0, len(replies))
    if in_flight.peak < asked:
        reasons.append((
            Verdict.CLIENT_LIMITED,
            f"asked for {asked} requests in flight, there were at most {in_flight.peak}",
        ))  # fmt: skip
    return reasons


def _overhead(spec: BenchSpec, job: Job, reply: Reply) -> int:
    """Prompt tokens beyond the prompt written: the chat template's."""
    if spec.api != "chat" or reply.prompt_tokens is None or job.prompt_tokens is None:
        return 0
    return max(reply.prompt_tokens - job.prompt_tokens, 0)


def _overhead_tokens(spec: BenchSpec, jobs: Sequence[Job], replies: Sequence[Reply]) -> float:
    pairs = zip(jobs, replies, strict=True)
    return distribution(_overhead(spec, job, reply) for job, reply in pairs).mean


def _expected_cached(jobs: Sequence[Job]) -> float:
    return distribution(job.repeated_tokens for job in jobs).mean


def _cache_state(spec: BenchSpec, jobs: Sequence[Job], replies: Sequence[Reply]) -> Reasons:
    """Cold must not read what it did not write; cached must."""
    known = [
        (job, reply, reply.cached_tokens)
        for job, reply in zip(jobs, replies, strict=True)
        if reply.cached_tokens is not None and reply.prompt_tokens
    ]
    if not known:
        return []
    prompt_tokens = sum(reply.prompt_tokens or 0 for _, reply, _ in known)
    if spec.cache == "cached":
        hit_rate = sum(cached for _, _, cached in known) / prompt_tokens
        if hit_rate >= _WARM_HIT_RATE:
            return []
        return [(Verdict.CONTAMINATED, f"asked for a warm cache, the hit rate was {hit_rate:.0%}")]
    excess = sum(
        cached - job.repeated_tokens - _overhead(spec, job, reply) for job, reply, cached in known
    )
    allowed = max(_CACHED_FLOOR_TOKENS * len(known), _LENGTH_TOLERANCE * prompt_tokens)
    if excess <= allowed:
        return []
    return [(
        Verdict.CONTAMINATED,
        f"the server read {excess / len(known):.0f} prompt tokens per request from its cache that "
        "this load did not send before",
    )]  # fmt: skip


def _lengths(spec: BenchSpec, jobs: Sequence[Job], replies: Sequence[Reply]) -> Reasons:
    reasons: Reasons = []
    short = sum(reply.failure == "length" for reply in replies)
    if short:
        reasons.append((
            Verdict.NOT_COMPARABLE,
            f"{short} of {len(replies)} answers are not {spec.osl_tokens} tokens long "
            "(ignore_eos or min_tokens not honoured?)",
        ))  # fmt: skip
    answered = [reply for reply in replies if reply.chunks]
    if any(reply.output_tokens is None for reply in answered):
        reasons.append((Verdict.NOT_COMPARABLE, "no usage: chunks were counted as tokens"))
    lengths = [
        (job.prompt_tokens, reply.prompt_tokens)
        for job, reply in zip(jobs, replies, strict=True)
        if job.prompt_tokens is not None and reply.prompt_tokens is not None
    ]
    asked, got = distribution(n for n, _ in lengths).mean, distribution(n for _, n in lengths).mean
    above = _LENGTH_TOLERANCE * asked + (_CHAT_OVERHEAD_TOKENS if spec.api == "chat" else 0)
    if lengths and not -_LENGTH_TOLERANCE * asked <= got - asked <= above:
        reasons.append((
            Verdict.NOT_COMPARABLE,
            f"prompts have {got:.0f} tokens on average, {asked:.0f} were asked for",
        ))  # fmt: skip
    return reasons


def _notes(spec: BenchSpec, replies: Sequence[Reply], rate: float | None) -> list[str]:
    notes = []
    objective = spec.objective
    if objective.given and rate is None:
        notes.append("closed loop: a stall delays the requests behind it unseen; --rate shows it")
    if objective.tpot_s is not None and objective.ttft_s is None:
        notes.append("without --ttft the tokens have no deadlines: --tpot judges the mean alone")
    if any(reply.chunks for reply in replies) and all(
        reply.cached_tokens is None for reply in replies
    ):
        notes.append("the server does not report cached_tokens: the cache state is unproven")
    if any(reply.counts == "length" for reply in replies):
        notes.append("chunks carry several tokens; ITL shares them out by text length")
    return notes
