"""Streams: framing, the way they end, and the text they carry."""

from __future__ import annotations

import asyncio

import orjson

from hullspeed.verify.check import Fault, check
from hullspeed.verify.compare import difference, logprobs_params
from hullspeed.verify.completion import complete_all
from hullspeed.verify.endpoint import Answer, Endpoint

FINISH_REASONS = {"stop", "length", "tool_calls", "content_filter"}


@check(
    "V003",
    "a stream is well framed and ends once: finish reason, then [DONE]",
    why="clients hang, or take an abort for an answer, when the end of a stream is not what it is",
    fix="compare the raw bytes (curl -N) with the standard for server-sent events",
)
async def framing(endpoint: Endpoint) -> list[Fault]:
    """Raw events of one stream per API."""
    faults = []
    for api in endpoint.apis:
        request = endpoint.generation(api, "Count: one, two,", max_tokens=12, stream=True)
        answer = await endpoint.send(request)
        shown: dict[str, object] = {
            "answer": answer.shown,
            "content-type": answer.content_type,
            "last events": answer.events[-3:],
        }
        faults += [Fault(f"{api}: {what}", request, shown) for what in _violations(answer)]
    return faults


def _violations(answer: Answer) -> list[str]:
    if answer.status != 200 or not answer.content_type.startswith("text/event-stream"):
        return ["a streaming request is not answered with 200 and text/event-stream"]
    found = []
    if answer.broken:
        found.append("the connection broke inside the stream")
    if answer.undispatched:
        found.append("the last event lacks its empty line")
    done = answer.events.count("[DONE]")
    if done != 1:
        found.append(f"{done} [DONE] events, one is due")
    elif answer.events[-1] != "[DONE]":
        found.append("events follow [DONE]")
    finishes = 0
    for event in answer.events:
        if event == "[DONE]":
            continue
        try:
            body = orjson.loads(event)
            choices = body.get("choices") or []
        except (orjson.JSONDecodeError, AttributeError):
            found.append(f"an event is not a JSON object: {event[:80]}")
            continue
        if body.get("error"):
            found.append("an error event under HTTP 200")
        for choice in choices:
            reason = choice.get("finish_reason")
            finishes += reason is not None
            if reason is not None and reason not in FINISH_REASONS:
                found.append(f"finish_reason {reason!r} is not one of {sorted(FINISH_REASONS)}")
    if finishes != 1:
        found.append(f"{finishes} finish reasons, one is due")
    return found


@check(
    "V005",
    "streamed text equals unstreamed text",
    why="detokenizing piece by piece drops spaces or the last characters",
    fix="compare the concatenated deltas with the whole answer; look at the incremental decoder",
)
async def same_text(endpoint: Endpoint) -> list[Fault]:
    """Greedy, several prompts, on every API."""
    faults = []
    prompts = ("Write a line about rain and the sea:", "def add(a, b):\n    ", "1, 2, 3, 4,")
    for api in endpoint.apis:
        params = {"max_tokens": 32, **await logprobs_params(endpoint, api)}
        requests = [endpoint.generation(api, prompt, stream=True, **params) for prompt in prompts]
        wholes, streams = await asyncio.gather(
            complete_all(endpoint, [endpoint.generation(api, p, **params) for p in prompts]),
            complete_all(endpoint, requests),
        )
        for request, whole, streamed in zip(requests, wholes, streams, strict=True):
            found = difference(whole, streamed)
            if found:
                faults.append(
                    Fault(
                        f"{api}: the streamed text {found[0]}",
                        request,
                        {"whole": whole.text, "streamed": streamed.text},
                        found[1],
                    )
                )
            elif whole.text == streamed.text and whole.finish_reason != streamed.finish_reason:
                seen: dict[str, object] = {
                    "whole": whole.finish_reason,
                    "streamed": streamed.finish_reason,
                }
                faults.append(Fault(f"{api}: the finish reasons differ", request, seen))
    return faults
