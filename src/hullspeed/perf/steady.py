"""Steady state of a closed loop: what C requests at a time see, from the cost of their steps.

C requests are always in flight; each brings ``isl`` prompt tokens, of which a cached part costs
nothing, and asks for ``osl`` tokens. With D the decode step of all C and a what one prompt adds to
the steps that carry it:

    ITL  = D + (C - 1) a / osl               every prompt of the others stretches some step
    rho  = C a / (osl D + C a)               share of time spent on prompts
    wait = rho / (2 (1 - rho)) service       prompts queue for the token budget (M/D/1)
    TTFT = request + D / 2 + wait + service  service: the steps that carry the prompt
    TTFT >= C service - (osl - 1) D          all C prompts queue when decoding is short

This is a mean-field formula: no bursts, no memory limit (the caller cuts C to what memory holds).
The twin, which runs the scheduler itself, replaces it where milliseconds of planning do not matter.
"""

from __future__ import annotations

from typing import NamedTuple

from hullspeed.errors import UsageError
from hullspeed.perf.work import Shape, StepSeconds


class Steady(NamedTuple):
    """Means of the steady state.

    Attributes:
        prefill_s: Seconds of one prompt alone, cold part only.
        decode_step_s: One decode step of all requests in flight, no prompt in it.
        ttft_s: Time to first token.
        itl_s: Time between tokens, prompt chunks of neighbours included; 0 when ``osl`` is 1.
        output_tokens_per_s: Of all requests together.
        requests_per_s: Completed.
        busy_prefill: Share of time spent on prompts.
    """

    prefill_s: float
    decode_step_s: float
    ttft_s: float
    itl_s: float
    output_tokens_per_s: float
    requests_per_s: float
    busy_prefill: float


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
    busy = min(concurrency * added_s / (osl * decode_s + concurrency * added_s), 0.999)
    wait_s = min(busy / (2 * (1 - busy)), concurrency - 1) * service_s if others else 0.0
    ttft_s = request_s + (decode_s / 2 if others else 0.0) + wait_s + service_s
    ttft_s = max(ttft_s, request_s + concurrency * service_s - (osl - 1) * decode_s)
    itl_s = decode_s + (concurrency - 1) * added_s / osl if osl > 1 else 0.0
    cycle_s = ttft_s + (osl - 1) * itl_s
    return Steady(
        prefill_s=prefill_s,
        decode_step_s=decode_s,
        ttft_s=ttft_s,
        itl_s=itl_s,
        output_tokens_per_s=concurrency * osl / cycle_s,
        requests_per_s=concurrency / cycle_s,
        busy_prefill=busy,
    )


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
