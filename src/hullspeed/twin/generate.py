"""generate: workloads drawn from distributions, the same for the same seed."""

from __future__ import annotations

import random
from itertools import islice

from hullspeed.errors import UsageError
from hullspeed.twin.arrivals import Arrivals
from hullspeed.twin.lengths import Lengths
from hullspeed.twin.workload import Contents, Part, Session, Turn, Workload


def _requests(
    rng: random.Random, isl: Lengths, osl: Lengths, n: int, shared_tokens: int, n_shared: int
) -> list[Turn]:
    isl.check("--isl")
    osl.check("--osl")
    if n < 1:
        raise UsageError("a workload has at least one request", seen=n)
    if shared_tokens < 0 or shared_tokens >= isl.tokens:
        raise UsageError(
            "the shared prefix must be shorter than the prompt",
            seen=shared_tokens,
            fix=f"use 0 to {isl.tokens - 1}",
        )
    contents = Contents()
    prefixes = [contents.new() for _ in range(n_shared)]
    turns = []
    for _ in range(n):
        n_tokens = isl.draw(rng)
        prompt = [Part(contents.new(), n_tokens)]
        places = [n_tokens]
        shared = min(shared_tokens, n_tokens - 1)
        if shared:
            prompt = [
                Part(rng.choice(prefixes), shared),
                Part(prompt[0].content, n_tokens - shared),
            ]
            places = [shared, n_tokens]
        turns.append(
            Turn(
                prompt=tuple(prompt),
                osl_tokens=osl.draw(rng),
                answer=contents.new(),
                checkpoints=tuple(places),
            )
        )
    return turns


def closed_loop(
    isl: Lengths,
    osl: Lengths,
    *,
    requests: int,
    concurrency: int,
    warm_up: int = 0,
    shared_tokens: int = 0,
    n_shared: int = 1,
    seed: int = 0,
) -> Workload:
    """The benchmarks' closed loop: all requests known, ``concurrency`` of them in flight, sent as
    fast as places are free (``--request-rate inf --max-concurrency C``).

    ``warm_up`` requests on top of ``requests`` go first and do not count. The first
    ``shared_tokens`` of each prompt are one of ``n_shared`` prefixes.

    Raises:
        UsageError: for numbers that cannot be.
    """
    if concurrency < 1:
        raise UsageError("a closed loop needs a concurrency of at least 1", seen=concurrency)
    if warm_up < 0:
        raise UsageError("warm-up requests cannot be negative", seen=warm_up)
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    turns = _requests(rng, isl, osl, requests + warm_up, shared_tokens, n_shared)
    unmeasured = [_unmeasured(turn) for turn in turns[:warm_up]]
    sessions = tuple(Session(turns=(turn,)) for turn in (*unmeasured, *turns[warm_up:]))
    return Workload(
        name=f"{requests} requests of {isl.tokens}/{osl.tokens}, {concurrency} in flight",
        sessions=sessions,
        concurrency=min(concurrency, len(sessions)),
    )


def _unmeasured(turn: Turn) -> Turn:
    return Turn(
        prompt=turn.prompt,
        osl_tokens=turn.osl_tokens,
        answer=turn.answer,
        checkpoints=turn.checkpoints,
        measured=False,
    )


def open_loop(
    isl: Lengths,
    osl: Lengths,
    arrivals: Arrivals,
    *,
    requests: int,
    shared_tokens: int = 0,
    n_shared: int = 1,
    seed: int = 0,
) -> Workload:
    """Requests that arrive whether or not the ones before are answered.

    Raises:
        UsageError: for numbers that cannot be.
    """
    arrivals.check()
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    turns = _requests(rng, isl, osl, requests, shared_tokens, n_shared)
    times = islice(arrivals.times(rng), requests)
    sessions = tuple(
        Session(turns=(turn,), at_s=at_s) for turn, at_s in zip(turns, times, strict=True)
    )
    return Workload(
        name=f"{requests} requests of {isl.tokens}/{osl.tokens} at {arrivals.rate:g}/s",
        sessions=sessions,
    )
