"""A correct little endpoint, and the faults that can be planted in it.

Its "model" answers with words drawn from a hash of the prompt, so every right answer is known.
Tokens are bytes: an emoji takes two.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

CONTEXT_TOKENS = 2000
TOKEN_S = 0.0005
SLOW_TOKEN_S = 0.004  # of the long story, so that ghosts live on for seconds
_WORDS = [
    b" sea", b" harbour", b" rope", b" oil", b" fox", b" in", b"ter", b"est", b" wind", b",", b" x",
]  # fmt: skip
_EMOJI = [b"\xf0\x9f", b"\xa6\x8a", b" \xf0\x9f", b"\x90\x99"]
_SCHEMA_KEYWORDS = {
    "type", "properties", "required", "additionalProperties", "minimum", "maximum", "n",
}  # fmt: skip


@dataclass
class Fake:
    faults: frozenset[str] = frozenset()
    metrics: bool = True
    slots: int = 64
    url: str = ""
    running: int = 0
    prompts: set[str] = field(default_factory=set)
    draws: int = 0
    _connections: set[asyncio.Task[None]] = field(default_factory=set)
    server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(64))

    def leave(self) -> None:
        """Stop listening and hang up on everybody."""
        if self.server is not None:
            self.server.close()
        for writer in self._writers:
            writer.transport.abort()

    # --- the model ------------------------------------------------------------------------------

    def tokens(self, prompt: str, n: int, salt: str) -> list[bytes]:
        """``n`` tokens that follow ``prompt``."""
        if not prompt.isascii():
            return [_EMOJI[i % 4] for i in range(n)]
        digest = hashlib.sha256((prompt + salt).encode()).digest() * (n // 32 + 1)
        return [_WORDS[byte % len(_WORDS)] for byte in digest[:n]]

    def count(self, prompt: str, chat: bool) -> int:
        return 1 + len(prompt.encode()) // 4 + (5 if chat else 0)

    # --- HTTP -----------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = 0
                for line in head.split(b"\r\n"):
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        size = int(value)
                await self._route(
                    head.split(b" ", 2)[1].decode(), await reader.readexactly(size), writer
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _route(self, path: str, payload: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            entry = {"id": "fake", "max_model_len": CONTEXT_TOKENS}
            return _reply(writer, 200, {"data": [entry]})
        if path == "/metrics" and self.metrics:
            return _reply(writer, 200, f'fake:num_requests_running{{m="f"}} {self.running}.0\n')
        try:
            body = json.loads(payload)
        except ValueError:
            return self._refuse(writer, "not JSON")
        if path == "/tokenize":
            return self._tokenize(body, writer)
        if path in ("/v1/completions", "/v1/chat/completions"):
            return await self._generate(path.endswith("chat/completions"), body, writer)
        return self._refuse(writer, "no such path", 404)

    def _refuse(self, writer: asyncio.StreamWriter, message: str, status: int = 400) -> None:
        if "crash_500" in self.faults:
            return _reply(writer, 500, "Internal Server Error")
        if "no_error_object" in self.faults:
            return _reply(writer, status, {"detail": message})
        return _reply(writer, status, {"error": {"message": message, "code": status}})

    def _tokenize(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        chat = "messages" in body
        count = self.count(_prompt(body), chat)
        tokens = list(range(count))
        if "double_bos" in self.faults:
            tokens = [0, *tokens]
        _reply(writer, 200, {"count": len(tokens), "tokens": tokens})

    # --- generation -----------------------------------------------------------------------------

    async def _generate(
        self, chat: bool, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        wrong = _wrong(body, chat)
        if wrong and not ("accepts_bad" in self.faults and "temperature" in wrong):
            return self._refuse(writer, wrong, 404 if "model" in wrong else 400)
        prompt = _prompt(body)
        if self.count(prompt, chat) > CONTEXT_TOKENS:
            if "silent_cut" not in self.faults:
                return self._refuse(writer, "context_length_exceeded")
            prompt = prompt[: 4 * (CONTEXT_TOKENS - 10)]
        self.running += 1
        try:
            async with self._slots:
                await self._answer(chat, body, prompt, writer)
        finally:
            self.running -= 1
        return None

    def _salt(self, prompt: str, body: dict[str, Any]) -> str:
        """What may change the answer; the right one depends on seed and temperature alone."""
        self.draws += 1
        salt = ""
        if body.get("temperature", 1) > 0 and "always_greedy" not in self.faults:
            salt = str(body.get("seed", self.draws))
            if "seed_ignored" in self.faults:
                salt = str(self.draws)
        if "cache_state" in self.faults and prompt in self.prompts:
            salt += "wrong state"
        if "garbage_from_3" in self.faults and self.running >= 3:
            salt += "garbage"
        return salt

    async def _answer(
        self, chat: bool, body: dict[str, Any], prompt: str, writer: asyncio.StreamWriter
    ) -> None:
        limit = body.get("max_tokens", 16)
        ignore_eos = bool(body.get("ignore_eos")) and "ends_early" not in self.faults
        natural = 10 if (chat or "ends_early" in self.faults) and not ignore_eos else 10**9
        n = min(limit, natural) + ("one_too_many" in self.faults)
        finish = "stop" if natural < limit else "length"
        tokens = self.tokens(prompt, n, self._salt(prompt, body))
        special = self._special(chat, body)
        if special is not None:
            tokens, finish = [special.encode()], "stop"
        if "no_tokens" in self.faults:
            tokens = []
        if "think_leak" in self.faults and body.get("stop"):
            tokens = [b"</think>", *tokens]
        tokens, finish = self._stopped(tokens, body.get("stop") or [], finish)
        cached = self.count(prompt, chat) if prompt in self.prompts else 0
        self.prompts.add(prompt)
        usage: dict[str, Any] = {
            "prompt_tokens": self.count(prompt, chat),
            "completion_tokens": max(len(tokens), 1),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        if "bad_total" in self.faults:
            usage["total_tokens"] += 1
        call = None
        if body.get("tools"):
            call = {"name": "get_tide", "arguments": '{"port": "Brest", "hour": 9}'}
            tokens, finish = [], "tool_calls"
        reply = Reply(self, chat, body, tokens, finish, usage, call)
        if body.get("stream"):
            await reply.stream(writer, SLOW_TOKEN_S if "long story" in prompt else TOKEN_S)
        else:
            await asyncio.sleep(TOKEN_S * len(tokens))
            _reply(writer, 200, reply.whole())

    def _special(self, chat: bool, body: dict[str, Any]) -> str | None:
        if not chat or "response_format" not in body:
            return None
        schema = body["response_format"]["json_schema"]["schema"]
        n = schema["properties"]["n"].get("minimum", 5)
        return json.dumps({"n": n + 10 if "schema_ignored" in self.faults else n})

    def _stopped(
        self, tokens: list[bytes], stops: list[str], finish: str
    ) -> tuple[list[bytes], str]:
        text = b"".join(tokens).decode("utf-8", "replace")
        for stop in stops:
            if "stop_by_token" in self.faults:
                if stop.encode() in tokens:
                    return tokens[: tokens.index(stop.encode())], "stop"
            elif stop in text:
                end = text.index(stop) + (len(stop) if "stop_included" in self.faults else 0)
                kept: list[bytes] = []
                for token in tokens:
                    room = end - len(b"".join(kept))
                    if room <= 0:
                        break
                    kept.append(token[:room])
                return kept, "length" if "stop_as_length" in self.faults else "stop"
        return tokens, finish


@dataclass
class Reply:
    fake: Fake
    chat: bool
    body: dict[str, Any]
    tokens: list[bytes]
    finish: str
    usage: dict[str, Any]
    call: dict[str, str] | None

    def _has(self, fault: str) -> bool:
        return fault in self.fake.faults

    def _choice(
        self, text: str, tokens: list[bytes], *, finish: str | None, stream: bool
    ) -> dict[str, Any]:
        name = "delta" if stream else "message"
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if not self.chat:
            choice["text"] = text
        elif self._has("reasoning_only"):
            choice[name] = {"content": None, "reasoning_content": text}
        else:
            choice[name] = {"content": text}
        asked = self.body.get("logprobs")
        if asked is not None and asked is not False and not self._has("no_logprobs"):
            choice["logprobs"] = self._logprobs(tokens)
        return choice

    def _logprobs(self, tokens: list[bytes]) -> dict[str, Any]:
        texts = [token.decode("utf-8", "replace") for token in tokens]
        value = -3.0 if self._has("shifted_logprobs") else -0.1
        tops = [{text: value, "other": -2.5} for text in texts]
        if self.chat:
            return {
                "content": [
                    {
                        "token": text,
                        "logprob": value,
                        "top_logprobs": [{"token": t, "logprob": v} for t, v in top.items()],
                    }
                    for text, top in zip(texts, tops, strict=True)
                ]
            }
        return {"tokens": texts, "token_logprobs": [value] * len(texts), "top_logprobs": tops}

    def whole(self) -> dict[str, Any]:
        text = b"".join(self.tokens).decode("utf-8", "replace")
        choice = self._choice(text, self.tokens, finish=self.finish, stream=False)
        if self.call is not None:
            calls = [] if self._has("empty_calls") else [{"index": 0, "function": self.call}]
            choice["message"] = {"content": None, "tool_calls": calls}
        return {"choices": [choice], "usage": self.usage}

    async def stream(self, writer: asyncio.StreamWriter, token_s: float) -> None:
        kind = "text/plain" if self._has("plain_text") else "text/event-stream"
        writer.write(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: %s\r\n\r\n"
            % kind.encode()
        )
        for event in self._call_events() if self.call is not None else self._text_events():
            await asyncio.sleep(token_s)
            if writer.transport.is_closing() and not self._has("ghosts"):
                return
            _event(writer, event)
        if self._has("error_event"):
            _event(writer, {"error": {"message": "engine died"}})
        if not self._has("no_usage"):
            off = 1 if self._has("stream_counts_differ") else 0
            usage = self.usage | {
                "completion_tokens": self.usage["completion_tokens"] - off,
                "total_tokens": self.usage["total_tokens"] - off,
            }
            _event(writer, {"choices": [], "usage": usage})
        for _ in range(0 if self._has("no_done") else 2 if self._has("two_done") else 1):
            _event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    def _call_events(self) -> list[dict[str, Any]]:
        call = self.call or {}
        middle = len(call["arguments"]) // 2
        second = call["arguments"][middle + (2 if self._has("calls_differ") else 0) :]
        pieces = [
            {"index": 0, "function": {"name": call["name"], "arguments": ""}},
            {"index": 0, "function": {"arguments": call["arguments"][:middle]}},
            {"index": 0, "function": {"arguments": second}},
        ]
        events: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": None}]}
            for piece in ([] if self._has("empty_calls") else pieces)
        ]
        return [*events, {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}]

    def _text_events(self) -> list[dict[str, Any]]:
        events = []
        held: list[bytes] = []
        for i, token in enumerate(self.tokens):
            held.append(token)
            data = b"".join(held)
            last = i == len(self.tokens) - 1
            text = data.decode("utf-8", "replace")
            if text.endswith("\ufffd") and not last and not self._has("per_token_decode"):
                continue
            if self._has("stripped_pieces"):
                text = text.lstrip()
            finish = None
            if last and not self._has("no_finish"):
                finish = "abort" if self._has("abort") else self.finish
            choice = self._choice(text, held, finish=finish, stream=True)
            events.append({"choices": [choice]})
            held = []
        if not self.tokens:
            choice = self._choice("", [], finish=self.finish, stream=True)
            events.append({"choices": [choice]})
        return events


def _prompt(body: dict[str, Any]) -> str:
    if "messages" in body:
        return "".join(str(message["content"]) for message in body["messages"])
    return str(body.get("prompt", ""))


def _wrong(body: Any, chat: bool) -> str:
    """What is wrong with a request; empty when nothing is."""
    if not isinstance(body, dict):
        return "not an object"
    prompt = body.get("messages" if chat else "prompt")
    schema = (body.get("response_format") or {}).get("json_schema", {}).get("schema", {})
    keywords = set(schema) | set(schema.get("properties", {}).get("n", {}))
    rules = (
        (body.get("model") != "fake", "unknown model"),
        (not prompt or not isinstance(prompt, list if chat else str), "no prompt"),
        (not _number(body.get("temperature", 1), 0, 2), "temperature"),
        (not _number(body.get("top_p", 1), 0, 1), "top_p"),
        (not _number(body.get("max_tokens", 16), 1, 10**6), "max_tokens"),
        (not _number(body.get("n", 1), 1, 8), "n"),
        (not isinstance(body.get("stop", []), list), "stop"),
        (not isinstance(body.get("stream", False), bool), "stream"),
        (not keywords <= _SCHEMA_KEYWORDS, f"unsupported {keywords - _SCHEMA_KEYWORDS}"),
    )
    return next((what for broken, what in rules if broken), "")


def _number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and low <= value <= high


def _event(writer: asyncio.StreamWriter, event: dict[str, Any] | str) -> None:
    data = event if isinstance(event, str) else json.dumps(event)
    payload = b"data: " + data.encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(payload), payload))


def _reply(writer: asyncio.StreamWriter, status: int, body: dict[str, Any] | str) -> None:
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    kind = b"text/plain" if isinstance(body, str) else b"application/json"
    writer.write(
        b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s"
        % (status, kind, len(data), data)
    )


@asynccontextmanager
async def fake_endpoint(*faults: str, metrics: bool = True, slots: int = 64) -> AsyncIterator[Fake]:
    """A running endpoint with ``faults`` planted."""
    fake = Fake(frozenset(faults), metrics, slots, _slots=asyncio.Semaphore(slots))
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, limit=1 << 23)
    fake.server = server
    async with server:
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield fake
        server.close()
        if fake._connections:  # their clients have hung up
            await asyncio.wait(fake._connections, timeout=15)
