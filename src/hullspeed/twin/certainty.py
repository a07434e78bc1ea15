"""certainty: how far a simulation may be off, and what was measured nearest to it.

A simulation is as wrong as its cost of a step. How wrong that was on published measurements that it
had not seen is known by metric and by kind of load, and goes with every result.
"""

from __future__ import annotations

import statistics

import msgspec

from hullspeed.perf.calibration import spread_on_gpu
from hullspeed.perf.fitted import Spread, kinds_of, regime_of
from hullspeed.perf.nearest import PublicPoint, nearest_points
from hullspeed.perf.steady import prefill_seconds
from hullspeed.twin.question import Cost, Question
from hullspeed.twin.summary import Summary
from hullspeed.twin.workload import Workload

SHARE = 90


class Certainty(msgspec.Struct, frozen=True, kw_only=True):
    """What a summary's main figures may really be.

    Attributes:
        share: Per cent of measured values of left-out groups that such intervals held.
        regime: The kind of load: requests ``alone``, ``shared`` steps, or a ``queued`` load; for
            this machine ``measured here``.
        intervals: Low and high of ``ttft_s`` and ``tpot_s`` (medians) and ``output_tokens_per_s``.
        nearest: Published measurements that come closest.
    """

    share: int
    regime: str
    intervals: dict[str, tuple[float, float]]
    nearest: tuple[PublicPoint, ...] = ()


def certainty(question: Question, cost: Cost, workload: Workload, summary: Summary) -> Certainty:
    """Of ``summary``, which ``question`` answered about ``workload`` at ``cost``."""
    turns = [turn for session in workload.sessions for turn in session.turns]
    isl = round(statistics.median(turn.isl_tokens for turn in turns))
    osl = round(statistics.median(turn.osl_tokens for turn in turns))
    ttft_s, tpot_s = summary.ttft_s.get("p50", 0.0), summary.tpot_s.get("p50", 0.0)
    regime = _regime(question, cost, workload, isl, ttft_s)
    output = summary.output_tokens_per_s
    intervals = {}
    for name, metric, value in (
        ("ttft_s", "ttft", ttft_s), ("tpot_s", "tpot", tpot_s),
        ("output_tokens_per_s", "output", output),
    ):  # fmt: skip
        low, high = _spread(question, metric, regime)
        intervals[name] = (float(f"{value * low:.6g}"), float(f"{value * high:.6g}"))
    if question.gpu is None:
        return Certainty(share=SHARE, regime="measured here", intervals=intervals)
    in_flight = workload.concurrency or summary.requests_per_s * summary.e2e_s.get("p50", 0.0)
    nearest = nearest_points(
        params=question.arch.params_per_token(), gpu=question.gpu.name, tp=question.settings.tp,
        quant=question.arch.quant, engine=question.settings.engine, isl=isl, osl=osl,
        concurrency=max(1, round(in_flight)), speculative=question.settings.draft_tokens > 0,
    )  # fmt: skip
    return Certainty(share=SHARE, regime=regime, intervals=intervals, nearest=nearest)


def _regime(question: Question, cost: Cost, workload: Workload, isl: int, ttft_s: float) -> str:
    step_tokens = question.engine(workload, cost).step_tokens
    # A prompt of millions of tokens, which no engine takes, need not be added up.
    prompt = min(isl, question.settings.max_model_len or isl)
    alone_s = prefill_seconds(cost.steps, prompt, 0, step_tokens)
    alone_s += cost.request_s + cost.prompt_token_s * isl
    return regime_of(ttft_s / alone_s)


def _spread(question: Question, metric: str, regime: str) -> Spread:
    """Factors on a simulated value that bound the real one."""
    if question.ceilings is not None:
        error = question.ceilings.relative_error
        return Spread(1 / (1 + error), 1 + error)
    return spread_on_gpu(
        metric, SHARE, regime, gpu="" if question.gpu is None else question.gpu.name,
        kinds=kinds_of(question.arch, drafts=question.settings.draft_tokens > 0),
        calibration=question.calibration, tables=question.cost_model == "tables",
    )  # fmt: skip
