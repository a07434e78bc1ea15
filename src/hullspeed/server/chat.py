"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hullspeed.errors import RequestError
from hullspeed.server.answer import Answer
from hullspeed.server.body import read_json
from hullspeed.server.schemas import ChatMessage, ChatRequest, parse
from hullspeed.server.service import Service
from hullspeed.server.wire import ChatWire

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
TEMPLATE_ARGS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "date_string"})
"""Template arguments a client may set: known switches, none of the template's own inputs."""
MAX_MESSAGES = 4096


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    arrival_s = time.monotonic()
    service: Service = request.app.state.service
    fields, ignored = parse(ChatRequest, await read_json(request, service.settings.max_body_bytes))
    policy, texts = service.admit()
    policy.model_name(fields.model)
    prompt = await service.encode_chat(
        check_messages(fields.messages),
        add_generation_prompt=fields.add_generation_prompt is not False,
        template_args=template_args(fields.chat_template_kwargs, fields.reasoning_effort),
    )
    new_name = fields.max_completion_tokens is not None
    job = policy.job(
        fields,
        [prompt.tokens],
        request.scope["tenant"],
        max_tokens=fields.max_completion_tokens if new_name else fields.max_tokens,
        max_tokens_field="max_completion_tokens" if new_name else "max_tokens",
        logprobs=_logprobs(fields),
        ignored=ignored,
        checkpoints=[prompt.checkpoints],
    )
    generation = service.start(job, arrival_s)
    return Answer(generation, ChatWire(generation, texts.tokenizer))


def check_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """``messages`` as templates take them.

    Raises:
        RequestError: naming the message and the part of it that cannot be served.
    """
    if not messages:
        raise RequestError("messages is empty", param="messages", fix="send at least one")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            "too many messages", seen=len(messages), param="messages", fix=f"send {MAX_MESSAGES}"
        )
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def template_args(given: Mapping[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
    """What the client may pass to the template.

    Raises:
        RequestError: a name that is not on the list, or a value that is not a plain one.
    """
    args = dict(given or {})
    if reasoning_effort is not None:
        args.setdefault("reasoning_effort", reasoning_effort)
    for name, value in args.items():
        if name not in TEMPLATE_ARGS:
            raise RequestError(
                "chat_template_kwargs has a name that clients may not set",
                seen=name,
                param="chat_template_kwargs",
                fix=f"use {', '.join(sorted(TEMPLATE_ARGS))}",
            )
        if not isinstance(value, bool | str | int) or len(str(value)) > 64:
            raise RequestError(
                f"chat_template_kwargs.{name} is not a short text, a number or a switch",
                param="chat_template_kwargs",
            )
    return args


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role is not known",
            seen=message.role,
            param=f"{where}.role",
            fix=f"use {', '.join(sorted(ROLES))}",
        )
    for field in ("tool_calls", "function_call", "audio", "tool_call_id"):
        if getattr(message, field):
            raise RequestError(
                f"{where}.{field} is not supported by this server",
                param=f"{where}.{field}",
                fix="leave it out",
            )
    plain: dict[str, Any] = {"role": message.role, "content": _content(message, where)}
    for field in ("name", "reasoning_content", "reasoning"):
        value = getattr(message, field)
        if value is not None:
            plain[field] = value
    return plain


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(f"{where}.content is missing", param=f"{where}.content", fix="send text")
    texts = []
    for i, part in enumerate(content):
        if part.type not in ("text", "input_text") or part.text is None:
            raise RequestError(
                f"{where}.content[{i}] is not text",
                seen=part.type,
                param=f"{where}.content[{i}].type",
                fix="this server takes text only",
            )
        texts.append(part.text)
    return "\n".join(texts)


def _logprobs(fields: ChatRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return None
