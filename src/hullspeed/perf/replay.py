"""replay: a benchmark's protocol played on the cost of steps, from event to event.

Between two events (a request arrives, gets its first token, or ends) every decode step has the
same composition, so all of them are costed at once at their mean context: 1,280 requests of 1,024
output tokens take a few thousand evaluations. The policies are those that engines are known for;
the twin runs the production scheduler step by step where its decisions themselves are the question.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hullspeed.errors import UsageError
from hullspeed.perf.work import Shape, StepSeconds

Policy = Literal["mixed", "prefill_first"]


_GROWTH_STEPS = 64

Record = Callable[[float, int, int, int, Sequence[Shape]], None]
"""Called with the time after so many equal steps, their number, decoding sequences, the sum of
their contexts, and chunks."""


class Ask(NamedTuple):
    """One request: its lengths in tokens and, in an open loop, when it is sent."""

    isl: int
    osl: int
    cached_tokens: int = 0
    at_s: float = 0.0


class Served(NamedTuple):
    """When a request was sent, got its first token and its last; seconds."""

    sent_s: float
    first_s: float
    last_s: float
    osl: int

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time between tokens; 0 for a single token."""
        return (self.last_s - self.first_s) / (self.osl - 1) if self.osl > 1 else 0.0


class Engine(NamedTuple):
    """What of an engine the replay knows.

    Attributes:
        step_tokens: Token budget of a step.
        max_running: Requests computed at once.
        pool_tokens: Tokens of KV that fit.
        policy: ``mixed``: prompt chunks ride on decode steps (vLLM, TensorRT-LLM);
            ``prefill_first``: prompts run in steps of their own while decoding waits (SGLang).
        reserve_output: Admit a request only when its whole length fits (no eviction, as
            TensorRT-LLM); else memory is taken on demand and the last request is preempted.
        request_s: Before each request reaches the scheduler: HTTP, template, tokenizing.
        first_token_s: Until the client has the first token that was sampled.
        stream_token_s: Added to a step for each token that it streams.
        wait_steps: Decode steps that prompts are held back for, while others decode, until
            ``wait_tokens`` of work have come together (TensorRT-LLM's ``batch_wait_timeout_iters``
            and ``batch_wait_max_tokens_ratio``); 0: not at all.
        wait_tokens: See ``wait_steps``.
    """

    step_tokens: int = 8192
    max_running: int = 1024
    pool_tokens: float = math.inf
    policy: Policy = "mixed"
    reserve_output: bool = False
    request_s: float = 0.0
    first_token_s: float = 0.0
    stream_token_s: float = 0.0
    wait_steps: int = 0
    wait_tokens: float = 0.0


class Replayed(NamedTuple):
    """What the load saw."""

    served: list[Served]
    start_s: float
    end_s: float
    preemptions: int

    @property
    def output_tokens_per_s(self) -> float:
        """Of the whole run."""
        span = self.end_s - self.start_s
        return sum(s.osl for s in self.served) / span if span > 0 else 0.0

    @property
    def requests_per_s(self) -> float:
        """Of the whole run."""
        span = self.end_s - self.start_s
        return len(self.served) / span if span > 0 else 0.0


@dataclass(slots=True)
class _Live:
    ask: Ask
    sent_s: float
    done: int  # prompt tokens in memory
    prompt: (
        int  # tokens to compute before the next token comes: the prompt, or all after preemption
    )
    left: int  # output tokens to come
    first_s: float = -1.0
    ends_at: int = 0  # decode step at which it ends, while running


