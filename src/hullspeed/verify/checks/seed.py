"""Seed: the same request with the same seed gives the same answer."""

from __future__ import annotations

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import read
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
    first = read(await endpoint.send(request))
    if first.refused:
        raise Skip("the endpoint refuses a seed")
    second = read(await endpoint.send(request))
    faults = []
    seen: dict[str, object] = {"first": first.text, "second": second.text}
    if not first.valid or first.text != second.text:
        faults.append(Fault("the same seed gave another answer", request, seen))
    others = [
        read(await endpoint.send(
            endpoint.generation(api, prompt, max_tokens=24, temperature=1, seed=seed)
        )).text
        for seed in (8, 9, 10, 11)
    ]  # fmt: skip
    if all(text == first.text for text in others):
        what = "five seeds at temperature 1 gave one answer: sampling seems off"
        faults.append(Fault(what, request, {"answer": first.text}))
    return faults
