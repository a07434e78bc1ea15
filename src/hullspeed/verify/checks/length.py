"""Length: max_tokens is a count, not a hint."""

from __future__ import annotations

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import complete
from hullspeed.verify.endpoint import Endpoint


@check(
    "V008",
    "max_tokens is kept exactly, and finish_reason says so",
    why="benchmarks compare unequal lengths, and clients take a cut answer for a finished one",
    fix="count generated ids; honour every end token under ignore_eos and min_tokens",
)
async def exact(endpoint: Endpoint) -> list[Fault]:
    """Several lengths, streamed and not; with ``ignore_eos`` where it is understood."""
    api = endpoint.api
    faults = []
    cut = 0
    extra: dict[str, object] = {"ignore_eos": True}
    probe = endpoint.generation(api, "Tide table:", max_tokens=2, **extra)
    if (await endpoint.send(probe)).status != 200:
        extra = {}
    for n in (1, 2, 7, 33):
        for stream in (False, True):
            minimum = {"min_tokens": n} if extra else {}
            request = endpoint.generation(
                api, "Tide table:", max_tokens=n, stream=stream, **extra, **minimum
            )
            completion = await complete(endpoint, request)
            reason, tokens = completion.finish_reason, completion.tokens
            seen: dict[str, object] = {
                "completion_tokens": tokens,
                "finish_reason": reason,
                "answer": completion.answer.shown,
            }
            if tokens is None:
                faults.append(Fault("no completion_tokens to count by", request, seen))
            elif tokens > n:
                faults.append(Fault(f"{tokens} tokens, max_tokens was {n}", request, seen))
            elif reason == "length":
                cut += 1
                if tokens != n:
                    what = f"finish_reason is length at {tokens} of {n} tokens"
                    faults.append(Fault(what, request, seen))
            elif extra:
                what = f"{tokens} of {n} tokens and finish_reason {reason!r} under ignore_eos"
                faults.append(Fault(what, request, seen))
            elif tokens == n and reason != "stop":
                faults.append(Fault(f"finish_reason is {reason!r}", request, seen))
    if not cut and not faults:
        raise Skip("every answer ended by itself before max_tokens")
    return faults
