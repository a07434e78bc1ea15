"""Generation: one API request while it runs, as pieces of text ready to be sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from hullspeed.errors import HullspeedError
from hullspeed.runtime.messages import Delta, Submit
from hullspeed.runtime.process import delta_error
from hullspeed.server.engine import Engine
from hullspeed.server.errors import ApiError
from hullspeed.server.metrics import Metrics
from hullspeed.server.policy import Job
from hullspeed.server.recording import Recorder
from hullspeed.text.stream import TextStream
from hullspeed.text.tokenizer import Tokenizer

Logprob = tuple[float, tuple[tuple[int, float], ...]]


class ClientGoneError(HullspeedError):
    """The client left; nobody is there to be told."""


class Piece(msgspec.Struct, frozen=True):
    """What one completion has to say now.

    Attributes:
        tokens: Token ids that became known; their text may still be held back.
        finish: "stop" or "length" on the completion's last piece.
        stop: The stop string or the stop token that ended it, if one did.
    """

    index: int
    text: str
    tokens: list[int]
    logprobs: list[Logprob] | None = None
    finish: str | None = None
    stop: str | int | None = None


class Usage(NamedTuple):
    """Tokens of a request so far; every prompt counts once, whatever ``n`` is."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Completion:
    """One sequence in the engine: its counters, its times and its text."""

    __slots__ = (
        "_generation",
        "cached_tokens",
        "ended",
        "first_s",
        "id",
        "index",
        "last_s",
        "output_tokens",
        "prompt_tokens",
        "queue_s",
        "text",
        "tokens",
    )  # fmt: skip

    def __init__(
        self, generation: Generation, id_: int, index: int, prompt_tokens: int, text: TextStream
    ) -> None:
        self.id = id_
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        self.cached_tokens = 0
        self.first_s: float | None = None
        self.last_s = 0.0
        self.queue_s = 0.0
        self.text = text
        self.tokens: list[int] = []  # of the output, where it is recorded
        self.ended = False
        self._generation = generation

    def push(self, delta: Delta, now_s: float) -> None:
        """Take what the engine sent; times are those of arrival, not of a slow reader."""
        n_tokens = len(delta.tokens)
        if n_tokens:
            metrics = self._generation.metrics
            metrics.generation_tokens += n_tokens
            if self.first_s is None:
                self.first_s = now_s
                self.queue_s = delta.queue_s or 0.0
                self.cached_tokens = delta.cached_tokens or 0
                metrics.cached_tokens += self.cached_tokens
                metrics.ttft_s.observe(now_s - self._generation.arrival_s)
            else:
                metrics.itl_s.observe((now_s - self.last_s) / n_tokens, n_tokens)
            self.last_s = now_s
            if self._generation.recorder is not None:
                self.tokens += delta.tokens
        self._generation.push(self, delta)


