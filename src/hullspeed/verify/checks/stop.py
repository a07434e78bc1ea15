"""Stop strings: cut before them, wherever the token borders lie."""

from __future__ import annotations

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import Completion, complete_all
from hullspeed.verify.endpoint import Endpoint

_TOKENS = 32

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
    free = [endpoint.generation(api, prompt, max_tokens=_TOKENS) for prompt in _PROMPTS]
    texts = [completion.text for completion in await complete_all(endpoint, free)]
    for prompt, text in zip(_PROMPTS, texts, strict=True):
        for stop in _stops(text):
            params = {"max_tokens": _TOKENS, "stop": [stop]}
            requests = [
                endpoint.generation(api, prompt, stream=stream, **params)
                for stream in (False, True)
            ]
            for request, completion in zip(
                requests, await complete_all(endpoint, requests), strict=True
            ):
                asked += 1
                found = _violation(completion, text[: text.index(stop)], stop)
                if found:
                    seen = {"without stop": text, "stop": stop, "answer": completion.text}
                    faults.append(Fault(found, request, seen))
    if not asked:
        raise Skip("the greedy answers are too short to cut a stop string out of")
    return faults


def _stops(text: str) -> list[str]:
    """Strings from the inside of ``text`` that begin and end within words."""
    cuts = (len(text) // 4, len(text) // 2)
    stops = [text[at : at + 9] for at in cuts if len(text) > at + 12]
    return [stop for stop in dict.fromkeys(stops) if stop.strip()]


def _violation(completion: Completion, expected: str, stop: str) -> str:
    text = completion.text
    if stop in text:
        return "the stop string is in the answer"
    if text != expected:
        kind = "runs past" if len(text) > len(expected) else "ends before"
        return f"the text {kind} the stop string's place"
    if completion.finish_reason != "stop":
        return f"finish_reason is {completion.finish_reason!r}, not 'stop'"
    return ""
