"""Limits: what cannot be served is refused with a reason, never bent into something else."""

from __future__ import annotations

from typing import Any

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import read
from hullspeed.verify.endpoint import PATHS, Answer, Endpoint

_UNKNOWN_CONTEXT_WORDS = 300_000


@check(
    "V012",
    "a prompt longer than the context is refused with 400",
    why="a silent cut answers a question that nobody asked",
    fix="count before admission and answer 400 with code context_length_exceeded",
)
async def refuses_long_prompts(endpoint: Endpoint) -> list[Fault]:
    """A prompt of more words than the context has tokens."""
    context = await _context_tokens(endpoint)
    words = context + 64 if context else _UNKNOWN_CONTEXT_WORDS
    faults = []
    for api in endpoint.apis:
        request = endpoint.generation(api, "sea " * words, max_tokens=4)
        answer = await endpoint.send(request)
        seen: dict[str, object] = {"words sent": words, "context": context, "answer": answer.shown}
        if answer.status == 200:
            counted = read(answer).prompt_tokens
            if context or counted is None or counted < words:
                seen["prompt_tokens"] = counted
                what = f"{api}: a prompt of {words} words was answered, by {counted} tokens of it"
                faults.append(Fault(what, request, seen))
        elif answer.status not in (400, 413, 422) or answer.error is None:
            what = f"{api}: an over-long prompt is not refused with 400 and an error object"
            faults.append(Fault(what, request, seen))
    return faults


async def _context_tokens(endpoint: Endpoint) -> int | None:
    """Context length as ``/v1/models`` or ``/tokenize`` state it (``max_model_len``)."""
    models = await endpoint.send(endpoint.request("/v1/models"))
    entries = models.json.get("data") if isinstance(models.json, dict) else None
    for entry in entries or ():
        if entry.get("id") == endpoint.model and isinstance(entry.get("max_model_len"), int):
            return int(entry["max_model_len"])
    body = {"model": endpoint.model, "prompt": "x"}
    tokenized = await endpoint.send(endpoint.request("/tokenize", body))
    if isinstance(tokenized.json, dict) and isinstance(tokenized.json.get("max_model_len"), int):
        return int(tokenized.json["max_model_len"])
    return None


_BAD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("temperature below 0", {"temperature": -1}),
    ("temperature as text", {"temperature": "hot"}),
    ("top_p above 1", {"top_p": 1.5}),
    ("negative max_tokens", {"max_tokens": -5}),
    ("max_tokens as text", {"max_tokens": "many"}),
    ("n of 0", {"n": 0}),
    ("stop as a number", {"stop": 7}),
    ("stream as text", {"stream": "perhaps"}),
)


@check(
    "V013",
    "a wrong request gets a 4xx with an error object, and the next one is served",
    why="ignored or crashing parameters leave clients with settings that they did not ask for",
    fix="validate at the door; answer 400 with error.message naming the field",
)
async def refuses_bad_parameters(endpoint: Endpoint) -> list[Fault]:
    """Values out of range, wrong types, broken JSON, an unknown model."""
    faults = []
    for api in endpoint.apis:
        requests = [
            (name, endpoint.generation(api, "x", **({"max_tokens": 4} | wrong)))
            for name, wrong in _BAD
        ]
        nothing: dict[str, Any] = {"messages": []} if api == "chat" else {"prompt": {"a": 1}}
        requests += [
            ("no usable prompt", endpoint.generation(api, "x", **nothing)),
            ("unknown model", endpoint.generation(api, "x", model="no-such-model-9f2e")),
            ("broken JSON", endpoint.request(PATHS[api], b'{"model": "x", "prompt": ')),
            ("invalid UTF-8", endpoint.request(PATHS[api], b'{"model": "\xff\xfe"}')),
        ]
        for name, request in requests:
            answer = await endpoint.send(request)
            what = _violation(answer)
            if what:
                faults.append(Fault(f"{api}: {name}: {what}", request, {"answer": answer.shown}))
        after = endpoint.generation(api, "Hello", max_tokens=2)
        completion = read(await endpoint.send(after))
        if not completion.valid:
            seen: dict[str, object] = {"answer": completion.answer.shown}
            faults.append(Fault(f"{api}: a good request fails after wrong ones", after, seen))
    if not faults and not endpoint.apis:
        raise Skip("no API to ask")
    return faults


def _violation(answer: Answer) -> str:
    if answer.broken:
        return "the connection broke"
    if not 400 <= answer.status < 500:
        return f"answered with HTTP {answer.status}"
    error = answer.error
    if error is None or not error.get("message"):
        return "refused without error.message"
    return ""
