"""Usage: the counts that billing, benchmarks and context budgets rest on."""

from __future__ import annotations

import orjson

from hullspeed.verify.check import Fault, check
from hullspeed.verify.completion import Completion, complete_all
from hullspeed.verify.endpoint import Answer, Endpoint


@check(
    "V004",
    "usage is there, adds up, and is the same streamed and unstreamed",
    why="wrong counts bill wrongly and make every benchmark of the endpoint wrong",
    fix="send stream_options.include_usage; count ids in the engine, not chunks or text",
)
async def counts(endpoint: Endpoint) -> list[Fault]:
    """One greedy request per API, streamed and not."""
    faults = []
    for api in endpoint.apis:
        prompt = "A short note about harbours:"
        whole_request = endpoint.generation(api, prompt, max_tokens=16)
        request = endpoint.generation(api, prompt, max_tokens=16, stream=True)
        whole, streamed = await complete_all(endpoint, (whole_request, request))
        for completion, asked in ((whole, whole_request), (streamed, request)):
            faults += [
                Fault(f"{api}: {what}", asked, {"usage": completion.usage})
                for what in _violations(completion)
            ]
        if whole.usage and streamed.usage:
            seen: dict[str, object] = {"whole": whole.usage, "streamed": streamed.usage}
            if whole.text == streamed.text and whole.tokens != streamed.tokens:
                faults.append(Fault(f"{api}: output counts of the same text differ", request, seen))
            if whole.prompt_tokens != streamed.prompt_tokens:
                faults.append(Fault(f"{api}: prompt counts differ", request, seen))
        faults += [
            Fault(f"{api}: {what}", request, {"last events": streamed.answer.events[-3:]})
            for what in _misplaced(streamed.answer)
        ]
    return faults


def _violations(completion: Completion) -> list[str]:
    usage = completion.usage
    prompt, output = completion.prompt_tokens, completion.tokens
    if prompt is None or output is None:
        return ["no usage with prompt_tokens and completion_tokens"]
    found = []
    if prompt < 1 or output < 1:
        found.append("a count is zero though there was a prompt and an answer")
    if usage.get("total_tokens") != prompt + output:
        found.append("total_tokens is not the sum")
    if output > 16:
        found.append(f"{output} tokens were counted, 16 was the limit")
    if completion.finish_reason == "length" and output != 16:
        found.append(f"finish_reason is length at {output} of 16 tokens")
    cached = completion.cached_tokens
    if cached is not None and not 0 <= cached <= prompt:
        found.append(f"{cached} cached of {prompt} prompt tokens")
    return found


def _misplaced(answer: Answer) -> list[str]:
    """The usage chunk comes last before [DONE] and carries no choice."""
    bodies = [orjson.loads(event) for event in answer.events if event.startswith("{")]
    with_usage = [i for i, body in enumerate(bodies) if body.get("usage")]
    if not with_usage:
        return []  # said above
    if with_usage[-1] != len(bodies) - 1 or bodies[-1].get("choices"):
        return ["the last chunk is not the usage chunk with empty choices"]
    return []
