"""What clients may send: the fields, their types, and what is done with all other fields.

Types are checked here, ranges in ``SamplingParams.check`` and everything that depends on several
fields in ``policy.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from hullspeed.errors import RequestError


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields that all generating routes share; ``null`` always means the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text can be served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message. Fields beyond these that carry something are refused by ``check_messages``."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None


class ChatRequest(GenerationFields, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of ``/v1/completions``. ``prompt``: text, texts, token ids, or lists of token ids."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``/tokenize``: ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: list[int]


# Known fields that change nothing we do: accepted and not mentioned.
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls", "request_id", "include_reasoning",
    "verbosity",
})  # fmt: skip

# Known fields that would change the answer and that are not served yet: refused unless they carry
# one of these values, which mean "nothing asked".
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "include_stop_str_in_output": (None, False),
    "prompt_logprobs": (None,),
    "prompt_embeds": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (None, True),
    "mm_processor_kwargs": (None, {}),
    "add_special_tokens": (None, True),
}

_Body = TypeVar("_Body", bound=msgspec.Struct)
_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_SHOWABLE = re.compile(r"^[A-Za-z0-9_.-]{1,64}$")
_MAX_SHOWN_FIELDS = 16


def parse(kind: type[_Body], body: dict[str, object]) -> tuple[_Body, tuple[str, ...]]:
    """``body`` as ``kind``, and the names of the fields that nobody here knows.

    Raises:
        RequestError: for a missing field, a wrong type, or a field that is not served.
    """
    known = kind.__struct_fields__
    unknown: list[str] = []
    for field, value in body.items():
        if field in known or field in HARMLESS:
            continue
        if field not in NEUTRAL:
            unknown.append(field)
        elif value not in NEUTRAL[field]:
            raise RequestError(
                f"{field} is not supported by this server",
                param=field,
                fix="leave it out",
            )
    try:
        parsed = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _explain(error) from None
    shown = sorted(field for field in unknown if _SHOWABLE.match(field))
    return parsed, tuple(shown[:_MAX_SHOWN_FIELDS])


def _explain(error: msgspec.ValidationError) -> RequestError:
    text = str(error)
    at = _AT.search(text)
    param = at.group(1) if at else None
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
    what = _AT.sub("", text).replace("`", "'")
    return RequestError(f"{param or 'the body'}: {what[:1].lower()}{what[1:]}", param=param)
