"""simulate: a load on the production scheduler, on a virtual clock, with steps that cost seconds.

Nothing here decides anything: ``core.EngineLoop`` plans the steps as it does in the real engine,
and the cost model says how long each takes. What differs from reality is the cost model alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from hullspeed.clock import VirtualClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.core.executor import CostModelExecutor, Executor
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.scheduler import Output
from hullspeed.core.step import Step
from hullspeed.errors import EngineError
from hullspeed.perf.work import Shape, StepSeconds
from hullspeed.twin.api_process import ApiProcess
from hullspeed.twin.interrupted import Interrupted
from hullspeed.twin.load import Load, Prompts
from hullspeed.twin.outcome import Outcome


class TwinEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's numbers that scheduling depends on; the names are the engine's own.

    Attributes:
        vocab: Of the model.
        max_context_tokens: Longest sequence.
        n_pages: Pages of KV.
        state_slots: Slots of recurrent state; 0 for a model without.
        n_window_pages: Pages of layers with a window; 0: they keep pages as the others do.
        window_tokens: What these layers see.
        request_s: From a request's bytes to its arrival at the scheduler.
        request_work_s: How long a request keeps a core from the next one, and from a step.
        own_core: The API process has a core that no step uses.
        stream_token_s: Per token, work of the API process on cores that compute as well.
        interrupted_every_s, interrupted_s: In so much time of computing, others take so much.
    """

    vocab: int
    max_context_tokens: int
    n_pages: int
    page_tokens: int = 64
    max_running: int = 64
    step_tokens: int = 256
    state_slots: int = 0
    n_window_pages: int = 0
    window_tokens: int = 0
    cache: str = "segment"
    eviction: str = "lru"
    request_s: float = 0.0
    request_work_s: float = 0.0
    own_core: bool = False
    stream_token_s: float = 0.0
    interrupted_every_s: float = math.inf
    interrupted_s: float = 0.0


def shapes_of(step: Step, page_tokens: int) -> list[Shape]:
    """A step as the cost model sees it. Pages that two decoding sequences have in common are read
    once from memory.
    """
    read: set[int] = set()
    shapes = []
    for span in step.spans:
        shared = 0
        if span.length == 1:
            shared = page_tokens * len(read.intersection(span.sequence.pages))
            read.update(span.sequence.pages)
        shapes.append(Shape(span.length, span.start, span.sample, min(shared, span.start)))
    return shapes


@dataclass(slots=True)
class _Flight:
    """One request under way: when it was sent, when its tokens came, and what follows it."""

    sent_s: float
    prompt: list[int]
    turns_left: int
    token_s: list[float] = field(default_factory=list)


