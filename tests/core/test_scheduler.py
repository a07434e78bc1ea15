from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.clock import VirtualClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.core.executor import CostModelExecutor
from hullspeed.core.request import FinishReason, Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.step import Sampled, StepResult
from hullspeed.errors import CapacityError, ContextOverflowError, RequestError, UsageError
from support.shadow import ShadowExecutor


@dataclass
class Rig:
    """An engine loop over shadow memory; every step is checked."""

    loop: EngineLoop
    shadow: ShadowExecutor
    finished: dict[int, Sequence] = field(default_factory=dict)

    def step(self) -> None:
        for output in self.loop.step():
            if output.finish is not None:
                assert output.sequence.id not in self.finished, "ended twice"
                self.finished[output.sequence.id] = output.sequence
        self.loop.scheduler.check_integrity()

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.loop.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.loop.scheduler.running}")


def rig(
    *,
    n_pages: int = 64,
    page_tokens: int = 4,
    max_running: int = 4,
    step_tokens: int = 16,
    n_state_slots: int = 0,
    cache: str = "segment",
    eviction: str = "lru",
    seed: int = 0,
    eos: tuple[int, ...] = (),
) -> Rig:
    clock = VirtualClock()
    scheduler = build_scheduler(
        n_pages=n_pages,
        page_tokens=page_tokens,
        max_running=max_running,
        step_tokens=step_tokens,
        max_context_tokens=10_000,
        n_state_slots=n_state_slots,
        cache=cache,
        eviction=eviction,
        flops=lambda n, start: n * (n + start),
    )
    rng = random.Random(seed)
    shadow = ShadowExecutor(
        clock, page_tokens, lambda _: rng.randint(0, 2), stateful=n_state_slots > 0
    )
    limits = Limits(vocab=10, max_context_tokens=10_000, eos_token_ids=eos)
    return Rig(EngineLoop(scheduler, shadow, clock, limits), shadow)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def test_decoding_goes_first_and_prompts_fill_the_budget() -> None:
    r = rig(step_tokens=8, max_running=3)
    r.loop.add(0, [1] * 4, greedy(8))
    r.step()
    r.loop.add(1, [2] * 20, greedy(2))
    step = r.loop.scheduler.schedule(0.0)
    assert [(s.sequence.id, s.start, s.length, s.sample) for s in step.spans] == [
        (0, 4, 1, True),
        (1, 0, 7, False),
    ]


def test_a_whole_prefix_but_one_token_comes_from_the_cache() -> None:
    r = rig()
    r.loop.add(0, [1, 2, 3, 4, 5, 6], greedy(3))
    r.run()
    before = r.shadow.computed_tokens
    sequence = r.loop.add(1, [1, 2, 3, 4, 5, 6], greedy(1))
    r.run()
    assert r.shadow.computed_tokens == before + 1
    assert sequence.cached_tokens == 5


def test_a_conversation_pays_only_for_what_is_new() -> None:
    r = rig(n_pages=256, step_tokens=64)
    prompt = [1] * 10
    for turn in range(5):
        before = r.shadow.computed_tokens
        sequence = r.loop.add(turn, prompt, greedy(6))
        r.run()
        if turn:
            # The last output token of the turn before was never computed.
            assert r.shadow.computed_tokens - before == 3 + 1 + 5
        prompt = sequence.tokens + [3] * 3


def test_waiting_requests_find_what_a_running_prompt_has_computed() -> None:
    r = rig(n_pages=256, max_running=8, step_tokens=16)
    for i in range(8):
        r.loop.add(i, [1] * 60 + [i], greedy(1))
    r.run()
    # One request computes the shared part; each other one its own end, and at most the chunk
    # that fitted beside it in its first step.
    assert r.shadow.computed_tokens < 61 + 7 * 16


def test_the_oldest_always_advances() -> None:
    """E08: two long requests must not preempt each other for ever."""
    r = rig(n_pages=12, page_tokens=4, max_running=4, step_tokens=8)
    for i in range(4):
        r.loop.add(i, [i] * 8, greedy(30))
    order: list[int] = []
    while r.loop.has_work:
        oldest = min(
            (*r.loop.scheduler.running, *r.loop.scheduler.waiting), key=lambda s: s.request.id
        )
        known = oldest.computed
        r.step()
        assert oldest.computed > known or oldest.status == "finished"
        order += [i for i in r.finished if i not in order]
    assert order == [0, 1, 2, 3]
    assert r.loop.scheduler.counters.preemptions > 0
    assert all(len(s.output) == 30 for s in r.finished.values())


