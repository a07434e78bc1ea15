"""Template: what the model reads is what was written, framed once."""

from __future__ import annotations

from typing import Any

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import complete, complete_all
from hullspeed.verify.endpoint import Endpoint

_TOKENS = 128
_PROMPT = "Which way is north?"
_TAGS = ("<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|eot_id|>")


@check(
    "V016",
    "a prompt has one length, and one start token",
    why="a double start token or a second template changes every answer a little",
    fix="render the template without special tokens being added again",
)
async def one_count(endpoint: Endpoint) -> list[Fault]:
    """``/tokenize`` against the usage of the same prompt, on every API."""
    faults = []
    known = False
    for api in endpoint.apis:
        body: dict[str, Any] = {"model": endpoint.model}
        if api == "completions":
            body["prompt"] = _PROMPT
        else:
            body["messages"] = [{"role": "user", "content": _PROMPT}]
        request = endpoint.request("/tokenize", body)
        answer = await endpoint.send(request)
        if answer.status != 200 or not isinstance(answer.json, dict):
            continue
        known = True
        completion = await complete(endpoint, endpoint.generation(api, _PROMPT, max_tokens=1))
        tokens, count = answer.json.get("tokens") or [], answer.json.get("count")
        seen: dict[str, object] = {"tokens": tokens, "usage": completion.usage}
        if count != completion.prompt_tokens:
            what = f"{api}: /tokenize counts {count}, usage {completion.prompt_tokens}"
            faults.append(Fault(what, request, seen))
        if len(tokens) > 1 and tokens[0] == tokens[1]:
            faults.append(
                Fault(f"{api}: the prompt starts with the same token twice", request, seen)
            )
    if not known:
        raise Skip("no /tokenize")
    return faults


@check(
    "V017",
    "no template or thinking tags in content, with and without stop strings",
    why="a stop string can end the parser's work before the closing tag, which then leaks",
    fix="apply stop strings to the parsed content only",
)
async def no_think_tags(endpoint: Endpoint) -> list[Fault]:
    """A question that makes a reasoning model think."""
    if "chat" not in endpoint.apis:
        raise Skip("no chat API")
    faults = []
    requests = [
        endpoint.generation(
            "chat", "Is 91 a prime number?", max_tokens=_TOKENS, stream=stream, **stop
        )
        for stop in ({}, {"stop": ["\n\n\n\n", "###"]})
        for stream in (False, True)
    ]
    completions = await complete_all(endpoint, requests)
    for i, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        leaked = [tag for tag in _TAGS if tag in completion.text]
        if leaked:
            what = f"{leaked[0]} is in content" + (" with a stop string" if i >= 2 else "")
            faults.append(Fault(what, request, {"content": completion.text}))
    return faults