@dataclass(slots=True)
class _Run:
    engine: Engine
    seconds: Callable[[int, int, Sequence[Shape]], float]
    now: float = 0.0
    steps: int = 0  # decode steps so far
    context: int = 0  # sum over running requests
    held: int = 0  # tokens in memory or reserved
    preemptions: int = 0
    held_back: int = 0  # decode steps that waiting prompts were held back for
    arriving: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    filling: deque[int] = field(default_factory=deque)
    ends: list[tuple[int, int]] = field(default_factory=list)
    live: dict[int, _Live] = field(default_factory=dict)
    running: dict[int, None] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)
    refill: Callable[[], None] = lambda: None
    record: Record | None = None

    def send(self, key: int, ask: Ask, at_s: float) -> None:
        self.live[key] = _Live(ask, at_s, ask.cached_tokens, ask.isl, ask.osl)
        heapq.heappush(self.arriving, (at_s + self.engine.request_s, key))

    def play(self) -> None:
        while self.arriving or self.waiting or self.filling or self.running:
            while self.arriving and self.arriving[0][0] <= self.now:
                self.waiting.append(heapq.heappop(self.arriving)[1])
            if not (self.waiting or self.filling or self.running):
                self.now = self.arriving[0][0]
                continue
            chunks = self._chunks()
            if chunks:
                self._prefill(chunks)
            elif self.running:
                self._decode()
            else:
                raise UsageError(
                    "a request needs more KV than the pool holds",
                    seen=f"{self.live[self.waiting[0]].prompt:,} tokens",
                    fix=f"at most {int(self.engine.pool_tokens):,}",
                )

    def _chunks(self) -> list[tuple[int, Shape]]:
        engine = self.engine
        if engine.wait_steps and self._holds_back():
            return []
        mixed = engine.policy == "mixed"
        budget = engine.step_tokens - (len(self.running) if mixed else 0)
        chunks: list[tuple[int, Shape]] = []
        for key in self.filling:
            if budget <= 0:
                break
            budget -= self._chunk(key, budget, chunks)
        while budget > 0 and self.waiting:
            request = self.live[self.waiting[0]]
            need = request.prompt + (request.left if engine.reserve_output else 0)
            full = len(self.running) + len(self.filling) >= engine.max_running
            # Memory taken on demand: newcomers leave room for what is running to grow a while,
            # or one that was preempted would come back at once, only to be preempted again.
            growth = 0 if engine.reserve_output else _GROWTH_STEPS * len(self.running)
            if full or self.held + need + growth > engine.pool_tokens:
                break
            key = self.waiting.popleft()
            self.held += need
            self.filling.append(key)
            budget -= self._chunk(key, budget, chunks)
        return chunks

    def _holds_back(self) -> bool:
        """Whether prompts wait for more to come."""
        if not self.running or not self.waiting or self.held_back >= self.engine.wait_steps:
            return False
        prompts = sum(self.live[key].prompt for key in self.waiting)
        return prompts + len(self.running) < self.engine.wait_tokens

    def _chunk(self, key: int, budget: int, chunks: list[tuple[int, Shape]]) -> int:
        request = self.live[key]
        n_tokens = min(budget, request.prompt - request.done)
        whole = request.done + n_tokens == request.prompt
        chunks.append((key, Shape(n_tokens, request.done, whole)))
        return n_tokens

    def _prefill(self, chunks: list[tuple[int, Shape]]) -> None:
        self.held_back = 0
        decoding = len(self.running) if self.engine.policy == "mixed" else 0
        shapes = [shape for _, shape in chunks]
        context = self.context if decoding else 0
        self._spend(1, self.seconds(decoding, context, shapes), decoding, context, shapes)
        if decoding:
            self._advance(1)
        for key, shape in chunks:
            request = self.live[key]
            request.done += shape.n_tokens
            if not shape.sample:
                continue
            self.filling.remove(key)
            if request.first_s < 0:
                request.first_s = self.now
            request.left -= 1
            if not self.engine.reserve_output:
                self.held += 1
            if request.left == 0:
                self._end(key, request.prompt + 1)
                continue
            self.running[key] = None
            request.ends_at = self.steps + request.left
            self.context += request.prompt + 1
            heapq.heappush(self.ends, (request.ends_at, key))

    def _decode(self) -> None:
        n = len(self.running)
        k = self.ends[0][0] - self.steps
        if self.engine.wait_steps and self.waiting and self.held_back < self.engine.wait_steps:
            k = min(k, self.engine.wait_steps - self.held_back)
        if not self.engine.reserve_output and self.held + n * k > self.engine.pool_tokens:
            k = int((self.engine.pool_tokens - self.held) // n)
            if k < 1:
                self._preempt()
                return
        context = self.context + n * (k - 1) // 2
        step_s = self.seconds(n, context, ())
        # Without room the newcomer waits for an end all the same.
        if self.arriving and n < self.engine.max_running:
            until = math.ceil((self.arriving[0][0] - self.now) / step_s)
            if 1 <= until < k:
                k = until
                context = self.context + n * (k - 1) // 2
                step_s = self.seconds(n, context, ())
        if self.waiting:
            self.held_back += k
        self._spend(k, step_s, n, context, ())
        self._advance(k)

    def _spend(
        self, steps: int, step_s: float, n_decode: int, context: int, chunks: Sequence[Shape]
    ) -> None:
        self.now += steps * step_s
        if self.record is not None:
            self.record(self.now, steps, n_decode, context, chunks)

    def _advance(self, k: int) -> None:
        """``k`` decode steps are done: contexts grow, requests end."""
        n = len(self.running)
        self.steps += k
        self.context += n * k
        if not self.engine.reserve_output:
            self.held += n * k
        while self.ends and self.ends[0][0] <= self.steps:
            _, key = heapq.heappop(self.ends)
            if key not in self.running or self.live[key].ends_at != self.steps:
                continue  # preempted meanwhile
            del self.running[key]
            request = self.live[key]
            length = request.ask.isl + request.ask.osl
            self.context -= length
            self._end(key, length)

    def _end(self, key: int, length: int) -> None:
        request = self.live.pop(key)
        self.held -= length
        shown_s = request.first_s + self.engine.first_token_s
        last_s = self.now + self.engine.first_token_s
        self.served.append(Served(request.sent_s, shown_s, last_s, request.ask.osl))
        self.refill()

    def _preempt(self) -> None:
        """The request that came last gives its memory back and is computed again."""
        key = next(reversed(self.running))
        if len(self.running) == 1 and not self.filling:
            raise UsageError(
                "a request needs more KV than the pool holds",
                seen=f"{self.held:,} tokens",
                fix=f"at most {int(self.engine.pool_tokens):,}",
            )
        del self.running[key]
        request = self.live[key]
        request.left = request.ends_at - self.steps
        held = request.ask.isl + request.ask.osl - request.left
        request.prompt, request.done = held, 0
        self.context -= held
        self.held -= held
        self.preemptions += 1
        self.waiting.appendleft(key)
        self.ends = [pair for pair in self.ends if pair[1] != key]
        heapq.heapify(self.ends)


def replay(
    cost: StepSeconds,
    asks: Sequence[Ask],
    engine: Engine,
    *,
    concurrency: int = 0,
    record: Record | None = None,
) -> Replayed:
    """Play ``asks`` on ``engine``: ``concurrency`` of them in flight, the next sent when one ends,
    or, with 0, each at its own time.

    Raises:
        UsageError: if a request could never be served.
    """
    run = _Run(engine, batch_seconds(cost, engine.stream_token_s), record=record)
    pending = deque(enumerate(asks))

    def refill() -> None:
        if pending:
            key, ask = pending.popleft()
            run.send(key, ask, run.now)

    if concurrency:
        run.refill = refill
        for _ in range(min(concurrency, len(pending))):
            refill()
    else:
        for key, ask in pending:
            run.send(key, ask, ask.at_s)
    start_s = min((ask.at_s for ask in asks), default=0.0) if not concurrency else 0.0
    run.play()
    return Replayed(run.served, start_s, run.now, run.preemptions)


def batch_seconds(
    cost: StepSeconds, stream_token_s: float = 0.0
) -> Callable[[int, int, Sequence[Shape]], float]:
    """``cost`` asked with decoding sequences as a number and the sum of their contexts."""
    own = getattr(cost, "batch_seconds", None)

    def seconds(n_decode: int, context_tokens: int, chunks: Sequence[Shape]) -> float:
        if own is not None:
            step_s = float(own(n_decode, context_tokens, chunks))
        else:
            mean = context_tokens // n_decode if n_decode else 0
            step_s = cost.seconds([Shape(1, mean)] * n_decode + list(chunks))
        if stream_token_s:
            step_s += stream_token_s * (n_decode + sum(shape.sample for shape in chunks))
        return step_s

    return seconds
