"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from typing import Any

from hullspeed.server.generation import Logprob
from hullspeed.text.tokenizer import Tokenizer

LEAST = -9999.0
"""What OpenAI's API writes for log-probabilities that JSON cannot carry (minus infinity)."""


def chat_logprobs(
    tokenizer: Tokenizer, tokens: list[int], logprobs: list[Logprob]
) -> list[dict[str, Any]]:
    """Entries of ``choices[].logprobs.content``."""
    return [
        {
            **_entry(tokenizer, token, logprob),
            "top_logprobs": [_entry(tokenizer, other, value) for other, value in top],
        }
        for token, (logprob, top) in zip(tokens, logprobs, strict=False)
    ]


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.decode_bytes([token], skip_special=False)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": max(logprob, LEAST),
        "bytes": list(raw),
    }


class CompletionLogprobs:
    """``choices[].logprobs`` of ``/v1/completions``; keeps the text offset between chunks."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def of(self, tokens: list[int], logprobs: list[Logprob]) -> dict[str, Any]:
        """The four parallel lists for the tokens that have log-probabilities."""
        text = self._tokenizer.token_text
        names = [text(token) for token in tokens[: len(logprobs)]]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [max(logprob, LEAST) for logprob, _ in logprobs],
            "top_logprobs": [
                {text(token): max(value, LEAST) for token, value in top} for _, top in logprobs
            ],
            "text_offset": offsets,
        }