def test_better_priority_takes_a_place() -> None:
    r = rig(max_running=1)
    r.loop.add(0, [1] * 4, greedy(20), priority=1)
    r.step()
    r.loop.add(1, [2] * 4, greedy(2), priority=0)
    r.run()
    assert list(r.finished) == [1, 0]
    assert r.finished[0].preemptions == 1
    assert len(r.finished[0].output) == 20


def test_better_priority_takes_pages() -> None:
    r = rig(n_pages=6, page_tokens=4, max_running=4)
    r.loop.add(0, [1] * 16, greedy(4), priority=1)
    r.step()
    r.loop.add(1, [2] * 16, greedy(4), priority=0)
    r.run()
    assert list(r.finished) == [1, 0]


def test_a_cancelled_request_is_free_at_once() -> None:
    r = rig(cache="none")
    r.loop.add(0, [1] * 40, greedy(5))
    r.loop.add(1, [2] * 4, greedy(5))
    r.step()
    assert r.loop.cancel(0)
    assert not r.loop.cancel(0)
    r.loop.scheduler.check_integrity()
    r.run()
    assert list(r.finished) == [1]
    pages = r.loop.scheduler.pages
    assert pages.n_free == pages.size
    step = r.loop.scheduler.schedule(0.0)
    assert 0 not in step.ended
    assert step.ended == [1]


def test_a_faulty_request_ends_alone_and_leaves_nothing_in_the_cache() -> None:
    r = rig()
    r.loop.add(0, [1] * 6, greedy(5))
    scheduler = r.loop.scheduler
    step = scheduler.schedule(0.0)
    (output,) = scheduler.commit(step, StepResult([Sampled(0, error="NaN logits")]), 0.0)
    assert output.finish is FinishReason.ERROR
    scheduler.check_integrity()
    assert not r.loop.has_work


def test_end_tokens_stop_and_can_be_ignored() -> None:
    stops = rig(eos=(0, 1, 2))
    stops.loop.add(0, [5], greedy(9))
    stops.loop.add(1, [5], SamplingParams(max_tokens=9, ignore_eos=True))
    stops.loop.add(2, [5], SamplingParams(max_tokens=9, min_tokens=4))
    stops.run()
    lengths = {i: len(s.output) for i, s in stops.finished.items()}
    assert lengths == {0: 1, 1: 9, 2: 4}
    assert stops.finished[0].finish_reason is FinishReason.STOP
    assert stops.finished[1].finish_reason is FinishReason.LENGTH


def test_checkpoints_end_chunks_and_are_hit_again() -> None:
    """E07: what follows a checkpoint may be rewritten; the checkpoint is still of use."""
    r = rig(n_state_slots=16, n_pages=256, step_tokens=64)
    r.loop.add(0, [1] * 20 + [2] * 5, greedy(4), checkpoints=(10, 20))
    r.run()
    assert r.loop.scheduler.cache.stats().resident_states == 2
    again = r.loop.add(1, [1] * 20 + [3] * 9, greedy(1), checkpoints=(20,))
    r.run()
    assert again.cached_tokens == 20
    part = r.loop.add(2, [1] * 12 + [4] * 9, greedy(1))
    r.run()
    assert part.cached_tokens == 10