class Simulation:
    """One load on one engine; :meth:`run` plays it to its end.

    Args:
        executor: Made with the simulation's clock, which it advances; runs the cost model unless
            given. A real executor that advances the clock by its own time measures what the cost
            model predicts, under the same load and the same scheduler.
        paranoid: Check every invariant after every step.
    """

    def __init__(
        self,
        engine: TwinEngine,
        cost: StepSeconds,
        load: Load,
        *,
        executor: Callable[[VirtualClock], Executor] | None = None,
        paranoid: bool = False,
    ) -> None:
        load.check()
        self._engine = engine
        self._load = load
        self._paranoid = paranoid
        self._clock = VirtualClock()
        self._prompts = Prompts(load, engine.vocab)
        self._scheduler = build_scheduler(
            n_pages=engine.n_pages,
            page_tokens=engine.page_tokens,
            max_running=engine.max_running,
            step_tokens=engine.step_tokens,
            max_context_tokens=engine.max_context_tokens,
            n_state_slots=engine.state_slots,
            n_window_pages=engine.n_window_pages,
            window_tokens=engine.window_tokens,
            cache=engine.cache,
            eviction=engine.eviction,
        )
        limits = Limits(vocab=engine.vocab, max_context_tokens=engine.max_context_tokens)
        runs: Executor = CostModelExecutor(self._clock, self._step_seconds(cost))
        if executor is not None:
            runs = executor(self._clock)
        self._loop = EngineLoop(self._scheduler, runs, self._clock, limits)
        self._sampling = SamplingParams(
            max_tokens=load.osl_tokens,
            min_tokens=load.osl_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        self._sent = 0
        self._queue = 0
        self._flights: dict[int, _Flight] = {}
        work_s = engine.request_work_s
        rest_s = max(engine.request_s - work_s, 0.0)
        self._api = ApiProcess(work_s, rest_s, own_core=engine.own_core)
        self._done: list[_Flight] = []

    def _step_seconds(self, cost: StepSeconds) -> Callable[[Step], float]:
        stream_s, page_tokens = self._engine.stream_token_s, self._engine.page_tokens
        others = Interrupted(self._engine.interrupted_every_s, self._engine.interrupted_s)

        def seconds(step: Step) -> float:
            shapes = shapes_of(step, page_tokens)
            clean_s = cost.seconds(shapes) + stream_s * sum(shape.sample for shape in shapes)
            return self._api.beside(self._clock.now(), clean_s + others.lost_s(clean_s))

        return seconds

    def run(self) -> Outcome:
        """Play the load.

        Raises:
            CapacityError: if a request could never fit in the pages.
            ContextOverflowError: if prompt and output exceed the context.
        """
        if self._load.cache == "cached":
            self._send(self._prompts.first(), 0)
            self._play()
        start_s, first = self._clock.now(), len(self._done)
        before = _Totals.of(self._scheduler.counters)
        self._start(start_s)
        self._play()
        return self._outcome(self._done[first:], start_s, before)

    def _start(self, start_s: float) -> None:
        load = self._load
        if load.rate:
            for at_s in self._prompts.arrivals():
                self._send(self._prompts.first(), 0, start_s + at_s)
            return
        self._queue = load.conversations or load.requests
        for _ in range(min(load.concurrency, self._queue)):
            self._next_from_queue()

    def _next_from_queue(self) -> None:
        if self._queue:
            self._queue -= 1
            turns = self._load.turns - 1 if self._load.conversations else 0
            self._send(self._prompts.first(), turns)

    def _send(self, prompt: list[int], turns_left: int, at_s: float | None = None) -> None:
        sent_s = self._clock.now() if at_s is None else at_s
        self._sent += 1
        self._flights[self._sent] = _Flight(sent_s, prompt, turns_left)
        self._api.send(self._sent, sent_s)

    def _play(self) -> None:
        loop, clock, api = self._loop, self._clock, self._api
        while api or loop.has_work:
            if not loop.has_work:
                clock.advance_to(api.next_s())
            for request_id in api.arrived(clock.now()):
                loop.add(request_id, self._flights[request_id].prompt, self._sampling)
            outputs = loop.step()
            if not outputs and not loop.last_step:
                raise EngineError("the scheduler has work and plans no step")
            if self._paranoid:
                self._scheduler.check_integrity()
            for output in outputs:
                self._take(output)

    def _take(self, output: Output) -> None:
        now_s = self._clock.now()
        flight = self._flights[output.sequence.id]
        if output.sampled is not None:
            flight.token_s.append(now_s)
        if output.finish is None:
            return
        self._done.append(self._flights.pop(output.sequence.id))
        if flight.turns_left:
            said = self._prompts.draw(self._load.turn_tokens)
            self._send(output.sequence.tokens + said, flight.turns_left - 1)
        else:
            self._next_from_queue()

    def _outcome(self, flights: list[_Flight], start_s: float, before: _Totals) -> Outcome:
        totals = _Totals.of(self._scheduler.counters)
        gaps = [[b - a for a, b in pairwise(f.token_s)] for f in flights]
        return Outcome(
            requests=len(flights),
            ttft_s=[f.token_s[0] - f.sent_s for f in flights],
            itl_s=[gap for request in gaps for gap in request],
            tpot_s=[sum(request) / len(request) for request in gaps if request],
            duration_s=max(f.token_s[-1] for f in flights) - start_s,
            prompt_tokens=totals.prompt_tokens - before.prompt_tokens,
            cached_tokens=totals.cached_tokens - before.cached_tokens,
            output_tokens=sum(len(f.token_s) for f in flights),
            preemptions=totals.preemptions - before.preemptions,
            steps=totals.steps - before.steps,
        )


class _Totals(msgspec.Struct, frozen=True):
    steps: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int

    @classmethod
    def of(cls, counters: object) -> _Totals:
        return msgspec.convert(counters, cls, from_attributes=True)


def simulate(
    engine: TwinEngine, cost: StepSeconds, load: Load, *, paranoid: bool = False
) -> Outcome:
    """Play ``load`` on ``engine``; ``paranoid`` checks every invariant after every step.

    Raises:
        UsageError: for a load that cannot be.
        CapacityError, ContextOverflowError: if a request could never be served.
    """
    return Simulation(engine, cost, load, paranoid=paranoid).run()
