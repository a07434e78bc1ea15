"""Load: a request's answer does not depend on who else is being served."""

from __future__ import annotations

from hullspeed.verify.check import Fault, check
from hullspeed.verify.compare import difference, logprobs_params
from hullspeed.verify.completion import complete, complete_all
from hullspeed.verify.endpoint import Endpoint

_CROWD = 12
_NAMES = ("kelp", "reef", "cove", "gale", "mast", "keel")


@check(
    "V010",
    "alone and in a crowd the greedy answer is the same",
    why="kernels that are wrong above some batch size, and answers that reach the wrong client, "
    "show only under load",
    fix="lower the batch size until it passes; then suspect the attention or state kernel",
)
async def alone_equals_crowd(endpoint: Endpoint) -> list[Fault]:
    """Twelve prompts with a needle each: all at once while new, one by one, all at once again."""
    api = endpoint.api
    params = {"max_tokens": 16, **await logprobs_params(endpoint, api)}
    requests = [
        endpoint.generation(api, _needle(i), stream=i % 2 == 0, **params) for i in range(_CROWD)
    ]
    cold = await complete_all(endpoint, requests)
    alone = [await complete(endpoint, request) for request in requests]
    cached = await complete_all(endpoint, requests)
    faults = []
    for crowd in (cold, cached):
        for i, (reference, other) in enumerate(zip(alone, crowd, strict=True)):
            found = difference(reference, other)
            if found:
                others = [j for j in range(_CROWD) if alone[j].text == other.text != ""]
                swapped = f"; it is the answer to request {others[0]}" if others else ""
                seen: dict[str, object] = {
                    "alone": reference.text,
                    f"among {_CROWD}": other.text,
                }
                what = f"request {i} of {_CROWD} at once {found[0]}{swapped}"
                faults.append(Fault(what, requests[i], seen, found[1]))
    return faults


def _needle(i: int) -> str:
    """A prompt that repeats its own code, and lengths that differ."""
    code = f"{chr(65 + i)}{i * 37 % 100:02}-{_NAMES[i % 6]}"
    filler = "The boats lie at the quay. " * (1 + 3 * (i % 4))
    return f"{filler}The code is {code}. Say it: the code is {code}. Again: the code is"
