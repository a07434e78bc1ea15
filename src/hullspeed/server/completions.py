"""POST /v1/completions."""

from __future__ import annotations

import time

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
    ids = [await _encode(service, prompt, texts.tokenizer.vocab) for prompt in prompts]
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


def split_prompt(prompt: str | list[object], most: int) -> list[str | list[int]]:
    """The prompts in any of the four shapes: text, texts, token ids, lists of token ids.

    Raises:
        RequestError: an empty list, a mixture, or more than ``most`` prompts.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is empty", param="prompt", fix="send text or token ids")
    if all(_is_id(item) for item in prompt):
        return [prompt]  # type: ignore[list-item] # checked above
    if len(prompt) > most:
        raise RequestError(
            "too many prompts in one request",
            seen=len(prompt),
            param="prompt",
            fix=f"send at most {most}",
        )
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)  # type: ignore[arg-type] # checked above
    if all(isinstance(item, list) and all(map(_is_id, item)) for item in prompt):
        return list(prompt)  # type: ignore[arg-type] # checked above
    raise RequestError(
        "prompt is none of text, texts, token ids, lists of token ids", param="prompt"
    )


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


async def _encode(service: Service, prompt: str | list[int], vocab: int) -> list[int]:
    if isinstance(prompt, str):
        return await service.encode(prompt, add_special=True, parse_special=True)
    for token in prompt:
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
