"""Tools: a call is a name and JSON arguments, the same streamed and not."""

from __future__ import annotations

from typing import Any

import orjson

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import Completion, complete_all
from hullspeed.verify.endpoint import Endpoint

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_tide",
        "description": "Height of the tide at a port",
        "parameters": {
            "type": "object",
            "properties": {"port": {"type": "string"}, "hour": {"type": "integer"}},
            "required": ["port", "hour"],
            "additionalProperties": False,
        },
    },
}


@check(
    "V018",
    "tool calls are whole: named, valid JSON, the same streamed and unstreamed",
    why="an agent acts on the call; an empty list under finish_reason tool_calls stops it, and "
    "arguments that differ in a stream make it do something else",
    fix="compare the engine's tool parser with the model's format; parse from token ids",
)
async def calls_are_whole(endpoint: Endpoint) -> list[Fault]:
    """A question that needs the tool, asked with choice auto and required."""
    if "chat" not in endpoint.apis:
        raise Skip("no chat API")
    faults = []
    refused = 0
    for choice in ("auto", "required"):
        params: dict[str, Any] = {"tools": [_TOOL], "tool_choice": choice, "max_tokens": 64}
        question = "How high is the tide in Brest at 9? Use the tool."
        whole_request = endpoint.generation("chat", question, **params)
        request = endpoint.generation("chat", question, stream=True, **params)
        whole, streamed = await complete_all(endpoint, (whole_request, request), may_refuse=True)
        if whole.refused and streamed.refused:
            refused += 1
            continue
        for completion, asked in ((whole, whole_request), (streamed, request)):
            faults += [
                Fault(f"{choice}: {what}", asked, {"answer": completion.answer.shown})
                for what in _violations(completion, required=choice == "required")
            ]
        if whole.tool_calls != streamed.tool_calls:
            seen: dict[str, object] = {"whole": whole.tool_calls, "streamed": streamed.tool_calls}
            faults.append(Fault(f"{choice}: the streamed call is another one", request, seen))
    if refused == 2:
        raise Skip("the endpoint refuses tools")
    return faults


def _violations(completion: Completion, *, required: bool) -> list[str]:
    calls, reason = completion.tool_calls, completion.finish_reason
    found = []
    if not completion.valid:
        found.append("a request with tools fails")
    elif reason == "tool_calls" and not calls:
        found.append("finish_reason is tool_calls and there is no call")
    elif required and not calls and reason != "length":
        found.append("a call was required and there is none")
    for call in calls:
        if call["name"] != "get_tide":
            found.append(f"a call to {call['name']!r}, which was not offered")
        if reason != "length" and not _is_object(call["arguments"]):
            found.append("the arguments are not a JSON object")
    return found


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False
