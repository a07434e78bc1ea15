"""Stop strings: cut before them, wherever the token borders lie."""

from __future__ import annotations

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import Completion, read
from hullspeed.verify.endpoint import Endpoint

_PROMPTS = (
    "Once upon a time there was a fisherman who lived by the harbour and",
    "List of colours: red, green, blue,",
    "The quick brown fox",
)


@check(
    "V007",
    "a stop string ends the answer and is never emitted, not even in part",
    why="stop strings span token borders; a server that looks at single tokens runs past them or "
    "has already streamed their beginning",
    fix="hold back text that may be the beginning of a stop string",
)
async def never_emitted(endpoint: Endpoint) -> list[Fault]:
    """Stop strings cut out of the endpoint's own greedy text, so where to stop is known."""
    api = endpoint.api
    faults: list[Fault] = []
    asked = 0
    for prompt in _PROMPTS:
        free = read(await endpoint.send(endpoint.generation(api, prompt, max_tokens=40)))
        for stop in _stops(free.text):
            expected = free.text[: free.text.index(stop)]
            for stream in (False, True):
                request = endpoint.generation(
                    api, prompt, max_tokens=40, stop=[stop], stream=stream
                )
                found = _violation(read(await endpoint.send(request)), expected, stop)
                asked += 1
                if found:
                    seen: dict[str, object] = {"without stop": free.text, "stop": stop}
                    faults.append(Fault(found[0], request, seen | {"answer": found[1]}))
    if not asked:
        raise Skip("the greedy answers are too short to cut a stop string out of")
    return faults


def _stops(text: str) -> list[str]:
    """Strings from the inside of ``text`` that begin and end within words."""
    cuts = (len(text) // 4, len(text) // 2)
    stops = [text[at : at + 9] for at in cuts if len(text) > at + 12]
    return [stop for stop in dict.fromkeys(stops) if stop.strip()]


def _violation(completion: Completion, expected: str, stop: str) -> tuple[str, str] | None:
    text = completion.text
    if not completion.valid:
        return "a request with a stop string fails", completion.answer.shown
    if stop in text:
        return "the stop string is in the answer", text
    if text != expected:
        kind = "runs past" if len(text) > len(expected) else "ends before"
        return f"the text {kind} the stop string's place", text
    if completion.finish_reason != "stop":
        return f"finish_reason is {completion.finish_reason!r}, not 'stop'", text
    return None
