"""Seed: the same request with the same seed gives the same answer."""

from __future__ import annotations

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import complete, complete_all
from hullspeed.verify.endpoint import Endpoint


@check(
    "V015",
    "a seed repeats its answer, and another seed need not",
    why="evaluations and bug reports that state a seed cannot be repeated",
    fix="give each request its own random stream, keyed by its seed and position",
)
async def repeats(endpoint: Endpoint) -> list[Fault]:
    """Temperature 1, one seed twice, then four more seeds."""
    api = endpoint.api
    prompt = "A new word and what it means:"
    request = endpoint.generation(api, prompt, max_tokens=24, temperature=1, seed=7)
    first = await complete(endpoint, request, may_refuse=True)
    if first.refused:
        raise Skip("the endpoint refuses a seed")
    others = [
        endpoint.generation(api, prompt, max_tokens=24, temperature=1, seed=seed)
        for seed in (8, 9, 10, 11)
    ]
    second, *drawn = await complete_all(endpoint, [request, *others])
    faults = []
    seen: dict[str, object] = {"first": first.text, "second": second.text}
    if first.text != second.text:
        faults.append(Fault("the same seed gave another answer", request, seen))
    if all(completion.text == first.text for completion in drawn):
        what = "five seeds at temperature 1 gave one answer: sampling seems off"
        faults.append(Fault(what, request, {"answer": first.text}))
    return faults