class Generation:
    """A job in the engine.

    Args:
        arrival_s: When the request came in (``time.monotonic``).
        on_close: Called once when nothing more will be read from it.
        recorder: Told of each completion that ended.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        arrival_s: float,
        on_close: Callable[[Generation], None],
        recorder: Recorder | None = None,
    ) -> None:
        self.job = job
        self.metrics = metrics
        self.arrival_s = arrival_s
        self.recorder = recorder
        self._engine = engine
        self._tokenizer = tokenizer
        self._on_close = on_close
        self._pending: list[tuple[Completion, Delta]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: HullspeedError | None = None
        self._closed = False
        info = engine.info
        self._ends = frozenset(
            (*(info.eos_token_ids if info else ()), *job.sampling.stop_token_ids)
        )
        self.completions = self._start()
        self._live = len(self.completions)

    def _start(self) -> list[Completion]:
        job, n = self.job, self.job.sampling.n
        pairs: list[tuple[Submit, Completion]] = []
        for p, prompt in enumerate(job.prompts):
            for k in range(n):
                completion = Completion(
                    self, self._engine.new_id(), p * n + k, len(prompt), self._text_stream()
                )
                pairs.append((self._message(completion.id, p, k), completion))
        self._engine.submit(pairs)
        self._count_start()
        return [completion for _, completion in pairs]

    def _text_stream(self) -> TextStream:
        sampling = self.job.sampling
        return TextStream(
            self._tokenizer,
            stop=sampling.stop,
            min_tokens=sampling.min_tokens,
            skip_special=self.job.skip_special_tokens,
        )

    def _message(self, id_: int, prompt_index: int, k: int) -> Submit:
        job = self.job
        seed = job.sampling.seed
        sampling = msgspec.structs.replace(
            job.sampling,
            n=1,
            max_tokens=job.max_tokens[prompt_index],
            # Completions of one prompt must differ; the same request must repeat.
            seed=None if seed is None else (seed + k + 2**63) % 2**64 - 2**63,
        )
        return Submit(
            id=id_,
            prompt=job.prompts[prompt_index],
            sampling=sampling,
            priority=job.priority,
            salt=job.salt,
            checkpoints=self._checkpoints(prompt_index),
        )

    def _checkpoints(self, prompt_index: int) -> tuple[int, ...]:
        return self.job.checkpoints[prompt_index] if self.job.checkpoints else ()

    def _count_start(self) -> None:
        metrics, job = self.metrics, self.job
        metrics.request_n.observe(job.sampling.n)
        for prompt, limit in zip(job.prompts, job.max_tokens, strict=True):
            metrics.request_prompt_tokens.observe(len(prompt))
            metrics.request_max_tokens.observe(limit)
            metrics.prompt_tokens += len(prompt) * job.sampling.n

    def push(self, completion: Completion, delta: Delta) -> None:
        """Queue a delta and wake the reader; however late it reads, it gets them all at once."""
        self._pending.append((completion, delta))
        self._wake()

    def fail(self, error: HullspeedError) -> None:
        """Make the reader raise ``error`` instead of reading on."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> list[Piece]:
        """The next pieces, in order; an empty list once every completion has ended.

        Raises:
            ApiError: the engine failed or the server cut the request.
            ClientGoneError: the client left.
        """
        while True:
            if self._error is not None:
                raise self._error
            if self._pending:
                batch, self._pending = self._pending, []
                pieces = [p for p in map(self._piece, batch) if p is not None]
                if pieces:
                    return pieces
            elif not self._live:
                return []
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                self._waiter = None

    def _piece(self, item: tuple[Completion, Delta]) -> Piece | None:
        completion, delta = item
        if completion.ended:
            return None
        finish, tokens = delta.finish, delta.tokens
        if finish is None:
            completion.output_tokens += len(tokens)
            text = completion.text.push(tokens)
            if completion.text.stopped is None:
                return Piece(completion.index, text, tokens, delta.logprobs)
            return self._stopped(completion, text, delta)
        return self._last(completion, delta)

    def _stopped(self, completion: Completion, text: str, delta: Delta) -> Piece:
        if delta.finish is None:
            self._engine.cancel([completion.id])
        self._end(completion, "stop")
        return Piece(
            completion.index, text, delta.tokens, delta.logprobs, "stop", completion.text.stopped
        )

    def _last(self, completion: Completion, delta: Delta) -> Piece:
        finish, tokens = delta.finish, delta.tokens
        if finish not in ("stop", "length"):
            self._end(completion, "error")
            raise delta_error(delta)
        completion.output_tokens += len(tokens)
        ended_by = tokens[-1] if finish == "stop" and tokens and tokens[-1] in self._ends else None
        text = completion.text.push(tokens if ended_by is None else tokens[:-1])
        if completion.text.stopped is None:
            text += completion.text.finish()
        if completion.text.stopped is not None:
            return self._stopped(completion, text, delta)
        self._end(completion, finish)
        logprobs = delta.logprobs
        if ended_by is not None and logprobs is not None:
            logprobs = logprobs[:-1]  # an end token is not part of the text
        stop = ended_by if ended_by in self.job.sampling.stop_token_ids else None
        return Piece(completion.index, text, tokens, logprobs, finish, stop)

    def _end(self, completion: Completion, reason: str) -> None:
        completion.ended = True
        self._live -= 1
        self._record(completion, reason)
        metrics = self.metrics
        metrics.finished[reason] += 1
        if completion.first_s is None:
            return
        prefill_s = completion.first_s - self.arrival_s - completion.queue_s
        decode_s = completion.last_s - completion.first_s
        metrics.queue_s.observe(completion.queue_s)
        metrics.prefill_s.observe(prefill_s)
        metrics.decode_s.observe(decode_s)
        metrics.inference_s.observe(prefill_s + decode_s)
        metrics.e2e_s.observe(completion.last_s - self.arrival_s)
        metrics.request_generation_tokens.observe(completion.output_tokens)
        if completion.output_tokens > 1:
            metrics.tpot_s.observe(decode_s / (completion.output_tokens - 1))

    def _record(self, completion: Completion, reason: str) -> None:
        if self.recorder is None:
            return
        job, index = self.job, completion.index // self.job.sampling.n
        self.recorder.note(
            job.prompts[index],
            completion.tokens,
            arrival_s=self.arrival_s,
            salt=job.salt,
            checkpoints=self._checkpoints(index),
            cached_tokens=completion.cached_tokens,
            end=reason,
        )

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        n = self.job.sampling.n
        return Usage(
            sum(len(prompt) for prompt in self.job.prompts),
            sum(completion.output_tokens for completion in self.completions),
            sum(completion.cached_tokens for completion in self.completions[::n]),
        )

    def close(self) -> None:
        """Cancel what still runs; safe to call more than once."""
        if self._closed:
            return
        self._closed = True
        left = [completion for completion in self.completions if not completion.ended]
        self._engine.cancel([completion.id for completion in left])
        for completion in left:
            self._end(completion, "abort")
        self._on_close(self)


def cut_by_shutdown() -> ApiError:
    """The server stopped before the request was done."""
    return ApiError(
        503,
        "the server is shutting down and cut this request",
        code="shutting_down",
        fix="send it again",
        retry_after_s=1,
        close=True,
    )
