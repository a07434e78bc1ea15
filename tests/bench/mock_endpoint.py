"""An endpoint whose schedule is the truth: every event leaves at a time fixed in advance."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_CHANNELS = ("content", "reasoning_content")


@dataclass
class Truth:
    """How the mock answers.

    Attributes:
        early_role_s: Send a chunk with only a role at this time.
        tokens_per_chunk: Tokens in one event.
        reasoning_tokens: So many tokens come as reasoning first.
        freeze: (token index, seconds): silence before that token.
        stall: (from, to) seconds after the first measured request in which nothing is sent.
        end: ``good``, or how the stream goes wrong after half of its tokens.
        bad_every: Only every n-th request goes wrong.
        line_end, piece_bytes, pings: How the bytes look on the wire.
        max_tokens_kept: Answers stop here whatever was asked.
        cached_tokens: What usage reports, or None for no details.
    """

    ttft_s: float = 0.02
    itl_s: float = 0.002
    early_role_s: float | None = None
    tokens_per_chunk: int = 1
    reasoning_tokens: int = 0
    freeze: tuple[int, float] | None = None
    stall: tuple[float, float] | None = None
    end: str = "good"
    bad_every: int = 1
    line_end: bytes = b"\n"
    piece_bytes: int | None = None
    pings: bool = False
    usage: bool = True
    running_usage: bool = False
    max_tokens_kept: int = 10**9
    cached_tokens: int | None = 0
    tokenize: bool = True
    slots: int = 10**9
    extra_prompt_tokens: int = 0
    close_after_each: bool = False
    content_length: bool = False


@dataclass
class MockEndpoint:
    truth: Truth
    url: str = ""
    prompts: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sent_s: list[list[float]] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    in_flight_max: int = 0
    _in_flight: int = 0
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                size = 0
                for line in head.split(b"\r\n"):
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        size = int(value)
                body = json.loads(await reader.readexactly(size)) if size else {}
                await self._route(path, body, writer)
                await writer.drain()
                if self.truth.close_after_each:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _route(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            _reply(writer, 200, {"data": [{"id": "mock"}]})
        elif path == "/tokenize" and self.truth.tokenize:
            count = _count(body["prompt"])
            _reply(writer, 200, {"count": count, "tokens": list(range(count))})
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self._in_flight += 1
            self.in_flight_max = max(self.in_flight_max, self._in_flight)
            try:
                await self._complete(path.startswith("/v1/chat"), body, writer)
            finally:
                self._in_flight -= 1
        else:
            _reply(writer, 404, {"error": {"message": "no such path"}})

    async def _complete(
        self, chat: bool, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        start_s = time.perf_counter()
        truth = self.truth
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        self.prompts.append(prompt)
        self.arrived_s.append(start_s)
        self.bodies.append(body)
        sent_s: list[float] = []
        self.sent_s.append(sent_s)
        bad = truth.end if len(self.prompts) % truth.bad_every == 0 else "good"
        if bad == "http_500":
            _reply(writer, 500, {"error": {"message": "planted"}})
            return
        if truth.content_length:
            data = b"".join(
                _sse(event, b"\n") for _, event in self._events(chat, prompt, body, bad)
            )
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
                % len(data)
            )
            writer.write(data)
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for at_s, event in self._events(chat, prompt, body, bad):
            await _until(start_s + at_s)
            await self._until_unstalled()
            if event == "cut":
                writer.transport.abort()
                return
            if isinstance(event, dict) and _carries_tokens(event):
                sent_s.append(time.perf_counter() - start_s)
            await self._write(writer, event)
        writer.write(b"0\r\n\r\n")

    def ttft_s(self, token: int = 0) -> float:
        """Median time at which an event of the measured requests really left (warm-up aside)."""
        return statistics.median(times_s[token] for times_s in self.sent_s[1:])

    def arrival_gaps_s(self) -> list[float]:
        """Between the arrivals of the measured requests."""
        return [after - before for before, after in pairwise(self.arrived_s[1:])]

    def longest_gaps_s(self) -> list[float]:
        """Of each measured request, the longest time between events really sent."""
        return [max(b - a for a, b in pairwise(times_s)) for times_s in self.sent_s[1:]]

    def gap_s(self) -> float:
        """Mean time between events really sent."""
        return statistics.mean(
            (times_s[-1] - times_s[0]) / (len(times_s) - 1) for times_s in self.sent_s[1:]
        )

    async def _until_unstalled(self) -> None:
        if self.truth.stall and len(self.arrived_s) > 1:
            since_s = time.perf_counter() - self.arrived_s[1]
            if self.truth.stall[0] <= since_s < self.truth.stall[1]:
                await asyncio.sleep(self.truth.stall[1] - since_s)

    async def _write(self, writer: asyncio.StreamWriter, event: dict[str, Any] | str) -> None:
        data = _sse(event, self.truth.line_end)
        if self.truth.pings:
            data = b": ping" + self.truth.line_end * 2 + data
        chunk = b"%x\r\n%s\r\n" % (len(data), data)
        if self.truth.piece_bytes is None:
            writer.write(chunk)
            return
        for at in range(0, len(chunk), self.truth.piece_bytes):
            writer.write(chunk[at : at + self.truth.piece_bytes])
            await asyncio.sleep(0)

    def _events(
        self, chat: bool, prompt: str, body: dict[str, Any], end: str
    ) -> Iterable[tuple[float, dict[str, Any] | str]]:
        truth = self.truth
        n = min(body["max_tokens"], truth.max_tokens_kept)
        if truth.early_role_s is not None:
            yield truth.early_role_s, _choice({"role": "assistant", "content": ""})
        at_s = truth.ttft_s
        finish = None if end == "no_finish" else ("abort" if end == "abort" else "length")
        for first in range(0, n, truth.tokens_per_chunk):
            tokens = range(first, min(first + truth.tokens_per_chunk, n))
            if first:
                at_s += truth.itl_s * len(tokens)
            if truth.freeze and truth.freeze[0] in tokens:
                at_s += truth.freeze[1]
            if end in ("cut", "error") and first >= n // 2:
                yield at_s, "cut" if end == "cut" else {"error": {"message": "planted"}}
                if end == "error":
                    yield at_s, "[DONE]"
                return
            text = " tok" * len(tokens)
            reasons = first < truth.reasoning_tokens
            delta = {"reasoning_content" if reasons else "content": text}
            event = _choice(delta) if chat else _text(text)
            if tokens[-1] == n - 1:
                event["choices"][0]["finish_reason"] = finish
            if truth.running_usage:
                event["usage"] = {"prompt_tokens": 1, "completion_tokens": tokens[-1] + 1}
            yield at_s, event
        if truth.usage:
            yield at_s, {"choices": [], "usage": self._usage(prompt, n)}
        if end != "no_done":
            yield at_s, "[DONE]"

    def _usage(self, prompt: str, n: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": _count(prompt) + self.truth.extra_prompt_tokens,
            "completion_tokens": n,
        }
        if self.truth.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.truth.cached_tokens}
        return usage


@asynccontextmanager
async def mock_endpoint(truth: Truth) -> AsyncIterator[MockEndpoint]:
    """A running mock; ``url`` says where."""
    mock = MockEndpoint(truth)
    server = await asyncio.start_server(mock.serve, "127.0.0.1", 0, limit=1 << 22)
    async with server:
        mock.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield mock
        server.close()
        if mock._connections:  # their clients have hung up, or are about to
            await asyncio.wait(mock._connections, timeout=5)


async def _until(when_s: float) -> None:
    while (wait_s := when_s - time.perf_counter()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(wait_s)


def _count(prompt: str) -> int:
    """Tokens of the mock: words, and words of more than five letters are two."""
    return sum(1 + (len(word) > 5) for word in prompt.split())


def _choice(delta: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def _carries_tokens(event: dict[str, Any]) -> bool:
    return any(
        choice.get("text") or any(choice.get("delta", {}).get(name) for name in _CHANNELS)
        for choice in event.get("choices", ())
    )


def _text(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}]}


def _sse(event: dict[str, Any] | str, line_end: bytes) -> bytes:
    data = event if isinstance(event, str) else json.dumps(event)
    return b"data: " + data.encode() + line_end * 2


def _reply(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
