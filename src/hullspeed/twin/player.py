"""Player: a workload on the twin's scheduler, on a virtual clock, with steps that cost seconds.

Nothing here decides anything: the scheduler plans each step as the engine's would, and the cost
model says how long it takes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from hullspeed.core.request import Request, Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.step import StepResult
from hullspeed.errors import CapacityError, EngineError
from hullspeed.perf.work import Shape, StepSeconds
from hullspeed.twin.api_process import ApiProcess
from hullspeed.twin.engine import EngineModel
from hullspeed.twin.interrupted import Interrupted
from hullspeed.twin.played import Moment, Played, Served
from hullspeed.twin.scheduler import LazyStep, TwinScheduler
from hullspeed.twin.timing import StepTimer
from hullspeed.twin.workload import Session, Turn, Workload, spelled

_SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)
_RESULT = StepResult([])
_MOMENTS = 256


@dataclass(slots=True)
class _Flight:
    """One request under way, and what its session does next."""

    turn: Turn
    session: Session
    next_turn: int
    sent_s: float
    sequence: Sequence | None = None


class Player:
    """One workload on one engine; :meth:`play` plays it to its end.

    Args:
        paranoid: Check every invariant after every step.
    """

    def __init__(
        self, engine: EngineModel, cost: StepSeconds, workload: Workload, *, paranoid: bool = False
    ) -> None:
        self._engine = engine
        self._timer = StepTimer(cost, engine.stream_token_s)
        self._workload = workload
        self._paranoid = paranoid
        self._scheduler = engine.scheduler()
        self._now_s = 0.0
        self._busy_s = 0.0
        self._n_sent = 0
        self._flights: dict[int, _Flight] = {}
        self._api = ApiProcess(
            engine.request_work_s,
            max(engine.request_s - engine.request_work_s, 0.0),
            own_core=engine.own_core,
        )
        self._others = Interrupted(engine.interrupted_every_s, engine.interrupted_s)
        self._queue: deque[Session] = deque()
        self._served: list[Served] = []
        self._refused = 0
        self._first_s: float | None = None
        self._last_s = 0.0
        # What one state takes of the pool: of its bytes where it shares them, else of the slots.
        slots = engine.state_slots
        share = (
            engine.state_bytes / engine.shared_bytes if engine.shared_bytes else 1 / max(1, slots)
        )
        self._timeline = _Timeline(share if slots else 0.0)

    def play(self) -> Played:
        """Play the workload."""
        if self._workload.concurrency:
            self._queue.extend(self._workload.sessions)
            for _ in range(self._workload.concurrency):
                self._start_next()
        else:
            for session in self._workload.sessions:
                self._send(session, 0, session.at_s)
        scheduler = self._scheduler
        while self._api or scheduler.has_work:
            if not scheduler.has_work:
                self._now_s = max(self._now_s, self._api.next_s())
            for request_id in self._api.arrived(self._now_s):
                self._add(request_id)
            if scheduler.has_work:
                self._step()
        first_s = self._first_s or 0.0
        return Played(
            served=tuple(self._served),
            refused=self._refused,
            duration_s=max(self._last_s - first_s, 0.0),
            busy_s=self._busy_s,
            steps=scheduler.counters.steps,
            preemptions=scheduler.counters.preemptions,
            n_pages=scheduler.pages.size,
            timeline=tuple(self._timeline.moments),
        )

    def _step(self) -> None:
        scheduler = self._scheduler
        step = scheduler.schedule(self._now_s)
        if not step:
            raise EngineError("the scheduler has work and plans no step")
        clean_s = self._step_s(step)
        seconds = clean_s + self._others.lost_s(clean_s)
        if self._engine.request_work_s:
            seconds = self._api.beside(self._now_s, seconds)
        self._busy_s += seconds
        self._now_s += seconds
        for output in scheduler.commit(step, _RESULT, self._now_s):
            if output.finish is not None:
                self._finish(output.sequence)
        if self._now_s >= self._timeline.next_s:
            self._timeline.note(self._now_s, scheduler)
        if self._paranoid:
            scheduler.check_integrity()

    def _step_s(self, step: LazyStep) -> float:
        n, context = step.n_lazy, step.lazy_context_tokens
        chunks = []
        for span in step.spans:
            if span.length == 1 and span.sample:
                n, context = n + 1, context + span.start
            else:
                chunks.append(Shape(span.length, span.start, span.sample))
        return self._timer.seconds(n, context, chunks)

    # -- requests come and go ------------------------------------------------------------------

    def _start_next(self) -> None:
        if self._queue:
            self._send(self._queue.popleft(), 0, self._now_s)

    def _send(self, session: Session, index: int, at_s: float) -> None:
        if index >= len(session.turns):
            if self._workload.concurrency:
                self._start_next()
            return
        turn = session.turns[index]
        sent_s = at_s + turn.wait_s
        self._n_sent += 1
        self._flights[self._n_sent] = _Flight(turn, session, index + 1, sent_s)
        self._api.send(self._n_sent, sent_s)

    def _add(self, request_id: int) -> None:
        flight = self._flights[request_id]
        turn = flight.turn
        if turn.measured and self._first_s is None:
            self._first_s = flight.sent_s
        if turn.isl_tokens + turn.osl_tokens > self._engine.max_context_tokens:
            self._refuse(request_id)
            return
        request = Request(
            id=request_id,
            prompt=tuple(turn.tokens()),
            sampling=_SAMPLING,
            max_tokens=turn.osl_tokens,
            arrival_s=self._now_s,
            checkpoints=turn.checkpoints,
        )
        self._scheduler.filler[request_id] = spelled(turn.said) if turn.said else turn.answer
        try:
            flight.sequence = self._scheduler.add(request)
        except CapacityError:
            del self._scheduler.filler[request_id]
            self._refuse(request_id)

    def _refuse(self, request_id: int) -> None:
        """The engine answers with an error; the session ends there."""
        self._refused += 1
        del self._flights[request_id]
        self._start_next()

    def _finish(self, sequence: Sequence) -> None:
        flight = self._flights.pop(sequence.id)
        del self._scheduler.filler[sequence.id]
        times = self._scheduler.token_times(sequence.id)
        if flight.turn.measured:
            self._last_s = self._now_s
            self._served.append(
                Served(
                    sent_s=flight.sent_s,
                    token_s=np.array(times),
                    prompt_tokens=sequence.prompt_tokens,
                    cached_tokens=sequence.cached_tokens or 0,
                    preemptions=sequence.preemptions,
                )
            )
        self._send(flight.session, flight.next_turn, self._now_s)


class _Timeline:
    """At most :data:`_MOMENTS` moments, evenly spaced over however long it takes: when they are
    full every other one is dropped and the spacing doubled.
    """

    def __init__(self, state_share: float) -> None:
        self.moments: list[Moment] = []
        self._state_share = state_share
        self.next_s = 0.0
        self._every_s = 0.05

    def note(self, now_s: float, scheduler: TwinScheduler) -> None:
        pages = scheduler.pages
        held = sum(len(s.pages) for s in scheduler.running)
        used = pages.n_taken
        self.moments.append(
            Moment(
                now_s,
                len(scheduler.running),
                len(scheduler.waiting),
                min(held, used),
                max(0, used - held),
                float(f"{self._state_share * scheduler.states.n_taken:.4g}"),
            )
        )
        if len(self.moments) > _MOMENTS:
            del self.moments[1::2]
            self._every_s *= 2
        self.next_s = now_s + self._every_s


def play(
    engine: EngineModel, cost: StepSeconds, workload: Workload, *, paranoid: bool = False
) -> Played:
    """Play ``workload`` on ``engine``; ``paranoid`` checks every invariant after every step."""
    return Player(engine, cost, workload, paranoid=paranoid).play()
