"""Steady state of a closed loop: what C requests at a time see, from the cost of their steps.

C requests are always in flight; each brings ``isl`` prompt tokens, of which a cached part costs
nothing, and asks for ``osl`` tokens. With D the decode step of all C, a what
one prompt adds to the steps that carry it, and s the time of those steps:

    cycle = osl D + C a                      the GPU is never idle; C osl / cycle is the throughput
    TTFT settled = request + D / 2 + s       requests out of step: a prompt rarely meets another
    TTFT burst   = request + s + (k (C/k + 1) / 2 - 1) a    requests in step: all C prompts queue,
                                             k of them to a step
    ITL = (cycle + request - TTFT) / (osl - 1)    what is left of the cycle

Lengths that vary bring requests out of step, equal lengths keep them in step; the estimate is the
geometric mean of the two. It is a mean-field formula without a memory limit (the caller cuts C to
what memory holds); the twin, which runs the scheduler itself, replaces it where milliseconds of
planning do not matter. ``roofline.toml`` says how far it was from published measurements.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hullspeed.errors import UsageError
from hullspeed.perf.work import Shape, StepSeconds


class Steady(NamedTuple):
    """Means of the steady state.

    Attributes:
        prefill_s: Seconds of one prompt alone, cold part only.
        decode_step_s: One decode step of all requests in flight, no prompt in it.
        ttft_settled_s: Time to first token when requests are out of step.
        ttft_burst_s: Time to first token when all arrive together.
        itl_s: Time between tokens, prompt chunks of neighbours included; 0 when ``osl`` is 1.
        output_tokens_per_s: Of all requests together.
        requests_per_s: Completed.
        busy_prefill: Share of time spent on prompts.
    """

    prefill_s: float
    decode_step_s: float
    ttft_settled_s: float
    ttft_burst_s: float
    itl_s: float
    output_tokens_per_s: float
    requests_per_s: float
    busy_prefill: float

    @property
    def ttft_s(self) -> float:
        """The estimate between settled and burst: their geometric mean."""
        return math.sqrt(self.ttft_settled_s * self.ttft_burst_s)


def steady_state(
    cost: StepSeconds,
    *,
    isl: int,
    osl: int,
    concurrency: int,
    cached_tokens: int = 0,
    step_tokens: int = 2048,
    request_s: float = 0.0,
    stream_token_s: float = 0.0,
) -> Steady:
    """The steady state of ``concurrency`` requests of ``isl`` prompt and ``osl`` output tokens.

    ``cached_tokens`` of each prompt are found in the prefix cache. ``step_tokens`` is the
    scheduler's token budget: prompts are computed in chunks of it. ``request_s`` is added to each
    first token (HTTP, template, tokenizing), ``stream_token_s`` to a step for each token it
    streams.

    Raises:
        UsageError: for sizes below one or a cached part that is the whole prompt.
    """
    for name, value in (("isl", isl), ("osl", osl), ("concurrency", concurrency)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1", seen=value)
    if not 0 <= cached_tokens < isl:
        raise UsageError(
            "the shared prefix must be shorter than the prompt",
            seen=cached_tokens,
            fix=f"at most {isl - 1}: the last prompt token is always computed",
        )
    middle = isl + osl // 2
    decode_s = cost.seconds([Shape(1, middle)] * concurrency) + stream_token_s * concurrency
    prefill_s = prefill_seconds(cost, isl, cached_tokens, step_tokens)
    others = [Shape(1, middle)] * (concurrency - 1)
    service_s = prefill_seconds(cost, isl, cached_tokens, step_tokens, others)
    n_chunks = -(-(isl - cached_tokens) // max(1, step_tokens - len(others)))
    added_s = max(service_s - n_chunks * decode_s, 0.0) if others else prefill_s
    cycle_s = osl * decode_s + concurrency * added_s if osl > 1 else concurrency * service_s
    settled_s = request_s + service_s + (decode_s / 2 if others else 0.0)
    # Short prompts share a step: each of k in a step waits for all k, groups of k one another.
    together = min(concurrency, max(1, step_tokens // (isl - cached_tokens)))
    groups = -(-concurrency // together)
    queue_s = added_s * (together * (groups + 1) / 2 - 1)
    burst_s = max(settled_s, request_s + service_s + queue_s)
    if osl == 1:  # nothing but prompts: each waits for all others
        settled_s = burst_s = request_s + cycle_s
    steady = Steady(
        prefill_s=prefill_s,
        decode_step_s=decode_s,
        ttft_settled_s=settled_s,
        ttft_burst_s=burst_s,
        itl_s=0.0,
        output_tokens_per_s=concurrency * osl / (cycle_s + request_s),
        requests_per_s=concurrency / (cycle_s + request_s),
        busy_prefill=min(concurrency * added_s / cycle_s, 1.0),
    )
    if osl == 1:
        return steady
    rest_s = cycle_s + request_s - min(steady.ttft_s, cycle_s + request_s)
    return steady._replace(itl_s=max(rest_s / (osl - 1), decode_s))


def prefill_seconds(
    cost: StepSeconds,
    isl: int,
    cached_tokens: int,
    step_tokens: int,
    others: list[Shape] | None = None,
) -> float:
    """Seconds of the steps that compute one prompt, chunk by chunk, beside ``others`` that decode
    in the same steps.
    """
    others = others or []
    budget = max(1, step_tokens - len(others))
    total, done = 0.0, cached_tokens
    while done < isl:
        n_tokens = min(budget, isl - done)
        total += cost.seconds([*others, Shape(n_tokens, done, done + n_tokens == isl)])
        done += n_tokens
    return total
