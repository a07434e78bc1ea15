"""Reply: what a recorded exchange says, read after the run.

A token counts from the first chunk that carries text, reasoning or a tool call. Chunks with only a
role, empty text or usage are not tokens, and neither are keep-alive comments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from hullspeed.bench.http1 import Exchange
from hullspeed.sse import SseParser


@dataclass(slots=True)
class Chunk:
    """One event that carried generated tokens.

    Attributes:
        at_s: Monotonic time of the socket read that completed the event.
        text: Everything it carried, of any channel.
        is_answer: Whether it carried answer text or a tool call, rather than only reasoning.
        tokens: Tokens in it; set from usage once the reply is whole.
    """

    at_s: float
    text: str
    is_answer: bool
    tokens: int = 1


@dataclass(slots=True)
class Reply:
    """One request's outcome.

    Attributes:
        failure: Empty for a success, else the kind (see :func:`failure_of`).
        prompt_tokens, output_tokens, cached_tokens: From the server's usage; None if unsaid.
        counts: How ``Chunk.tokens`` was found: ``single`` (one each, as usage confirms),
            ``usage`` (running usage on every chunk), ``length`` (spread by text length so that the
            sum is usage's) or ``chunks`` (no usage: chunks were counted as tokens).
    """

    exchange: Exchange
    chunks: list[Chunk] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    counts: str = "chunks"
    done_events: int = 0
    error: str = ""
    failure: str = ""

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, else the chunks."""
        return len(self.chunks) if self.output_tokens is None else self.output_tokens


def read_reply(exchange: Exchange, *, asked_tokens: int | None) -> Reply:
    """Interpret a streamed completion.

    Args:
        exchange: What the client recorded.
        asked_tokens: Output length that makes a success; None when any length does.
    """
    reply = Reply(exchange)
    running: list[int | None] = []
    if exchange.status == 200:
        parser = SseParser()
        for at_s, piece in exchange.pieces:
            for event in parser.feed(piece):
                _read_event(reply, running, at_s, event.data, event.event)
    elif exchange.status:
        reply.error = exchange.body[:300].decode("utf-8", "replace")
    _count_tokens(reply, running)
    reply.failure = failure_of(reply, asked_tokens)
    return reply


def failure_of(reply: Reply, asked_tokens: int | None) -> str:
    """The first rule that the reply breaks, or an empty string.

    A success is: complete response, 200, no error event, tokens, a finish reason, ``[DONE]``, and
    the length that was asked for.
    """
    exchange = reply.exchange
    rules = (
        (bool(exchange.failure), exchange.failure),
        (exchange.status != 200, f"http_{exchange.status}"),
        (bool(reply.error), "error_event"),
        (not reply.chunks or reply.tokens == 0, "no_tokens"),
        (reply.finish_reason is None, "no_finish_reason"),
        (reply.finish_reason not in ("stop", "length", "tool_calls"), "aborted"),
        (reply.done_events != 1, "no_done" if not reply.done_events else "many_done"),
        (
            asked_tokens is not None
            and reply.output_tokens is not None
            and reply.output_tokens != asked_tokens,
            "length",
        ),
    )
    return next((kind for broken, kind in rules if broken), "")


def _read_event(reply: Reply, running: list[int | None], at_s: float, data: str, name: str) -> None:
    if data == "[DONE]":
        reply.done_events += 1
        return
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        reply.error = reply.error or f"not JSON: {data[:200]}"
        return
    if not isinstance(event, dict) or event.get("error") or name == "error":
        reply.error = reply.error or data[:300]
        return
    usage = event.get("usage")
    seen = _read_usage(reply, usage) if isinstance(usage, dict) else None
    text = answer = ""
    for choice in event.get("choices") or ():
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        answered, reasoned = _texts(choice)
        answer += answered
        text += reasoned + answered
    if text:
        reply.chunks.append(Chunk(at_s, text, bool(answer)))
        reply.text += answer
        running.append(seen)


def _texts(choice: dict[str, Any]) -> tuple[str, str]:
    """Answer and reasoning text of one choice, for either API."""
    delta = choice.get("delta") or {}
    answer = (choice.get("text") or "") + (delta.get("content") or "")
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        answer += (function.get("name") or "") + (function.get("arguments") or "")
    return answer, (delta.get("reasoning_content") or delta.get("reasoning") or "")


def _read_usage(reply: Reply, usage: dict[str, Any]) -> int | None:
    reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
    reply.output_tokens = usage.get("completion_tokens", reply.output_tokens)
    details = usage.get("prompt_tokens_details") or {}
    reply.cached_tokens = details.get("cached_tokens", reply.cached_tokens)
    return usage.get("completion_tokens")


def _count_tokens(reply: Reply, running: list[int | None]) -> None:
    """Give every chunk its number of tokens."""
    chunks, total = reply.chunks, reply.output_tokens
    if total is None or not chunks:
        return
    known = [n for n in running if n is not None]
    if len(known) == len(chunks) and known == sorted(known) and known[-1] == total:
        reply.counts = "usage"
        for chunk, before, now in zip(chunks, [0, *known], known, strict=False):
            chunk.tokens = now - before
    elif total == len(chunks):
        reply.counts = "single"
    else:
        reply.counts = "length"
        _spread(chunks, total)


def _spread(chunks: list[Chunk], total: int) -> None:
    """Share ``total`` tokens among the chunks in proportion to their text, summing exactly."""
    weight = sum(len(chunk.text) for chunk in chunks)
    passed = given = 0
    for chunk in chunks:
        passed += len(chunk.text)
        upto = round(total * passed / weight)
        chunk.tokens, given = upto - given, upto
