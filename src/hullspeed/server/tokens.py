"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from hullspeed.errors import RequestError
from hullspeed.server.body import read_json
from hullspeed.server.chat import check_messages, template_args
from hullspeed.server.schemas import DetokenizeRequest, TokenizeRequest, parse
from hullspeed.server.service import Service


async def tokenize(request: Request) -> Response:
    """Token ids of a text or a conversation, exactly as the engine would see them."""
    service: Service = request.app.state.service
    body = await read_json(request, service.settings.max_body_bytes)
    add_special = body.pop("add_special_tokens", None)
    fields, _ = parse(TokenizeRequest, body)
    if add_special is not None and not isinstance(add_special, bool):
        raise RequestError("add_special_tokens: expected a switch", param="add_special_tokens")
    policy, texts = service.admit()
    policy.model_name(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if fields.messages is not None:
        tokens, _ = await service.encode_chat(
            check_messages(fields.messages),
            add_generation_prompt=fields.add_generation_prompt is not False,
            template_args=template_args(fields.chat_template_kwargs, None),
        )
    else:
        tokens = await service.encode(
            fields.prompt or "", add_special=add_special is not False, parse_special=True
        )
    info = service.info
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": info.max_context_tokens if info else None,
        "tokens": tokens,
    }
    if fields.return_token_strs:
        answer["token_strs"] = [texts.tokenizer.token_text(token) for token in tokens]
    return _json(answer)


async def detokenize(request: Request) -> Response:
    """Text of token ids, control tokens included."""
    service: Service = request.app.state.service
    fields, _ = parse(DetokenizeRequest, await read_json(request, service.settings.max_body_bytes))
    policy, texts = service.admit()
    policy.model_name(fields.model)
    vocab = texts.tokenizer.vocab
    for token in fields.tokens:
        if not 0 <= token < vocab:
            raise RequestError(
                "tokens has an id outside the vocabulary",
                seen=token,
                param="tokens",
                fix=f"use 0 to {vocab - 1}",
            )
    return _json({"prompt": texts.tokenizer.decode(fields.tokens, skip_special=False)})


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
