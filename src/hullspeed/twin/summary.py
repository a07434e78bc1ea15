"""Summary: one simulation in the numbers that people compare."""

from __future__ import annotations

import msgspec
import numpy as np

from hullspeed.errors import UsageError
from hullspeed.twin.played import Floats, Played

PERCENTILES = (50, 90, 95, 99)


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must keep, and how many of them.

    Attributes:
        ttft_s: Time to first token; ``None`` is no limit.
        tpot_s: Mean time per output token after the first.
        attainment: Share of requests that must keep both.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    attainment: float = 0.9

    @property
    def given(self) -> bool:
        """Whether there is a limit at all."""
        return self.ttft_s is not None or self.tpot_s is not None

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: naming the value.
        """
        if not 0 < self.attainment <= 1:
            raise UsageError("attainment is a share above 0 and at most 1", seen=self.attainment)
        for name in ("ttft_s", "tpot_s"):
            limit = getattr(self, name)
            if limit is not None and limit <= 0:
                raise UsageError(f"the limit {name} must be above 0", seen=limit)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in seconds by percentile, rates over the whole run.

    Attributes:
        goodput_per_s: Requests per second that kept the objective.
        attained: Share of answered and refused requests that kept it.
        memory_peak: Largest share of the pages held by running sequences.
        states_peak: Largest share of the pool taken by recurrent states, running and cached.
        busy: Share of the run in which the engine computed.
        usd_per_m_output: Dollars per million output tokens at the simulated load.
        usd_per_m_total: The same for all tokens, prompts included.
        usd_per_task: Of one task that succeeds; requests that miss the objective are of no use.
    """

    requests: int
    refused: int
    ttft_s: dict[str, float]
    itl_s: dict[str, float]
    tpot_s: dict[str, float]
    e2e_s: dict[str, float]
    ttft_mean_s: float
    tpot_mean_s: float
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float
    attained: float
    meets: bool
    hit_rate: float
    preemptions: int
    steps: int
    busy: float
    memory_peak: float
    states_peak: float
    running_peak: int
    waiting_peak: int
    usd_per_hour: float | None = None
    usd_per_m_output: float | None = None
    usd_per_m_total: float | None = None
    usd_per_task: float | None = None


def summarize(
    played: Played,
    objective: Objective,
    *,
    usd_per_hour: float | None = None,
    requests_per_task: int = 1,
    task_success: float = 1.0,
) -> Summary:
    """``played`` in numbers, each rounded to six significant figures."""
    n = len(played.served) + played.refused
    good = played.good(objective.ttft_s, objective.tpot_s)
    attained = good / n if n else 0.0
    duration = played.duration_s
    tokens = played.prompt_tokens + played.output_tokens
    per_s = (lambda count: count / duration) if duration else (lambda _: 0.0)
    ttft, tpot = played.ttft_s(), played.tpot_s()
    spent = None if usd_per_hour is None else usd_per_hour * duration / 3600
    timeline = played.timeline
    summary = Summary(
        requests=len(played.served),
        refused=played.refused,
        ttft_s=percentiles(ttft),
        itl_s=percentiles(played.itl_s()),
        tpot_s=percentiles(tpot),
        e2e_s=percentiles(played.e2e_s()),
        ttft_mean_s=_mean(ttft),
        tpot_mean_s=_mean(tpot),
        duration_s=duration,
        requests_per_s=played.requests_per_s,
        output_tokens_per_s=played.output_tokens_per_s,
        total_tokens_per_s=per_s(tokens),
        goodput_per_s=per_s(good),
        attained=attained,
        meets=attained >= objective.attainment,
        hit_rate=played.hit_rate,
        preemptions=played.preemptions,
        steps=played.steps,
        busy=min(1.0, per_s(played.busy_s)),
        memory_peak=max((m.pages_in_use for m in timeline), default=0) / played.n_pages,
        states_peak=max((m.states_share for m in timeline), default=0.0),
        running_peak=max((m.running for m in timeline), default=0),
        waiting_peak=max((m.waiting for m in timeline), default=0),
        usd_per_hour=usd_per_hour,
        usd_per_m_output=_per(spent, played.output_tokens, 1e6),
        usd_per_m_total=_per(spent, tokens, 1e6),
        usd_per_task=_per(spent, good * task_success / requests_per_task, 1.0),
    )
    return _rounded(summary)


def percentiles(values: Floats) -> dict[str, float]:
    """p50, p90, p95 and p99; empty of nothing."""
    if not values.size:
        return {}
    found = np.percentile(values, PERCENTILES)
    return {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else 0.0


def _per(spent: float | None, count: float, scale: float) -> float | None:
    return None if spent is None or count <= 0 else spent / count * scale


def _rounded(summary: Summary) -> Summary:
    """Six significant figures: what differs beyond them is arithmetic, not the system."""

    def cut(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, dict):
            return {name: cut(each) for name, each in value.items()}
        return value

    fields = {name: cut(getattr(summary, name)) for name in summary.__struct_fields__}
    return Summary(**fields)  # type: ignore[arg-type]
