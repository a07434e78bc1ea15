"""RequestPolicy: the one place that decides whether and how a request runs, for every route.

Routes turn their own body into a :class:`Job` with it; nothing else sets sampling, limits, salt
or priority, so no route can forget a check.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hullspeed.core.sampling import MAX_LOGIT_BIAS, MAX_N, SamplingParams
from hullspeed.errors import ContextOverflowError, RequestError, UnknownModelError
from hullspeed.runtime.messages import ModelInfo
from hullspeed.server.auth import Tenant
from hullspeed.server.schemas import GenerationFields
from hullspeed.server.settings import ServerSettings
from hullspeed.text.checkpoints import raw_checkpoints

MAX_PRIORITY = 1000
MAX_SALT_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
COMPLETION_MAX_TOKENS = 16
"""Default ``max_tokens`` of ``/v1/completions``, as in OpenAI's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What runs: every prompt ``sampling.n`` times, each with the same rules.

    Attributes:
        max_tokens: For each prompt, the resolved limit of output tokens.
        checkpoints: For each prompt, where recurrent state is worth saving; empty for models
            without.
        ignored: Names of request fields that had no effect; told to the client in a header.
        echo: Put the prompt's text before the output.
    """

    model: str
    prompts: tuple[list[int], ...]
    max_tokens: tuple[int, ...]
    sampling: SamplingParams
    checkpoints: tuple[tuple[int, ...], ...] = ()
    salt: bytes = b""
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    ignored: tuple[str, ...] = ()


class RequestPolicy:
    """Rules of one server and the model it runs.

    Args:
        settings: Caps of the API.
        names: Names the model answers to; the first is the one it reports.
        info: The loaded model.
    """

    def __init__(self, settings: ServerSettings, names: Sequence[str], info: ModelInfo) -> None:
        self._settings = settings
        self._names = tuple(names)
        self._info = info

    def model_name(self, asked: str | None) -> str:
        """The name to report for ``asked``; leaving it out means the model there is.

        Raises:
            UnknownModelError: a name that is not served here.
        """
        if asked is None or asked in self._names:
            return asked or self._names[0]
        raise UnknownModelError(
            "this model is not served here",
            seen=asked,
            param="model",
            fix=f"use {self._names[0]!r}",
        )

    def job(
        self,
        fields: GenerationFields,
        prompts: Sequence[list[int]],
        tenant: Tenant,
        *,
        max_tokens: int | None,
        max_tokens_field: str = "max_tokens",
        logprobs: int | None = None,
        echo: bool = False,
        ignored: tuple[str, ...] = (),
        checkpoints: Sequence[tuple[int, ...]] | None = None,
    ) -> Job:
        """Everything checked and every default filled in. ``checkpoints`` are each prompt's; those
        of prompts that are no chat unless given.

        Raises:
            RequestError: naming the field at fault.
        """
        sampling = self._sampling(fields, max_tokens, max_tokens_field, logprobs)
        self._check_counts(prompts, sampling.n)
        limits = tuple(self._limit(prompt, max_tokens, max_tokens_field) for prompt in prompts)
        if sampling.min_tokens > min(limits):
            raise RequestError(
                "min_tokens is more than the output may have",
                seen=sampling.min_tokens,
                param="min_tokens",
                fix=f"use at most {min(limits)}",
            )
        stream = bool(fields.stream)
        options = fields.stream_options
        if options is not None and not stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        return Job(
            model=self.model_name(fields.model),
            prompts=tuple(prompts),
            max_tokens=limits,
            sampling=sampling,
            checkpoints=self._checkpoints(prompts, checkpoints),
            salt=self._salt(tenant, fields.cache_salt),
            priority=_within("priority", fields.priority or 0, -MAX_PRIORITY, MAX_PRIORITY),
            stream=stream,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            return_token_ids=bool(fields.return_token_ids),
            skip_special_tokens=fields.skip_special_tokens is not False,
            echo=echo,
            ignored=ignored,
        )

    @property
    def keeps_states(self) -> bool:
        """Whether the model keeps something at places of a prompt that is worth saving there:
        recurrent states, or pages of windows.
        """
        return self._info.keeps_ends

    def _checkpoints(
        self, prompts: Sequence[list[int]], given: Sequence[tuple[int, ...]] | None
    ) -> tuple[tuple[int, ...], ...]:
        if not self.keeps_states:
            return ()
        return tuple(given) if given else tuple(raw_checkpoints(len(p)) for p in prompts)

    def _sampling(
        self,
        fields: GenerationFields,
        max_tokens: int | None,
        max_tokens_field: str,
        logprobs: int | None,
    ) -> SamplingParams:
        vocab = self._info.vocab
        if max_tokens is not None:
            _within(max_tokens_field, max_tokens, 1, None)
        stop = fields.stop or ()
        top_k = fields.top_k or 0
        given = {
            "min_tokens": fields.min_tokens,
            "temperature": fields.temperature,
            "top_p": fields.top_p,
            "min_p": fields.min_p,
            "presence_penalty": fields.presence_penalty,
            "frequency_penalty": fields.frequency_penalty,
            "repetition_penalty": fields.repetition_penalty,
            "seed": fields.seed,
            "n": fields.n,
            "ignore_eos": fields.ignore_eos,
        }
        sampling = SamplingParams(
            max_tokens=max_tokens,
            top_k=0 if top_k == -1 else min(top_k, vocab),
            logit_bias=_logit_bias(fields.logit_bias),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=_capped(
                "stop_token_ids", tuple(fields.stop_token_ids or ()), MAX_STOP_TOKEN_IDS
            ),
            logprobs=logprobs,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
        sampling.check(vocab)
        return sampling

    def _check_counts(self, prompts: Sequence[list[int]], n: int) -> None:
        if len(prompts) > self._settings.max_prompts:
            raise RequestError(
                "too many prompts in one request",
                seen=len(prompts),
                param="prompt",
                fix=f"send at most {self._settings.max_prompts}",
            )
        if len(prompts) * n > self._settings.max_sequences:
            raise RequestError(
                "prompts times n is too large",
                seen=len(prompts) * n,
                param="n",
                fix=f"ask for at most {self._settings.max_sequences} (n: at most {MAX_N})",
            )

    def check_prompt_tokens(self, n_tokens: int, *, at_least: bool = False) -> None:
        """Refuse a prompt of ``n_tokens`` (or more) that leaves no room for output.

        Raises:
            ContextOverflowError: naming both lengths.
        """
        context = self._info.max_context_tokens
        if n_tokens >= context:
            raise ContextOverflowError(
                f"the prompt has {'at least ' if at_least else ''}{n_tokens} tokens, "
                f"the context only {context}",
                param="prompt",
                fix=f"send at most {context - 1} tokens",
            )

    def _limit(self, prompt: list[int], max_tokens: int | None, field: str) -> int:
        context = self._info.max_context_tokens
        if not prompt:
            raise RequestError("the prompt has no tokens", param="prompt", fix="send some text")
        self.check_prompt_tokens(len(prompt))
        room = context - len(prompt)
        if max_tokens is not None and max_tokens > room:
            raise ContextOverflowError(
                f"{len(prompt)} prompt tokens and {max_tokens} output tokens "
                f"exceed the context of {context}",
                param=field,
                fix=f"ask for at most {room}",
            )
        return room if max_tokens is None else max_tokens

    def _salt(self, tenant: Tenant, cache_salt: str | None) -> bytes:
        if cache_salt is None:
            return tenant.salt
        if not 0 < len(cache_salt) <= MAX_SALT_CHARS:
            raise RequestError(
                "cache_salt has the wrong length",
                seen=len(cache_salt),
                param="cache_salt",
                fix=f"use 1 to {MAX_SALT_CHARS} characters",
            )
        return hashlib.sha256(tenant.salt + b"\0" + cache_salt.encode()).digest()[:16]


def _within(name: str, value: int, low: int, high: int | None) -> int:
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise RequestError(f"{name} is out of range", seen=value, param=name, fix=f"use {allowed}")
    return value


def _capped(name: str, values: tuple[int, ...], most: int) -> tuple[int, ...]:
    if len(values) > most:
        raise RequestError(
            f"{name} has too many entries", seen=len(values), param=name, fix=f"use at most {most}"
        )
    return values


_TOKEN_ID = re.compile(r"^\d{1,9}$", re.ASCII)


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    if given is not None and len(given) > MAX_LOGIT_BIAS:
        raise RequestError(
            "logit_bias has too many entries",
            seen=len(given),
            param="logit_bias",
            fix=f"use at most {MAX_LOGIT_BIAS}",
        )
    for token in given or {}:
        if not _TOKEN_ID.match(token):
            raise RequestError(
                "logit_bias has a key that is no token id",
                seen=token,
                param="logit_bias",
                fix='use token ids in quotes, as in {"50256": -100}',
            )
    return {int(token): bias for token, bias in (given or {}).items()}
