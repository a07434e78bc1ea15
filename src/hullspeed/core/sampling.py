"""SamplingParams: how the next token is chosen and when a request ends."""

from __future__ import annotations

import math

import msgspec

from hullspeed.errors import RequestError

MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen; greedy when ``temperature`` is 0.

    Attributes:
        max_tokens: Most output tokens; ``None`` means up to the end of the context.
        min_tokens: End tokens and stop strings are ignored before this many output tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: Keep the smallest set of tokens whose probabilities reach this sum, in (0, 1].
        top_k: Keep the k most likely tokens; 0 keeps all.
        min_p: Drop tokens less likely than ``min_p`` times the most likely one, in [0, 1].
        presence_penalty: Subtracted from the logit of every token already in the output.
        frequency_penalty: Subtracted once per occurrence in the output.
        repetition_penalty: Divides positive and multiplies negative logits of tokens already in
            prompt or output; 1 is off.
        logit_bias: Added to the logits of these token ids.
        seed: Makes the request's own random stream repeatable; ``None`` draws one.
        n: Number of independent completions of the same prompt.
        stop: Strings that end the output; they are not part of it.
        stop_token_ids: Token ids that end the output besides the model's own end tokens.
        ignore_eos: Do not stop at any end token.
        logprobs: ``None`` for none; otherwise the chosen token's log-probability and this many
            most likely alternatives (0..20).
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def check(self, vocab: int) -> None:
        """Raise :class:`RequestError` for the first value out of range.

        Called at the API and again at the engine's door: no front end is trusted alone.
        """
        ranges: tuple[tuple[str, float, float, float], ...] = (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, vocab),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("n", self.n, 1, MAX_N),
            ("min_tokens", self.min_tokens, 0, 2**31),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:
                raise RequestError(
                    f"{name} is out of range", seen=value, param=name, fix=f"use {low} to {high}"
                )
        self._check_rest(vocab)

    def _check_rest(self, vocab: int) -> None:
        if not 0.0 < self.top_p <= 1.0:
            raise _out("top_p", self.top_p, "a value above 0 and up to 1")
        if not (0.0 < self.repetition_penalty <= 10.0):
            raise _out(
                "repetition_penalty", self.repetition_penalty, "a value above 0 and up to 10"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _out("max_tokens", self.max_tokens, "at least 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _out("min_tokens", self.min_tokens, "at most max_tokens")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise _out("logprobs", self.logprobs, f"0 to {MAX_LOGPROBS}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise _out("seed", self.seed, "a 64-bit integer")
        if len(self.stop) > MAX_STOP_STRINGS or any(not 0 < len(s) <= 1024 for s in self.stop):
            raise _out(
                "stop", self.stop, f"at most {MAX_STOP_STRINGS} strings of 1..1024 characters"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _out("logit_bias", len(self.logit_bias), f"at most {MAX_LOGIT_BIAS} tokens")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab or not math.isfinite(bias) or abs(bias) > 100:
                raise _out("logit_bias", {token: bias}, "known token ids and values of -100 to 100")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab:
                raise _out("stop_token_ids", token, f"token ids below {vocab}")


def _out(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name} is out of range", seen=value, param=name, fix=f"use {allowed}")
