"""Log-probabilities: numbers that evaluations are built on."""

from __future__ import annotations

import math

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.compare import LOGPROBS
from hullspeed.verify.completion import Completion, complete_all
from hullspeed.verify.endpoint import Endpoint

_ROUNDING = 1e-3


@check(
    "V014",
    "log-probabilities are there for every token and agree with the greedy answer",
    why="evaluation harnesses rank answers by them; a missing or shifted entry ranks wrongly",
    fix="report the distribution that was sampled from, one entry per generated id",
)
async def consistent(endpoint: Endpoint) -> list[Fault]:
    """Count, sign, order, sum and text of one greedy answer per API, streamed and not."""
    faults = []
    refused = 0
    for api in endpoint.apis:
        params = {"max_tokens": 16, **LOGPROBS[api]}
        requests = [
            endpoint.generation(api, "Names of ships:", stream=stream, **params)
            for stream in (False, True)
        ]
        completions = await complete_all(endpoint, requests, may_refuse=True)
        for request, completion in zip(requests, completions, strict=True):
            if completion.refused:
                refused += 1
                continue
            faults += [
                Fault(f"{api}: {what}", request, {"logprobs": str(completion.logprobs)[:400]})
                for what in _violations(completion)
            ]
    if refused == 2 * len(endpoint.apis):
        raise Skip("the endpoint refuses log-probabilities")
    return faults


def _violations(completion: Completion) -> list[str]:
    entries = completion.logprobs
    if not entries:
        return ["log-probabilities were asked for and are missing"]
    found = []
    unlisted = 0 if completion.tokens is None else completion.tokens - len(entries)
    # an end token may be counted and not listed
    if unlisted and not (unlisted == 1 and completion.finish_reason == "stop"):
        found.append(f"{len(entries)} entries for {completion.tokens} tokens")
    if any(entry.logprob > _ROUNDING or math.isnan(entry.logprob) for entry in entries):
        found.append("a log-probability is above 0 or not a number")
    if any(not entry.top for entry in entries):
        found.append("top_logprobs is missing")
    elif any(max(entry.top.values()) > entry.logprob + _ROUNDING for entry in entries):
        found.append("the greedy token is not the likeliest of top_logprobs")
    if any(sum(map(math.exp, entry.top.values())) > 1 + 2 * _ROUNDING for entry in entries):
        found.append("probabilities of one position add up to more than 1")
    text = "".join(entry.token for entry in entries)
    comparable = "\ufffd" not in text and text.isascii() and completion.finish_reason == "length"
    if comparable and text.strip() != completion.text.strip():
        found.append("the tokens listed are not the text")
    return found
