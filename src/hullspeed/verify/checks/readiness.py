"""Readiness: a server is ready when it generates, whatever its health endpoint says."""

from __future__ import annotations

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import complete_all, read
from hullspeed.verify.endpoint import Endpoint

_TOKENS = 128


@check(
    "V001",
    "every API generates a token",
    why="health and model lists answer while the engine cannot generate",
    fix="read the engine's log; probe readiness with a one-token request",
)
async def generates(endpoint: Endpoint) -> list[Fault]:
    """One short greedy request per API."""
    faults = []
    for api in endpoint.apis:
        request = endpoint.generation(api, "The capital of France is", max_tokens=4)
        completion = read(await endpoint.send(request))
        made = completion.text or completion.reasoning
        if not completion.valid or not made:
            seen = {"answer": completion.answer.shown}
            faults.append(Fault(f"{api}: no token was generated", request, seen))
    return faults


@check(
    "V002",
    "the answer is in content",
    why="a misread reasoning parser puts the whole answer into the reasoning field, and clients "
    "that read content get null",
    fix="check the reasoning parser against the model and its template",
)
async def answers_in_content(endpoint: Endpoint) -> list[Fault]:
    """A finished chat answer has content, streamed and not."""
    if "chat" not in endpoint.apis:
        raise Skip("no chat API")
    faults = []
    unfinished = 0
    requests = [
        endpoint.generation("chat", "Say hello in one word.", max_tokens=_TOKENS, stream=stream)
        for stream in (False, True)
    ]
    completions = await complete_all(endpoint, requests)
    for request, completion in zip(requests, completions, strict=True):
        if completion.finish_reason != "stop":
            unfinished += 1
        elif not completion.text.strip():
            faults.append(
                Fault(
                    "a finished answer has no content",
                    request,
                    {"content": completion.text or None, "reasoning": completion.reasoning},
                )
            )
    if unfinished == 2:
        raise Skip(f"the model did not finish an answer within {_TOKENS} tokens")
    return faults
