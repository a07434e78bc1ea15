"""Completion: what an answer says, whichever API and whether streamed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from hullspeed.verify.endpoint import Answer, Endpoint, Request


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token, its log-probability, and the likeliest tokens in its place."""

    token: str
    logprob: float
    top: dict[str, float]


@dataclass(slots=True)
class Completion:
    """The first choice of an answer.

    Attributes:
        valid: Whether the answer could be read as a completion at all.
        content_is_null: Chat: ``content`` was null or missing rather than text.
    """

    answer: Answer
    valid: bool = False
    text: str = ""
    reasoning: str = ""
    content_is_null: bool = True
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: list[TokenLogprob] | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    refused: bool = False

    @property
    def tokens(self) -> int | None:
        """Output tokens by usage."""
        return _int(self.usage.get("completion_tokens"))

    @property
    def prompt_tokens(self) -> int | None:
        """Prompt tokens by usage."""
        return _int(self.usage.get("prompt_tokens"))

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens read from the prefix cache, by usage."""
        details = self.usage.get("prompt_tokens_details")
        return _int(details.get("cached_tokens")) if isinstance(details, dict) else None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Unanswered(Exception):  # noqa: N818 - a finding about the endpoint, not our error
    """A request that any endpoint must serve was not served."""

    def __init__(self, completion: Completion) -> None:
        self.answer = completion.answer
        super().__init__(completion.answer.shown)


async def complete(endpoint: Endpoint, request: Request, *, may_refuse: bool = False) -> Completion:
    """Send ``request`` and read its completion.

    Args:
        endpoint: The thing under test.
        request: What to send.
        may_refuse: A 4xx is an answer; look at ``refused``.

    Raises:
        Unanswered: there is no completion in the answer.
    """
    completion = read(await endpoint.send(request))
    if completion.valid or (may_refuse and completion.refused):
        return completion
    raise Unanswered(completion)


async def complete_all(
    endpoint: Endpoint, requests: Iterable[Request], *, may_refuse: bool = False
) -> list[Completion]:
    """Like :func:`complete`, all at once, in the order of ``requests``."""
    return await asyncio.gather(
        *(complete(endpoint, request, may_refuse=may_refuse) for request in requests)
    )


def read(answer: Answer) -> Completion:
    """Read a completion, or one with ``valid`` false."""
    completion = Completion(answer, refused=400 <= answer.status < 500)
    if answer.status != 200 or answer.broken:
        return completion
    bodies = [answer.json]
    if answer.content_type.startswith("text/event-stream"):
        bodies = [_parse(event) for event in answer.events if event != "[DONE]"]
    for body in bodies:
        if not isinstance(body, dict) or body.get("error"):
            return completion
        if isinstance(body.get("usage"), dict):
            completion.usage = body["usage"]
        for choice in body.get("choices") or ():
            if isinstance(choice, dict) and choice.get("index", 0) == 0:
                completion.valid = True
                _add(completion, choice)
    return completion


def _parse(event: str) -> Any:
    try:
        return orjson.loads(event)
    except orjson.JSONDecodeError:
        return None


def _add(completion: Completion, choice: dict[str, Any]) -> None:
    """Add a whole choice, or a piece of one."""
    message = choice.get("message") or choice.get("delta") or {}
    content = choice.get("text", message.get("content"))
    if isinstance(content, str):
        completion.text += content
        completion.content_is_null = False
    completion.reasoning += message.get("reasoning_content") or message.get("reasoning") or ""
    completion.finish_reason = choice.get("finish_reason") or completion.finish_reason
    for call in message.get("tool_calls") or ():
        _add_call(completion.tool_calls, call)
    if isinstance(choice.get("logprobs"), dict):
        completion.logprobs = (completion.logprobs or []) + _logprobs(choice["logprobs"])


def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    index = piece.get("index", len(calls))
    while len(calls) <= index:
        calls.append({"name": "", "arguments": ""})
    function = piece.get("function") or {}
    calls[index]["name"] += function.get("name") or ""
    calls[index]["arguments"] += function.get("arguments") or ""


def _logprobs(found: dict[str, Any]) -> list[TokenLogprob]:
    """Of a chat (``content``) or a completion (parallel lists)."""
    if isinstance(found.get("content"), list):
        return [
            TokenLogprob(
                entry["token"],
                entry["logprob"],
                {other["token"]: other["logprob"] for other in entry.get("top_logprobs") or ()},
            )
            for entry in found["content"]
        ]
    tokens, values = found.get("tokens") or [], found.get("token_logprobs") or []
    tops = found.get("top_logprobs") or [{}] * len(tokens)
    return [
        TokenLogprob(token, value if value is not None else 0.0, top or {})
        for token, value, top in zip(tokens, values, tops, strict=False)
    ]
