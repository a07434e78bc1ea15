"""The twin's scheduler decides as the production scheduler does, step for step."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hullspeed.core.build import build_pools
from hullspeed.core.request import Request
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.scheduler import Scheduler
from hullspeed.core.step import Sampled, StepResult
from hullspeed.memory.windows import least_pages
from hullspeed.twin.scheduler import TwinScheduler

STATE_BYTES = 3


class Case:
    """One random engine, twice: the production scheduler and the twin's."""

    def __init__(self, rng: random.Random) -> None:
        self.n_pages = rng.randint(12, 60)
        self.page_tokens = rng.choice([1, 4, 8])
        self.running = rng.randint(1, 6)
        self.step_tokens = rng.randint(1, 40)
        self.slots = rng.choice([0, rng.randint(2 * self.running + 1, 20)])
        self.stored = 0
        self.window = 0 if self.slots else rng.choice([0, rng.randint(1, 40)])
        steps = max(self.step_tokens, self.running)
        least = least_pages(self.window, self.page_tokens, steps)
        self.window_pages = least + rng.randint(0, 20) if self.window else 0
        caches = ["segment", "align", "prompt_end", "lru", "none"]
        stateful = self.slots or self.window
        self.cache = rng.choice(caches if stateful else ["segment", "lru", "hash", "none"])
        self.eviction = rng.choice(["lru", "density"])
        # Live sequences always fit; what the cache keeps competes for the rest.
        least = self.n_pages + (2 * self.running + 1) * STATE_BYTES
        self.shared_bytes = rng.choice([0, least]) if self.slots else 0
        if self.slots and not self.shared_bytes and rng.random() < 0.5:
            # Cached states in a form of their own, as the engine keeps int8 ones.
            self.slots, self.stored = self.running, rng.randint(1, 8)
        self.plain = self._make(Scheduler)
        self.twin = self._make(TwinScheduler)

    def _make(self, kind: type[Scheduler]) -> Scheduler:
        pools = build_pools(
            n_pages=self.n_pages,
            page_tokens=self.page_tokens,
            max_running=self.running,
            n_state_slots=self.slots,
            n_stored_slots=self.stored,
            n_window_pages=self.window_pages,
            window_tokens=self.window,
            window_page_bytes=2,
            state_bytes=STATE_BYTES,
            shared_bytes=self.shared_bytes,
            cache=self.cache,
            eviction=self.eviction,
            block_tokens=2 * self.page_tokens,
            flops=lambda n, start: n * (n + start),
        )
        return kind(
            pools.pages,
            pools.states,
            pools.cache,
            max_running=self.running,
            step_tokens=self.step_tokens,
            max_context_tokens=self.n_pages * self.page_tokens,
            placement=pools.placement,
            stored=pools.stored,
            windows=pools.windows,
        )


def requests(rng: random.Random, room: int, n: int) -> list[Request]:
    known: list[list[int]] = [[0]]
    made = []
    for i in range(n):
        prompt = rng.choice(known)[: rng.randint(0, 60)]
        prompt = prompt + [rng.randint(0, 2) for _ in range(rng.randint(1, 20))]
        prompt = prompt[: max(1, room - 30)]
        known.append(prompt)
        places = rng.sample(range(1, len(prompt) + 1), min(len(prompt), rng.randint(0, 2)))
        made.append(
            Request(
                id=i,
                prompt=tuple(prompt),
                sampling=SamplingParams(temperature=0.0, ignore_eos=True),
                max_tokens=rng.randint(1, min(28, room - len(prompt))),
                priority=rng.choice([0, 0, 0, 1]),
                salt=rng.choice([b"a", b"b"]),
                arrival_s=float(i),
                checkpoints=tuple(sorted(places)),
            )
        )
    return made


def said_token(request_id: int, place: int) -> int:
    return (request_id + place) % 3 if request_id % 2 else 0


