"""BenchResult: what was measured, and whether to believe it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hullspeed.bench.spec import BenchSpec


class Distribution(msgspec.Struct, frozen=True):
    """Percentiles of a sample; all zero when ``count`` is zero."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Verdict(StrEnum):
    """Whether a cell's numbers say something about the server, worst first."""

    CONTAMINATED = "contaminated"
    NOT_COMPARABLE = "not comparable"
    CLIENT_LIMITED = "client-limited"
    VALID = "valid"


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence behind the numbers.

    Attributes:
        loop_lag_p99_s: How late the generator's own event loop woke up.
        schedule_lag_p99_s: How late requests were sent against the intended time.
        rate_asked, rate_scheduled, rate_sent: Requests per second of an open loop: nominal, of the
            drawn arrivals, and of the actual sends.
        gap_cv: Coefficient of variation of the gaps between sends: 0 for a constant rate, about 1
            for Poisson arrivals.
        in_flight_asked, in_flight_max, in_flight_mean: Requests under way at once.
        prompt_tokens_asked, output_tokens_asked: None when they vary by design.
        overhead_tokens: Prompt tokens the server counted beyond the prompt asked for (a chat
            template).
        cached_tokens_expected: Mean prompt tokens that the workload itself repeats.
        token_counts: How tokens were attributed to chunks, by number of requests.
        longest_silence_s: Longest time without a byte on any stream while one was open.
        reasons: One sentence for each thing that makes the verdict other than valid.
        notes: Worth knowing, without touching the verdict.
    """

    verdict: Verdict
    reasons: list[str]
    notes: list[str]
    loop_lag_p99_s: float
    schedule_lag_p99_s: float
    rate_asked: float | None
    rate_scheduled: float | None
    rate_sent: float
    gap_cv: float
    in_flight_asked: int | None
    in_flight_max: int
    in_flight_mean: float
    prompt_tokens_asked: int | None
    output_tokens_asked: int | None
    overhead_tokens: float
    cached_tokens_expected: float
    token_counts: dict[str, int]
    longest_silence_s: float


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests kept the objective; failed requests are misses.

    Attributes:
        share, low, high: Share of good requests and its 95 % Wilson interval.
        good_per_s: Good requests per second.
        share_by_means: The share when each request is judged by TTFT and mean TPOT alone, as most
            tools do; the difference is what freezes hide.
        held: Whether ``share`` reached the attainment asked for.
    """

    good: int
    total: int
    share: float
    low: float
    high: float
    good_per_s: float
    share_by_means: float
    held: bool


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One load, measured. Latencies are seconds and of successful requests only.

    Attributes:
        load: ``closed 8`` or ``poisson 4/s``: always says which loop it was.
        failures: Failed requests by kind.
        ttft_s: Intended start to first token of any channel (closed loop: start is the send).
        ttfot_s: Intended start to first token of the answer (differs for reasoning models).
        itl_s: Time between tokens, each token weighing the same; the first token has none.
        chunk_gap_s: Time between chunks, however many tokens each carries.
        tpot_s: Per request: time from the first chunk to the last, over the tokens after it.
        max_gap_s: Per request: longest silence between two chunks.
        turn_ttft_s: Conversations only: TTFT by turn.
        output_tok_s: Output tokens received per second of the whole cell, when received.
        steady_output_tok_s: The same while at least 90 % of the asked requests were in flight;
            None when that was under a fifth of the cell.
        prompt_tokens, output_tokens, cached_tokens: Achieved, by the server's usage.
        hit_rate: Cached over prompt tokens; None when the server does not say.
    """

    load: str
    requests: int
    ok: int
    failures: dict[str, int]
    first_error: str
    interrupted: bool
    duration_s: float
    ttft_s: Distribution
    ttfot_s: Distribution
    itl_s: Distribution
    chunk_gap_s: Distribution
    tpot_s: Distribution
    max_gap_s: Distribution
    e2e_s: Distribution
    turn_ttft_s: list[Distribution]
    output_tok_s: float
    steady_output_tok_s: float | None
    requests_per_s: float
    prompt_tokens: Distribution
    output_tokens: Distribution
    cached_tokens: Distribution | None
    hit_rate: float | None
    goodput: Goodput | None
    trust: Trust


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Every cell of a run, with what reproduces it.

    Attributes:
        spec: As asked, with model and seed filled in and the API key removed.
        prompt_tokens_by: ``endpoint`` when ``/tokenize`` counted the prompts, ``caller`` when the
            caller of :func:`run` did, else ``estimate``.
        decoding: The decoding settings every request carried.
        started_at: UTC, ISO 8601.
    """

    spec: BenchSpec
    version: str
    started_at: str
    prompt_tokens_by: str
    decoding: dict[str, object]
    cells: list[Cell]

    @property
    def held(self) -> bool:
        """Whether every cell kept the objective (True without one)."""
        return all(cell.goodput is None or cell.goodput.held for cell in self.cells)
