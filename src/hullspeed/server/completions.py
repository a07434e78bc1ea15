"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hullspeed.errors import RequestError
from hullspeed.server.answer import Answer
from hullspeed.server.body import read_json
from hullspeed.server.policy import COMPLETION_MAX_TOKENS
from hullspeed.server.schemas import CompletionRequest, parse
from hullspeed.server.service import Service
from hullspeed.server.wire import CompletionWire


async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    arrival_s = time.monotonic()
    service: Service = request.app.state.service
    fields, ignored = parse(
        CompletionRequest, await read_json(request, service.settings.max_body_bytes)
    )
    policy, texts = service.admit()
    policy.model_name(fields.model)
    _check_together(fields)
    prompts = split_prompt(fields.prompt, service.settings.max_prompts)
    ids = [await _encode(service, prompt) for prompt in prompts]
    job = policy.job(
        fields,
        ids,
        request.scope["tenant"],
        max_tokens=COMPLETION_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens,
        logprobs=fields.logprobs,
        echo=bool(fields.echo),
        ignored=ignored,
    )
    generation = service.start(job, arrival_s)
    return Answer(generation, CompletionWire(generation, texts.tokenizer))


def split_prompt(prompt: str | list[Any], most: int) -> list[str | list[Any]]:
    """The prompts in any of the four shapes: text, texts, token ids, lists of token ids.

    Only the outer shape is checked here, so that nothing long is walked through before its length
    is known to be allowed.

    Raises:
        RequestError: an empty list, a mixture, or more than ``most`` prompts.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is empty", param="prompt", fix="send text or token ids")
    if _is_id(prompt[0]):
        return [prompt]
    if len(prompt) > most:
        raise RequestError(
            "too many prompts in one request",
            seen=len(prompt),
            param="prompt",
            fix=f"send at most {most}",
        )
    for kind in (str, list):
        if all(isinstance(item, kind) for item in prompt):
            return prompt
    raise _no_prompt()


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _no_prompt() -> RequestError:
    return RequestError(
        "prompt is none of text, texts, token ids, lists of token ids", param="prompt"
    )


async def _encode(service: Service, prompt: str | list[Any]) -> list[int]:
    if isinstance(prompt, str):
        return await service.encode(prompt, add_special=True, parse_special=True)
    policy, texts = service.admit()
    policy.check_prompt_tokens(len(prompt))
    vocab = texts.tokenizer.vocab
    for token in prompt:
        if not _is_id(token):
            raise _no_prompt()
        if not 0 <= token < vocab:
            raise RequestError(
                "prompt has a token id outside the vocabulary",
                seen=token,
                param="prompt",
                fix=f"use 0 to {vocab - 1}",
            )
    return prompt


def _check_together(fields: CompletionRequest) -> None:
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise RequestError(
            "best_of other than n is not supported by this server",
            seen=fields.best_of,
            param="best_of",
            fix="leave it out",
        )
    if fields.echo and fields.logprobs is not None:
        raise RequestError(
            "echo with logprobs is not supported by this server",
            param="echo",
            fix="leave one of them out",
        )