def test_what_cannot_be_is_refused_at_the_door() -> None:
    r = rig(n_pages=4, page_tokens=4)
    with pytest.raises(ContextOverflowError, match="holds 16 tokens"):
        r.loop.add(0, [1] * 10, greedy(10))
    with pytest.raises(RequestError, match="no tokens"):
        r.loop.add(0, [], greedy(1))
    with pytest.raises(RequestError, match="0 to 9"):
        r.loop.add(0, [10], greedy(1))
    with pytest.raises(RequestError, match="temperature"):
        r.loop.add(0, [1], SamplingParams(temperature=-1.0))
    with pytest.raises(UsageError, match="too few state slots"):
        rig(n_state_slots=3)
    with pytest.raises(UsageError, match="unknown prefix cache"):
        rig(cache="magic")
    request = r.loop.add(0, [1] * 10, SamplingParams()).request
    assert request.max_tokens == 6
    with pytest.raises(CapacityError, match="grow beyond"):
        r.loop.scheduler.add(
            type(request)(id=9, prompt=(1,) * 17, sampling=SamplingParams(), max_tokens=1)
        )


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    stateful=st.booleans(),
    cache=st.sampled_from(["segment", "segment", "hash", "none"]),
    eviction=st.sampled_from(["lru", "density"]),
)
def test_any_traffic_keeps_every_invariant(
    seed: int, stateful: bool, cache: str, eviction: str
) -> None:
    """Random arrivals, shared prefixes, cancellations, priorities and tenants on scarce memory:
    every cell read is the right one, every request ends exactly once, everything is free at the
    end."""
    rng = random.Random(seed)
    if stateful and cache == "hash":
        cache = "segment"
    r = rig(
        n_pages=rng.randint(12, 60),
        page_tokens=rng.choice([1, 4, 8]),
        max_running=rng.randint(1, 6),
        step_tokens=rng.randint(1, 40),
        n_state_slots=rng.randint(13, 20) if stateful else 0,
        cache=cache,
        eviction=eviction,
        seed=seed,
        eos=rng.choice([(), (2,)]),
    )
    traffic(r, rng)
    scheduler = r.loop.scheduler
    scheduler.cache.clear()
    assert scheduler.pages.n_free == scheduler.pages.size
    assert scheduler.states.n_free == scheduler.states.size


def traffic(r: Rig, rng: random.Random, n_requests: int = 40) -> None:
    room = r.loop.scheduler.pages.size * r.loop.scheduler.pages.page_tokens
    known: list[list[int]] = [[0]]
    cancelled: set[int] = set()
    added = 0
    while added < n_requests or r.loop.has_work:
        if added < n_requests and rng.random() < 0.5:
            prompt = rng.choice(known)[: rng.randint(0, 60)]
            prompt = prompt + [rng.randint(0, 2) for _ in range(rng.randint(1, 20))]
            prompt = prompt[: max(1, room - 12)]
            places = rng.sample(range(1, len(prompt) + 1), min(len(prompt), rng.randint(0, 2)))
            r.loop.add(
                added,
                prompt,
                SamplingParams(max_tokens=rng.randint(1, 10)),
                priority=rng.choice([0, 0, 0, 1]),
                salt=rng.choice([b"a", b"b"]),
                checkpoints=tuple(sorted(places)),
            )
            known.append(prompt)
            added += 1
        if rng.random() < 0.05:
            victim = rng.randrange(n_requests)
            if r.loop.cancel(victim):
                cancelled.add(victim)
                r.loop.scheduler.check_integrity()
        r.step()
        known += [s.tokens for s in r.finished.values() if rng.random() < 0.02]
    assert len(r.finished) + len(cancelled) == n_requests
    assert not cancelled & r.finished.keys()
    assert all(1 <= len(s.output) <= s.request.max_tokens for s in r.finished.values())


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_the_same_results_give_the_same_steps(seed: int) -> None:
    """The seam of simulation: a cost model that repeats an executor's times and tokens sees
    exactly the steps that the executor saw."""
    rng = random.Random(seed)
    r = rig(n_pages=24, max_running=4, step_tokens=12, seed=seed)
    r.shadow.step_seconds = lambda step: 0.01 + 0.001 * step.n_tokens
    traffic(r, rng)
    recorded = iter(r.shadow.results)

    keys: list[tuple[object, ...]] = []
    clock = VirtualClock()
    scheduler = build_scheduler(
        n_pages=24, page_tokens=4, max_running=4, step_tokens=12, max_context_tokens=10_000
    )
    tokens: list[Sampled] = []

    class Recorded(CostModelExecutor):
        def execute(self, step):  # type: ignore[no-untyped-def]
            keys.append(step.key())
            tokens[:] = next(recorded).sampled
            return super().execute(step)

    cost = Recorded(clock, lambda step: 0.01 + 0.001 * step.n_tokens, lambda _: tokens.pop(0).token)
    twin = Rig(EngineLoop(scheduler, cost, clock, r.loop.limits), r.shadow)
    traffic(twin, random.Random(seed))
    assert keys == r.shadow.keys