# Drawing is timed too, and a loaded machine may stop in the middle of it.
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), paranoid=st.booleans())
def test_every_step_is_the_production_schedulers(seed: int, paranoid: bool) -> None:
    """Page numbers, state slots, order, copies, preemptions, ends: all of ``Step.key``."""
    rng = random.Random(seed)
    case = Case(rng)
    plain, twin = case.plain, case.twin
    assert isinstance(twin, TwinScheduler)
    todo = requests(rng, case.n_pages * case.page_tokens, 30)
    token_s: dict[int, list[float]] = {}
    now = 0.0
    steps = 0
    while todo or plain.has_work:
        if todo and rng.random() < 0.3:
            request = todo.pop(0)
            plain.add(request)
            twin.add(request)
            # One number for all output tokens, or a list of them.
            said = [said_token(request.id, n) for n in range(28)]
            twin.filler[request.id] = said if request.id % 2 else 0
        if rng.random() < 0.03:
            victim = rng.randrange(30)
            assert plain.cancel(victim) == twin.cancel(victim)
        step, lazy = plain.schedule(now), twin.schedule(now)
        assert twin.key(lazy) == step.key()
        assert bool(lazy) == bool(step)
        steps += 1
        assert steps < 5_000, "no end"
        if not step:
            continue
        assert lazy.n_lazy + sum(s.length for s in lazy.spans) == step.n_tokens
        assert lazy.lazy_context_tokens + sum(s.start for s in lazy.spans) == sum(
            s.start for s in step.spans
        )
        now += 1.0 + step.n_tokens / 128
        tokens = [
            Sampled(said_token(s.sequence.id, s.sequence.output_tokens))
            for s in step.spans
            if s.sample
        ]
        outputs = plain.commit(step, StepResult(tokens), now)
        for output in outputs:
            token_s.setdefault(output.sequence.id, []).append(now)
        ended = [(o.sequence.id, o.finish, o.sequence.tokens) for o in outputs if o.finish]
        twins = twin.commit(lazy, StepResult([]), now)
        assert [(o.sequence.id, o.finish, o.sequence.tokens) for o in twins if o.finish] == ended
        for output in twins:
            if output.finish:
                assert twin.token_times(output.sequence.id) == token_s[output.sequence.id]
        if paranoid:
            twin.check_integrity()
    assert twin.counters == plain.counters
    twin.check_integrity()
    assert twin.cache.stats() == plain.cache.stats()
    plain.cache.clear()
    twin.cache.clear()
    for scheduler in (plain, twin):
        budget = scheduler.pages.budget
        if budget is None:
            assert scheduler.pages.n_free == scheduler.pages.size
            assert scheduler.states.n_free == scheduler.states.size
            if scheduler.stored is not None:
                assert scheduler.stored.n_free == scheduler.stored.size
        else:
            assert budget.free_bytes == budget.total_bytes


def test_a_prompt_that_takes_pages_of_windows_from_one_that_decodes() -> None:
    """The younger one's token was planned already, by the twin as one of many alike."""
    case = Case(random.Random(0))
    case.n_pages, case.page_tokens, case.running, case.step_tokens = 300, 4, 4, 8
    case.window, case.window_pages = 10, least_pages(10, 4, 8) + 2
    case.slots = case.shared_bytes = 0
    case.cache = "none"
    plain, twin = case._make(Scheduler), case._make(TwinScheduler)
    assert isinstance(twin, TwinScheduler)
    for i in range(2):
        for scheduler in (plain, twin):
            scheduler.add(request_of(i, 3 + i, 60, priority=1))
    now = 0.0
    while plain.has_work:
        step, lazy = plain.schedule(now), twin.schedule(now)
        assert twin.key(lazy) == step.key()
        now += 1.0
        plain.commit(step, StepResult([Sampled(0) for s in step.spans if s.sample]), now)
        twin.commit(lazy, StepResult([]), now)
        twin.check_integrity()
        if now == 1.0:
            for scheduler in (plain, twin):
                scheduler.add(request_of(9, 60, 3, priority=0))
    assert plain.counters.preemptions == twin.counters.preemptions > 0
    assert not twin.has_work


def request_of(i: int, prompt_tokens: int, max_tokens: int, priority: int) -> Request:
    return Request(
        id=i,
        prompt=(5,) * prompt_tokens,
        sampling=SamplingParams(temperature=0.0, ignore_eos=True),
        max_tokens=max_tokens,
        priority=priority,
        arrival_s=float(i),
    )
