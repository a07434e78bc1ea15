"""BenchSpec: what to measure. Plain data, so that a result can carry what reproduces it."""

from __future__ import annotations

from typing import Literal

import msgspec

from hullspeed.errors import UsageError

Api = Literal["completions", "chat"]
Arrival = Literal["poisson", "constant"]
CacheState = Literal["cold", "cached"]


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """Limits a request must keep to be good; None is no limit. A failed request is never good.

    Attributes:
        ttft_s: Time to first token, from the intended start.
        tpot_s: Mean time per output token after the first. With ``ttft_s`` it also sets a deadline
            for every token: token i is due ``ttft_s + i * tpot_s`` after the intended start, so
            that a freeze inside a long answer counts.
        itl_s: 99th percentile of the request's own inter-token latencies.
        max_gap_s: Longest silence between two chunks.
        attainment: Share of requests that must be good. 0.9 is DistServe's (arXiv 2401.09670).
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    max_gap_s: float | None = None
    attainment: float = 0.9

    @property
    def given(self) -> bool:
        """Whether there is any limit."""
        limits = (self.ttft_s, self.tpot_s, self.itl_s, self.max_gap_s)
        return any(limit is not None for limit in limits)


class BenchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark: a workload, and the loads under which it is measured.

    Attributes:
        url: Endpoint, with or without ``/v1``.
        model: Name to ask for; the first of ``/v1/models`` unless given.
        isl_tokens: Prompt length (of the first turn, with conversations), shared prefix included.
        osl_tokens: Output length.
        exact_osl: Ask for exactly ``osl_tokens`` (``ignore_eos`` and ``min_tokens``) and count any
            other length as a failure.
        concurrency: Closed-loop cells: requests in flight.
        rates: Open-loop cells: requests per second.
        arrival: Gaps of the open loop: exponential (``poisson``) or equal (``constant``).
        requests: Requests of a cell; ``max(16, 4 * concurrency)`` or 10 s worth unless given.
        shared_prefix_tokens: First tokens that all prompts of a cell share.
        cache: ``cold``: every prompt is new after the shared prefix. ``cached``: one prompt, sent
            once before the measurement and repeated.
        conversations: With ``turns``: agent load of so many conversations, each taking its turns
            one after the other; replaces ``requests``. The closed loop runs ``concurrency`` of them
            at a time.
        turn_tokens: New prompt tokens of every turn after the first.
        seed: Prompts and arrivals are drawn from it; a fresh one per run unless given, since the
            same prompts twice would be answered from the prefix cache.
        warmup: Requests sent before the first cell and not counted.
    """

    url: str
    model: str | None = None
    api: Api = "completions"
    isl_tokens: int = 512
    osl_tokens: int = 64
    exact_osl: bool = True
    temperature: float = 0.0
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    arrival: Arrival = "poisson"
    requests: int | None = None
    shared_prefix_tokens: int = 0
    cache: CacheState = "cold"
    conversations: int = 0
    turns: int = 1
    turn_tokens: int = 128
    objective: Objective = Objective()
    api_key: str | None = None
    seed: int | None = None
    warmup: int = 1
    timeout_s: float = 600.0

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            UsageError: naming the field.
        """
        objective = self.objective
        limits = (objective.ttft_s, objective.tpot_s, objective.itl_s, objective.max_gap_s)
        rules: tuple[tuple[bool, str, object], ...] = (
            (self.isl_tokens < 1, "--isl must be at least 1", self.isl_tokens),
            (self.osl_tokens < 1, "--osl must be at least 1", self.osl_tokens),
            (
                not 0 <= self.shared_prefix_tokens <= self.isl_tokens,
                "--shared-prefix must lie between 0 and --isl",
                self.shared_prefix_tokens,
            ),
            (any(n < 1 for n in self.concurrency), "--concurrency must be >= 1", self.concurrency),
            (any(not 0 < r < 1e6 for r in self.rates), "--rate must be above 0", self.rates),
            (self.requests is not None and self.requests < 1, "--requests must be >= 1",
             self.requests),
            (self.conversations < 0, "--conversations must be >= 0", self.conversations),
            (self.turns < 1, "--turns must be >= 1", self.turns),
            (self.turns > 1 and not self.conversations, "--turns needs --conversations",
             self.turns),
            (bool(self.conversations and self.rates),
             "conversations run closed loop: a turn waits for the one before", self.rates),
            (bool(self.conversations) and self.cache == "cached",
             "--cached repeats one prompt; conversations grow theirs", self.cache),
            (self.turn_tokens < 1, "--turn-tokens must be >= 1", self.turn_tokens),
            (self.warmup < 0, "--warmup must be >= 0", self.warmup),
            (not self.timeout_s > 0, "--timeout must be above 0", self.timeout_s),
            (any(limit is not None and not limit > 0 for limit in limits),
             "an objective must be above 0 s", limits),
            (not 0 < objective.attainment <= 1, "--attainment is a share in (0, 1]",
             objective.attainment),
        )  # fmt: skip
        for broken, what, seen in rules:
            if broken:
                raise UsageError(what, seen=seen, fix="see `hullspeed bench --help`")
