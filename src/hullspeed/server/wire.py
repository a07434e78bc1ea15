"""Pieces of text as the bytes of an answer: server-sent events, or one JSON body.

A plain token costs one ``bytes`` join: everything around the text of a chunk is prepared once for
each request. Chunks that carry more (log-probabilities, token ids, running usage) are built whole.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any

import orjson

from hullspeed.errors import HullspeedError
from hullspeed.server.errors import error_body, to_api_error
from hullspeed.server.generation import Generation, Piece, Usage
from hullspeed.server.logprobs import CompletionLogprobs, chat_logprobs
from hullspeed.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


def sse(value: object) -> bytes:
    """``value`` as one server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_event(error: HullspeedError) -> bytes:
    """The last event of a stream that failed."""
    return b"data: " + error_body(to_api_error(error)) + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    """``usage`` as OpenAI writes it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Wire(ABC):
    """How one route writes the pieces of one generation."""

    chunk_object: str
    body_object: str
    id_prefix: str

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self.job = generation.job
        self.tokenizer = tokenizer
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        job = self.job
        self._plain = not (
            job.return_token_ids or job.continuous_usage or job.sampling.logprobs is not None
        )
        self._heads = [self._head(c.index) for c in generation.completions]
        self._tail = self._make_tail()

    @abstractmethod
    def opening(self) -> bytes:
        """Events before the first token."""

    @abstractmethod
    def delta(self, piece: Piece) -> dict[str, Any]:
        """The text-carrying part of a chunk's choice."""

    @abstractmethod
    def _head(self, index: int) -> bytes:
        """A plain chunk's bytes before its text."""

    @abstractmethod
    def _make_tail(self) -> bytes:
        """A plain chunk's bytes after its text."""

    @abstractmethod
    def logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """``logprobs`` of a chunk's choice."""

    @abstractmethod
    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """A whole choice of a body that is not streamed."""

    def events(self, pieces: list[Piece]) -> bytes:
        """Chunks for ``pieces``."""
        frames = []
        for piece in pieces:
            if piece.finish is not None:
                frames.append(self._last(piece))
            elif not self._plain:
                frames.append(self._chunk([self._full(piece)]))
            elif piece.text:
                text = orjson.dumps(piece.text)
                frames.append(self._heads[piece.index] + text + self._tail)
        return b"".join(frames)

    def ending(self) -> bytes:
        """Events after the last token."""
        if not self.job.include_usage:
            return DONE
        return (
            sse({**self._base(), "choices": [], "usage": usage_json(self.generation.usage)}) + DONE
        )

    def body(self, pieces: list[Piece]) -> bytes:
        """The answer of a request that is not streamed."""
        by_index: list[list[Piece]] = [[] for _ in self.generation.completions]
        for piece in pieces:
            by_index[piece.index].append(piece)
        return orjson.dumps(
            {
                "id": self.id,
                "object": self.body_object,
                "created": self.created,
                "model": self.job.model,
                "choices": [self.choice(i, own) for i, own in enumerate(by_index)],
                "usage": usage_json(self.generation.usage),
            }
        )

    def prompt_of(self, index: int) -> list[int]:
        """Prompt of the completion ``index``."""
        return self.job.prompts[index // self.job.sampling.n]

    def _base(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.chunk_object,
            "created": self.created,
            "model": self.job.model,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = {**self._base(), "choices": choices}
        if self.job.continuous_usage:
            chunk["usage"] = usage_json(self.generation.usage)
        elif self.job.include_usage:
            chunk["usage"] = None
        return sse(chunk)

    def _full(self, piece: Piece) -> dict[str, Any]:
        choice = {
            "index": piece.index,
            **self.delta(piece),
            "logprobs": self.logprobs(piece),
            "finish_reason": None,
        }
        if self.job.return_token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _last(self, piece: Piece) -> bytes:
        """The rest of the text, then a chunk that has nothing but the reason."""
        before = b""
        if piece.text or not self._plain:
            before = self._chunk([self._full(piece)])
        nothing = Piece(piece.index, "", [])
        choice = {
            "index": piece.index,
            **self.delta(nothing),
            "logprobs": None,
            "finish_reason": piece.finish,
            "stop_reason": piece.stop,
        }
        return before + self._chunk([choice])

    def _json_around(self, choice_head: str, choice_tail: str) -> tuple[bytes, bytes]:
        head = b"data: " + orjson.dumps(self._base())[:-1] + b',"choices":[' + choice_head.encode()
        usage = ',"usage":null' if self.job.include_usage else ""
        return head, f"{choice_tail}]{usage}}}\n\n".encode()

    def _whole(self, pieces: list[Piece]) -> tuple[str, list[int], dict[str, Any]]:
        """Text, tokens and the closing fields of a choice that is not streamed."""
        tokens = [token for piece in pieces for token in piece.tokens]
        closing: dict[str, Any] = {
            "finish_reason": pieces[-1].finish,
            "stop_reason": pieces[-1].stop,
        }
        if self.job.return_token_ids:
            closing["token_ids"] = tokens
            closing["prompt_token_ids"] = self.prompt_of(pieces[0].index)
        return "".join(piece.text for piece in pieces), tokens, closing


class ChatWire(Wire):
    """``/v1/chat/completions``."""

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"
    id_prefix = "chatcmpl"

    def opening(self) -> bytes:
        """A chunk with the role for each choice."""
        frames = []
        for completion in self.generation.completions:
            choice: dict[str, Any] = {
                "index": completion.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            if self.job.return_token_ids:
                choice["prompt_token_ids"] = self.prompt_of(completion.index)
            frames.append(self._chunk([choice]))
        return b"".join(frames)

    def delta(self, piece: Piece) -> dict[str, Any]:
        """``delta`` with the text, or empty."""
        return {"delta": {"content": piece.text} if piece.text or piece.tokens else {}}

    def _head(self, index: int) -> bytes:
        return self._json_around(f'{{"index":{index},"delta":{{"content":', "")[0]

    def _make_tail(self) -> bytes:
        return self._json_around("", '},"logprobs":null,"finish_reason":null}')[1]

    def logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """``content`` entries of the piece's tokens."""
        if piece.logprobs is None:
            return None
        return {
            "content": chat_logprobs(self.tokenizer, piece.tokens, piece.logprobs),
            "refusal": None,
        }

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """``message`` with the whole text."""
        text, _, closing = self._whole(pieces)
        entries = [e for p in pieces if (found := self.logprobs(p)) for e in found["content"]]
        asked = self.job.sampling.logprobs is not None
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": {"content": entries, "refusal": None} if asked else None,
            **closing,
        }


class CompletionWire(Wire):
    """``/v1/completions``."""

    chunk_object = "text_completion"
    body_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        super().__init__(generation, tokenizer)
        self._echoes = [self._echo(c.index) for c in generation.completions]
        self._logprobs = [CompletionLogprobs(tokenizer, len(echo)) for echo in self._echoes]

    def opening(self) -> bytes:
        """The prompt's text, where it is echoed."""
        return b"".join(
            self._heads[index] + orjson.dumps(echo) + self._tail
            for index, echo in enumerate(self._echoes)
            if echo
        )

    def delta(self, piece: Piece) -> dict[str, Any]:
        """``text``."""
        return {"text": piece.text}

    def _head(self, index: int) -> bytes:
        return self._json_around(f'{{"index":{index},"text":', "")[0]

    def _make_tail(self) -> bytes:
        return self._json_around("", ',"logprobs":null,"finish_reason":null}')[1]

    def logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """The four lists of the piece's tokens."""
        if piece.logprobs is None:
            return None
        return self._logprobs[piece.index].of(piece.tokens, piece.logprobs)

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """``text``, after the prompt's if it is echoed."""
        text, tokens, closing = self._whole(pieces)
        logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
        asked = self.job.sampling.logprobs is not None
        return {
            "index": index,
            "text": self._echoes[index] + text,
            "logprobs": self._logprobs[index].of(tokens, logprobs) if asked else None,
            **closing,
        }

    def _echo(self, index: int) -> str:
        return self.tokenizer.decode(self.prompt_of(index)) if self.job.echo else ""
