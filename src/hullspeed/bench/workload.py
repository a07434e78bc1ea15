"""Workload: prompts of a known number of tokens, and what of them a cache may know.

Prompts are random common words. Their length is counted by the endpoint's own ``/tokenize`` where
there is one (vLLM's shape: ``{"prompt": …}`` gives ``{"count": …}``), else a word is taken for a
token and the result says so. Random words from the first one on are also the nonce: no two prompts
share their start unless they are meant to.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import orjson

from hullspeed.bench.client import Client
from hullspeed.bench.http1 import Exchange
from hullspeed.bench.reply import Reply, read_reply
from hullspeed.bench.spec import BenchSpec
from hullspeed.errors import EngineError

_MAX_COUNTING_ROUNDS = 24


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text, and its length as far as it was counted."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the load.

    Attributes:
        prompt_tokens: Prompt length asked for; None when it depends on earlier answers.
        repeated_tokens: Prompt tokens that an earlier request also carried.
        turn: Turn of a conversation, from 0.
    """

    request: bytes
    prompt_tokens: int | None
    repeated_tokens: int
    turn: int = 0


Send = Callable[[Job], Awaitable[Exchange]]


def load_words() -> list[str]:
    """The words that prompts are made of."""
    text = files("hullspeed.bench").joinpath("words.txt").read_text("utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


class PromptWriter:
    """Writes prompts of an exact length.

    Args:
        counter: Tokens of a text; None takes a word for a token.
    """

    def __init__(self, rng: random.Random, counter: Callable[[str], Awaitable[int]] | None) -> None:
        self._rng = rng
        self._counter = counter
        self._words = load_words()

    @property
    def counted_by(self) -> str:
        """``endpoint`` or ``estimate``."""
        return "estimate" if self._counter is None else "endpoint"

    async def write(self, n_tokens: int, prefix: Prompt | None = None) -> Prompt:
        """A prompt of ``n_tokens`` (prefix included) that begins with ``prefix``."""
        head = prefix.text if prefix else ""
        words = self._rng.choices(
            self._words, k=max(n_tokens - (prefix.tokens if prefix else 0), 0)
        )
        if self._counter is None:
            return Prompt(head + "".join(f" {word}" for word in words), n_tokens)
        best = Prompt(head, -1)
        for _ in range(_MAX_COUNTING_ROUNDS):
            text = head + "".join(f" {word}" for word in words)
            count = await self._counter(text)
            if best.tokens < 0 or abs(count - n_tokens) < abs(best.tokens - n_tokens):
                best = Prompt(text, count)
            if count == n_tokens or (count > n_tokens and not words):
                break
            if count < n_tokens:
                words += self._rng.choices(self._words, k=n_tokens - count)
            else:
                del words[max(len(words) - (count - n_tokens), 0) :]
        return best


async def endpoint_counter(client: Client, model: str) -> Callable[[str], Awaitable[int]] | None:
    """A counter that asks ``/tokenize``; None when the endpoint has none."""

    async def count(text: str) -> int:
        status, answer = await client.json("/tokenize", {"model": model, "prompt": text})
        if status != 200 or not isinstance(answer, dict) or not isinstance(answer["count"], int):
            raise EngineError("/tokenize stopped answering", seen=(status, answer))
        return int(answer["count"])

    status, answer = await client.json("/tokenize", {"model": model, "prompt": "hello world"})
    usable = status == 200 and isinstance(answer, dict) and isinstance(answer.get("count"), int)
    return count if usable else None


def decoding_of(spec: BenchSpec) -> dict[str, object]:
    """Decoding settings that every request states, whatever the endpoint's defaults are."""
    decoding: dict[str, object] = {
        "max_tokens": spec.osl_tokens,
        "temperature": spec.temperature,
        "top_p": 1.0,
    }
    if spec.exact_osl:
        decoding |= {"min_tokens": spec.osl_tokens, "ignore_eos": True}
    return decoding


@dataclass(slots=True)
class RequestWriter:
    """Request bytes for prompts, for either API."""

    client: Client
    spec: BenchSpec
    model: str
    decoding: dict[str, object] = field(default_factory=dict)

    def bytes_of(self, prompt: str | list[dict[str, str]], **changes: object) -> bytes:
        """A complete streaming request; ``prompt`` is text, or chat messages."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.decoding,
            **changes,
        }
        if self.spec.api == "completions":
            path = "/v1/completions"
            body["prompt"] = prompt
        else:
            path = "/v1/chat/completions"
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            body["messages"] = messages
        return self.client.target.request_bytes(path, orjson.dumps(body))


class Conversation:
    """A client that keeps talking: every turn carries all turns before it."""

    def __init__(
        self, requests: RequestWriter, opening: Prompt, shared: int, turns: list[Prompt]
    ) -> None:
        self._requests = requests
        self._opening = opening
        self._shared = shared
        self._turns = turns

    async def run(self, send: Send) -> None:
        """Take every turn; a failed one ends the conversation."""
        chat = self._requests.spec.api == "chat"
        text = self._opening.text
        messages = [{"role": "user", "content": text}]
        prompt_tokens: int | None = self._opening.tokens
        repeated = self._shared
        for turn in range(len(self._turns) + 1):
            request = self._requests.bytes_of(messages if chat else text)
            reply = _read(await send(Job(request, prompt_tokens, repeated, turn)), self._requests)
            if reply.failure or turn == len(self._turns):
                return
            repeated = (reply.prompt_tokens or 0) + reply.tokens
            prompt_tokens = None
            said = self._turns[turn].text
            text += reply.text + said
            messages += [
                {"role": "assistant", "content": reply.text},
                {"role": "user", "content": said},
            ]


def _read(exchange: Exchange, requests: RequestWriter) -> Reply:
    spec = requests.spec
    return read_reply(exchange, asked_tokens=spec.osl_tokens if spec.exact_osl else None)


async def write_jobs(requests: RequestWriter, prompts: PromptWriter, n: int) -> list[Job]:
    """``n`` independent requests, cold or cached as the spec asks."""
    spec = requests.spec
    shared = await _shared_prefix(spec, prompts)
    if spec.cache == "cached":
        prompt = await prompts.write(spec.isl_tokens, shared)
        return [Job(requests.bytes_of(prompt.text), prompt.tokens, prompt.tokens)] * n
    jobs: list[Job] = []
    for _ in range(n):
        prompt = await prompts.write(spec.isl_tokens, shared)
        repeated = shared.tokens if shared and jobs else 0
        jobs.append(Job(requests.bytes_of(prompt.text), prompt.tokens, repeated))
    return jobs


async def write_conversations(requests: RequestWriter, prompts: PromptWriter) -> list[Conversation]:
    """The conversations of an agent load."""
    spec = requests.spec
    shared = await _shared_prefix(spec, prompts)
    conversations: list[Conversation] = []
    for _ in range(spec.conversations):
        opening = await prompts.write(spec.isl_tokens, shared)
        turns = [await prompts.write(spec.turn_tokens) for _ in range(spec.turns - 1)]
        repeated = shared.tokens if shared and conversations else 0
        conversations.append(Conversation(requests, opening, repeated, turns))
    return conversations


async def _shared_prefix(spec: BenchSpec, prompts: PromptWriter) -> Prompt | None:
    if not spec.shared_prefix_tokens:
        return None
    return await prompts.write(spec.shared_prefix_tokens)
