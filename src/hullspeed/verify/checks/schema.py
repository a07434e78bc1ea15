"""Schema: a constraint is enforced or refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from hullspeed.verify.check import Fault, Skip, check
from hullspeed.verify.completion import complete_all
from hullspeed.verify.endpoint import Endpoint, Request

Holds = Callable[[Any], bool]


def _number(**limits: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"n": {"type": "integer", **limits}},
        "required": ["n"],
        "additionalProperties": False,
    }


def _n_is(test: Callable[[int], bool]) -> Holds:
    return lambda value: isinstance(value, dict) and list(value) == ["n"] and test(value["n"])


_SCHEMAS: tuple[tuple[str, dict[str, Any], Holds], ...] = (
    ("an integer", _number(), _n_is(lambda n: isinstance(n, int))),
    ("minimum and maximum", _number(minimum=731, maximum=738), _n_is(lambda n: 731 <= n <= 738)),
    (
        "multipleOf",
        _number(multipleOf=97, minimum=97, maximum=9700),
        _n_is(lambda n: n % 97 == 0 and 97 <= n <= 9700),
    ),
    ("not", _number() | {"not": {"required": ["n"]}}, lambda _value: False),
)


@check(
    "V019",
    "a JSON schema is enforced or refused",
    why="an unsupported keyword that is silently ignored lets invalid data through",
    fix="answer 400 that names the keyword",
)
async def enforced_or_refused(endpoint: Endpoint) -> list[Fault]:
    """Schemas from plain to rarely supported; each answer must hold or the request be refused."""
    if "chat" not in endpoint.apis:
        raise Skip("no chat API")
    faults = []
    refused = 0
    requests = [_request(endpoint, schema) for _, schema, _ in _SCHEMAS]
    completions = await complete_all(endpoint, requests, may_refuse=True)
    for (name, _, holds), request, completion in zip(_SCHEMAS, requests, completions, strict=True):
        refused += completion.refused
        if completion.refused or completion.finish_reason == "length":
            continue
        try:
            valid = holds(orjson.loads(completion.text))
        except (orjson.JSONDecodeError, TypeError):
            valid = False
        if not valid:
            seen: dict[str, object] = {"answer": completion.text}
            faults.append(Fault(f"the answer breaks the schema ({name})", request, seen))
    if refused == len(_SCHEMAS):
        raise Skip("the endpoint refuses JSON schemas")
    return faults


def _request(endpoint: Endpoint, schema: dict[str, Any]) -> Request:
    return endpoint.generation(
        "chat",
        "Give me an object with a number n.",
        max_tokens=48,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "number", "strict": True, "schema": schema},
        },
    )
