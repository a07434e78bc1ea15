"""Service: what all routes share: the engine, the texts, the rules, and who is being served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from hullspeed.errors import HullspeedError, RequestError
from hullspeed.runtime.messages import EngineStats, ModelInfo
from hullspeed.server.engine import Engine, State
from hullspeed.server.errors import ApiError
from hullspeed.server.generation import Generation, cut_by_shutdown
from hullspeed.server.metrics import Metrics
from hullspeed.server.policy import Job, RequestPolicy
from hullspeed.server.recording import Recorder
from hullspeed.server.settings import ServerSettings
from hullspeed.text.chat import ChatFormat
from hullspeed.text.checkpoints import MarkedPrompt
from hullspeed.text.tokenizer import Tokenizer

INLINE_CHARS = 4096
"""Shorter texts are tokenized on the event loop (well under a millisecond), others in a thread."""

_Result = TypeVar("_Result")


class Texts(NamedTuple):
    """A model's tokenizer and, if it has a chat template, its chat format.

    Attributes:
        longest_token_bytes: No token stands for more; so a text has at least its length divided
            by this many tokens.
    """

    tokenizer: Tokenizer
    chat: ChatFormat | None
    longest_token_bytes: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat: ChatFormat | None) -> Texts:
        """With the vocabulary measured (which also builds its table, before any request)."""
        lengths = (
            len(tokenizer.decode_bytes([i], skip_special=False)) for i in range(tokenizer.vocab)
        )
        return cls(tokenizer, chat, max(1, max(lengths, default=1)))


class Service:
    """State of one server.

    Args:
        names: Names the model answers to; the first is the one it reports.
        metrics: Where everything is counted.
        recorder: Where requests are written down as a workload, if anywhere.
    """

    def __init__(
        self,
        settings: ServerSettings,
        engine: Engine,
        names: Sequence[str],
        metrics: Metrics,
        recorder: Recorder | None = None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.names = tuple(names)
        self.metrics = metrics
        self.texts: Texts | None = None
        self.draining = False
        self.cut = 0
        self._recorder = recorder
        self._live: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")

    @property
    def info(self) -> ModelInfo | None:
        """The loaded model."""
        return self.engine.info

    @property
    def stats(self) -> EngineStats | None:
        """The engine's last heartbeat."""
        return self.engine.stats

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last spoke."""
        return self.engine.heartbeat_age_s

    @property
    def in_flight(self) -> int:
        """Sequences submitted and not yet ended."""
        return self.engine.in_flight

    @property
    def restarts(self) -> int:
        """Times the engine was started again."""
        return self.engine.restarts

    @property
    def admitting(self) -> bool:
        """Whether requests should be sent here: loaded, alive and not draining."""
        engine = self.engine
        loaded = engine.state is State.READY and self.texts is not None
        return loaded and engine.healthy and not self.draining

    def admit(self) -> tuple[RequestPolicy, Texts]:
        """The rules and texts for one request.

        Raises:
            ApiError: 503 while loading, restarting or draining.
        """
        try:
            if self.draining:
                raise ApiError(
                    503,
                    "the server is shutting down",
                    code="draining",
                    fix="send the request to another server",
                    retry_after_s=self.settings.retry_after_s,
                    close=True,
                )
            self.engine.check_room(1)
            if self.texts is None or self.engine.info is None:
                raise ApiError(
                    503, "the server is loading", code="loading", retry_after_s=1, fix="try again"
                )
        except ApiError as error:
            self.metrics.rejected[error.code] += 1
            raise
        return RequestPolicy(self.settings, self.names, self.engine.info), self.texts

    def start(self, job: Job, arrival_s: float) -> Generation:
        """Hand ``job`` to the engine.

        Raises:
            ApiError: 503 if there is no room.
        """
        tokenizer = self.admit()[1].tokenizer
        try:
            generation = Generation(
                job,
                self.engine,
                tokenizer,
                self.metrics,
                arrival_s=arrival_s,
                on_close=self._forget,
                recorder=self._recorder,
            )
        except ApiError as error:
            self.metrics.rejected[error.code] += 1
            raise
        self._live.add(generation)
        self._idle.clear()
        return generation

    async def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``.

        Raises:
            ContextOverflowError: it is longer than any prompt could be; found without reading it.
        """
        tokenizer = self._for_length(len(text)).tokenizer

        def work() -> list[int]:
            return tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

        return work() if len(text) < INLINE_CHARS else await self._in_thread(work)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        template_args: Mapping[str, Any],
    ) -> MarkedPrompt:
        """Token ids of a conversation, through the model's template in its own process, and where
        a model with recurrent state should save it.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        chat = self._for_length(sum(len(str(message["content"])) for message in messages)).chat
        if chat is None:
            raise RequestError(
                "this model has no chat template", param="messages", fix="use /v1/completions"
            )
        policy, _ = self.admit()

        def encode() -> MarkedPrompt:
            if policy.keeps_states:
                return chat.encode_marked(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    template_args=template_args,
                )
            return MarkedPrompt(
                chat.encode(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    template_args=template_args,
                )
            )

        return await self._in_thread(encode)

    def _for_length(self, n_chars: int) -> Texts:
        """The texts, once it is clear that ``n_chars`` characters can be a prompt at all."""
        policy, texts = self.admit()
        policy.check_prompt_tokens(n_chars // texts.longest_token_bytes, at_least=True)
        return texts

    async def drain(self, seconds: float) -> int:
        """Stop admitting and wait up to ``seconds`` for what runs; returns how many were cut."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            self.abort(cut_by_shutdown())
        return self.cut

    def abort(self, error: HullspeedError) -> None:
        """End every request in flight with ``error``."""
        self.draining = True
        for generation in list(self._live):
            self.cut += 1
            generation.fail(error)

    def close(self) -> None:
        """End the helpers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._recorder is not None:
            self._recorder.close()
        if self.texts is not None and self.texts.chat is not None:
            self.texts.chat.template.close()

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _forget(self, generation: Generation) -> None:
        self._live.discard(generation)
        if not self._live:
            self._idle.set()
