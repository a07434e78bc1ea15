"""Completion and CompletionChunk: what the library face gives back."""

from __future__ import annotations

from dataclasses import dataclass

from hullspeed.core.sampling import SamplingParams
from hullspeed.core.step import TokenLogprob
from hullspeed.runtime.messages import Delta
from hullspeed.runtime.process import delta_error
from hullspeed.text.stream import TextStream
from hullspeed.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities at one output position.

    Attributes:
        chosen: The token of the output.
        top: Likeliest tokens, likeliest first.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """What one step added to a completion.

    Attributes:
        text: Text that is certain now; may be empty while a character or a possible stop string
            is incomplete.
        token_ids: Tokens of this chunk.
        index: Which of the ``n`` completions.
        finish_reason: "stop" or "length" on the last chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: str | None = None
    logprobs: tuple[Logprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion.

    Attributes:
        text: Without the stop string or end token that ended it.
        token_ids: Output tokens, an end token included.
        finish_reason: "stop" or "length".
        prompt_tokens: Length of the prompt.
        cached_tokens: How many of those came from the prefix cache.
        logprobs: One a token, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[Logprobs, ...] | None = None


class Collector:
    """One completion on its way: deltas in, chunks out.

    Attributes:
        finish_reason: Set once it is complete; later deltas give nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, *, prompt_tokens: int, index: int
    ) -> None:
        self.finish_reason: str | None = None
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = 0
        self._stream = TextStream(tokenizer, stop=sampling.stop, min_tokens=sampling.min_tokens)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] | None = None if sampling.logprobs is None else []

    def take(self, delta: Delta) -> CompletionChunk | None:
        """Add ``delta``; ``None`` if the completion was complete before.

        Raises:
            HullspeedError: if it says that the request failed.
        """
        if self.finish_reason is not None:
            return None
        if delta.finish in ("error", "cancelled"):
            self.finish_reason = delta.finish
            raise delta_error(delta)
        # The token that ended it is no part of the text, whether it is control or not.
        shown = delta.tokens[:-1] if delta.finish == "stop" else delta.tokens
        text = self._stream.push(shown)
        if delta.finish is not None:
            text += self._stream.finish()
        self.finish_reason = "stop" if self._stream.stopped is not None else delta.finish
        logprobs = self._take_logprobs(delta)
        self._text.append(text)
        self._tokens += delta.tokens
        if delta.cached_tokens is not None:
            self._cached_tokens = delta.cached_tokens
        return CompletionChunk(text, tuple(delta.tokens), self._index, self.finish_reason, logprobs)

    def completion(self) -> Completion:
        """The whole, once ``finish_reason`` is set."""
        return Completion(
            "".join(self._text),
            tuple(self._tokens),
            self.finish_reason or "",
            self._prompt_tokens,
            self._cached_tokens,
            None if self._logprobs is None else tuple(self._logprobs),
        )

    def _take_logprobs(self, delta: Delta) -> tuple[Logprobs, ...] | None:
        if self._logprobs is None:
            return None
        new = tuple(
            Logprobs(TokenLogprob(token, value), tuple(TokenLogprob(*pair) for pair in top))
            for token, (value, top) in zip(delta.tokens, delta.logprobs or (), strict=True)
        )
        self._logprobs += new
        return new
