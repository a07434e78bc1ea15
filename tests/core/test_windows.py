"""Layers with a window keep a window: pages behind it are returned, and nothing is missed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.clock import VirtualClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.core.pages import WindowPool
from hullspeed.core.request import Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.segments import Node, SegmentTree
from hullspeed.core.step import Step, StepResult
from hullspeed.errors import UsageError
from hullspeed.memory.windows import held_pages, least_pages
from support.shadow import ShadowExecutor

PAGE = 4
WINDOW = 10


@dataclass
class Rig:
    """An engine loop over shadow memory; every step is checked."""

    loop: EngineLoop
    shadow: ShadowExecutor
    most_held: int = 0
    finished: dict[int, Sequence] = field(default_factory=dict)

    @property
    def pool(self) -> WindowPool:
        windows = self.loop.scheduler.windows
        assert windows is not None
        return windows.pool

    def step(self) -> None:
        for output in self.loop.step():
            if output.finish is not None:
                assert output.sequence.id not in self.finished, "ended twice"
                self.finished[output.sequence.id] = output.sequence
        self.loop.scheduler.check_integrity()
        held = (len(s.window_pages) for s in self.loop.scheduler.running)
        self.most_held = max(self.most_held, *held, 0)

    def ask(self, i: int, prompt: list[int], n: int = 1, places: tuple[int, ...] = ()) -> Sequence:
        params = SamplingParams(temperature=0.0, max_tokens=n)
        sequence = self.loop.add(i, prompt, params, checkpoints=places)
        while self.loop.has_work:
            self.step()
        return sequence


def rig(
    *,
    n_pages: int = 300,
    page_tokens: int = PAGE,
    window_tokens: int = WINDOW,
    n_window_pages: int = 60,
    max_running: int = 4,
    step_tokens: int = 16,
    cache: str = "segment",
    eviction: str = "lru",
    seed: int = 0,
) -> Rig:
    clock = VirtualClock()
    scheduler = build_scheduler(
        n_pages=n_pages,
        page_tokens=page_tokens,
        max_running=max_running,
        step_tokens=step_tokens,
        max_context_tokens=10_000,
        n_window_pages=n_window_pages,
        window_tokens=window_tokens,
        window_page_bytes=3,
        cache=cache,
        eviction=eviction,
        block_tokens=2 * page_tokens,
        flops=lambda n, start: n * (n + start),
    )
    rng = random.Random(seed)
    shadow = ShadowExecutor(
        clock, page_tokens, lambda _: rng.randint(0, 2), window_tokens=window_tokens
    )
    loop = EngineLoop(scheduler, shadow, clock, Limits(vocab=10, max_context_tokens=10_000))
    made = Rig(loop, shadow)
    execute = shadow.execute

    def owned(step: Step) -> StepResult:
        free = [c for c in step.window_copies if not made.pool.owners(c.source)]
        assert not free, f"copied from pages that nobody owns: {free}"
        return execute(step)

    shadow.execute = owned  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("cache", ["segment", "none"])
def test_a_long_context_in_a_pool_that_could_not_hold_it(cache: str) -> None:
    """1,000 tokens are 250 pages; a window of 10 and steps of 16 never hold more than 8."""
    least = least_pages(WINDOW, PAGE, 16)
    r = rig(n_window_pages=least, cache=cache)
    sequence = r.ask(0, [i % 7 for i in range(900)], n=100)
    assert len(sequence.output) == 100
    assert sequence.preemptions == 0
    assert r.most_held <= held_pages(WINDOW, PAGE, 16) == 7
    r.loop.scheduler.cache.clear()
    assert r.pool.n_free == r.pool.size == least


@given(
    window=st.integers(1, 60),
    page=st.integers(1, 16),
    start=st.integers(0, 500),
    n_tokens=st.integers(1, 100),
)
def test_the_bound_of_held_pages_is_reached_and_never_passed(
    window: int, page: int, start: int, n_tokens: int
) -> None:
    """Against counting pages of every position that the queries see or write."""

    def pages_at(first: int) -> int:
        seen = {p // page for q in range(first, first + n_tokens)
                for p in range(max(0, q - window + 1), q + 1)}  # fmt: skip
        assert WindowPool(1, page, window).pages_between(first, first + n_tokens) == len(seen)
        return len(seen)

    bound = held_pages(window, page, n_tokens)
    assert pages_at(start) <= bound
    late = window + page  # far enough that the window is whole
    assert max(pages_at(late + i) for i in range(page)) == bound


def test_decoding_holds_a_window() -> None:
    r = rig()
    r.loop.add(0, [1] * 40, SamplingParams(temperature=0.0, max_tokens=60))
    for _ in range(50):
        r.step()
    (sequence,) = r.loop.scheduler.running
    assert len(sequence.pages) > 20
    assert len(sequence.window_pages) <= held_pages(WINDOW, PAGE) == 4


def test_a_checkpoint_is_the_window_before_it_shared_and_costs_no_step() -> None:
    """The cache takes references on pages of the sequence; the chunk does not end there."""
    r = rig(step_tokens=64)
    r.loop.add(0, [1] * 40, SamplingParams(temperature=0.0, max_tokens=5), checkpoints=(21, 30))
    r.step()
    (sequence,) = r.loop.scheduler.running
    assert r.loop.scheduler.counters.steps == 1
    tree = r.loop.scheduler.cache
    assert isinstance(tree, SegmentTree)
    states = {node.end: node.state for node in tree.nodes()}
    held = sequence.window_pages
    # Keys 12 .. 20 and 21 .. 29 in pages of four tokens.
    assert states == {21: tuple(held[3:6]), 30: tuple(held[5:8])}


@pytest.mark.parametrize("place", [20, 21, 3, 39])
def test_a_hit_at_a_checkpoint_copies_the_page_that_it_cuts(place: int) -> None:
    r = rig(step_tokens=64)
    r.ask(0, [1] * 40, places=(place,))
    copies = []
    execute = r.shadow.execute

    def recording(step: Step) -> StepResult:
        copies.append((len(step.copies), len(step.window_copies)))
        return execute(step)

    r.loop.executor.execute = recording  # type: ignore[method-assign]
    again = r.ask(1, [1] * place + [2] * 30)
    assert again.cached_tokens == place
    cut = int(place % PAGE != 0)
    assert copies[0] == (cut, cut)


def test_a_conversation_finds_its_answer_again() -> None:
    """What was decoded is found at its end, as in models without windows."""
    r = rig(step_tokens=64)
    first = r.ask(0, [1] * 30, n=20)
    second = r.ask(1, [*first.tokens, 3, 3, 3])
    assert second.cached_tokens == 49


@pytest.mark.parametrize("shared", [1, 3, 4, 17, 29])
def test_a_prompt_that_the_window_still_sees_is_hit_at_any_token(shared: int) -> None:
    r = rig(window_tokens=40)
    r.ask(0, [i % 7 for i in range(30)])
    assert r.ask(1, [*(i % 7 for i in range(shared)), 9, 9, 9], n=5).cached_tokens == shared


@pytest.mark.parametrize(("places", "hit"), [((48,), 0), ((40,), 40), ((40, 48), 44)])
def test_states_together_serve_what_lies_between_them(places: tuple[int, ...], hit: int) -> None:
    """At 44 tokens the window begins at 35: in the page from 32 on, which the state at 40 has."""
    r = rig(cache="segment")
    prompt = [i % 7 for i in range(60)]
    r.ask(0, prompt, places=places)
    assert r.ask(1, [*prompt[:44], 9, 9, 9], n=5).cached_tokens == hit


def servable(tree: SegmentTree, pool: WindowPool, query: list[int]) -> int:
    """By trying every place from the deepest on: is each page of its last window to be had?"""
    lines = []
    for node in tree.nodes():
        tokens: list[int] = []
        above: Node | None = node
        while above is not None:
            tokens, above = above.tokens + tokens, above.parent
        lines.append((tokens, node.state))
    same = [sum(takewhile(bool, map(int.__eq__, tokens, query))) for tokens, _ in lines]
    deepest = max(same, default=0)
    page = pool.page_tokens
    for place in range(deepest, 0, -1):
        first = max(0, place - pool.window_tokens + 1) // page
        needed = {i: min(place, (i + 1) * page) for i in range(first, -(-place // page))}
        for (tokens, state), common in zip(lines, same, strict=True):
            if state is not None and common == min(len(tokens), deepest):
                begin = max(0, len(tokens) - pool.window_tokens + 1) // page
                for i in range(begin, begin + len(state)):
                    if i in needed and min(len(tokens), deepest) >= needed[i]:
                        del needed[i]
        if not needed:
            return place
    return 0


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_place_is_hit_whose_window_is_there(seed: int) -> None:
    rng = random.Random(seed)
    page_tokens, window = rng.choice([1, 3, 4]), rng.randint(2, 24)
    n_window_pages = least_pages(window, page_tokens, 16) + rng.randint(0, 80)
    r = rig(page_tokens=page_tokens, window_tokens=window, n_window_pages=n_window_pages)
    known = [[0]]
    for i in range(12):
        prompt = rng.choice(known)[: rng.randint(0, 60)]
        prompt = prompt + [rng.randint(0, 1) for _ in range(rng.randint(1, 25))]
        places = rng.sample(range(1, len(prompt) + 1), min(len(prompt), rng.randint(0, 3)))
        tree = r.loop.scheduler.cache
        assert isinstance(tree, SegmentTree)
        want = servable(tree, r.pool, prompt[:-1])
        assert tree.match(prompt, b"", limit=len(prompt) - 1, now_s=0.0).n_tokens == want
        # More, where its own first chunk is saved and joins with what is there.
        cached = r.ask(i, prompt, rng.randint(1, 4), tuple(sorted(places))).cached_tokens
        assert cached is not None
        assert cached >= want
        known.append(prompt)


def test_windows_share_and_return_pages_of_one_prefix() -> None:
    """Four continuations of one prefix start on the same window pages."""
    r = rig(step_tokens=256, n_window_pages=300)
    r.ask(0, [1] * 40, places=(40,))
    for i in range(4):
        r.loop.add(1 + i, [1] * 40 + [i] * 3, SamplingParams(temperature=0.0, max_tokens=40))
    r.step()
    tables = [s.window_pages for s in r.loop.scheduler.running]
    assert len({tuple(table[:2]) for table in tables}) == 1
    while r.loop.has_work:
        r.step()
    assert all(s.cached_tokens == 40 for i, s in r.finished.items() if i)


def test_a_prompt_takes_pages_from_a_younger_one_that_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The younger one's token was planned already in that step: it is withdrawn."""
    withdrawn: list[int] = []
    withdraw = Step.withdraw

    def recording(step: Step, sequence: Sequence) -> None:
        withdrawn.extend(span.sequence.id for span in step.spans if span.sequence is sequence)
        withdraw(step, sequence)

    monkeypatch.setattr(Step, "withdraw", recording)
    r = rig(n_window_pages=least_pages(WINDOW, PAGE, 8) + 2, step_tokens=8, cache="none")
    for i in range(2):
        r.loop.add(i, [i] * (3 + i), SamplingParams(max_tokens=60), priority=1)
    r.step()
    first = r.loop.add(9, [5] * 60, SamplingParams(max_tokens=3))
    while r.loop.has_work:
        before = first.computed
        r.step()
        assert first.computed > before or first.status == "finished"
    assert withdrawn == [1]
    assert sorted(r.finished) == [0, 1, 9]
    assert all(len(r.finished[i].output) == 60 for i in range(2))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="too few pages for the layers with a window"):
        rig(n_window_pages=least_pages(WINDOW, PAGE, 16) - 1)
    with pytest.raises(UsageError, match="at least one token"):
        rig(window_tokens=0)
    with pytest.raises(UsageError, match="without state or windows"):
        rig(cache="hash")
    with pytest.raises(UsageError, match="no recurrent states"):
        build_scheduler(
            n_pages=9, page_tokens=4, max_running=1, step_tokens=8, max_context_tokens=99,
            n_state_slots=9, n_window_pages=99, window_tokens=4,
        )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    cache=st.sampled_from(["segment", "segment", "align", "prompt_end", "lru", "none"]),
    eviction=st.sampled_from(["lru", "density"]),
)
def test_any_traffic_keeps_every_invariant(seed: int, cache: str, eviction: str) -> None:
    """Random arrivals, shared prefixes, cancellations, priorities and tenants on scarce memory:
    no query reads a page that was returned or is another's, every request ends exactly once,
    everything is free at the end."""
    rng = random.Random(seed)
    page_tokens, window = rng.choice([1, 4, 8]), rng.randint(1, 40)
    max_running, step_tokens = rng.randint(1, 6), rng.randint(1, 40)
    least = least_pages(window, page_tokens, max(step_tokens, max_running))
    r = rig(
        n_pages=rng.randint(12, 60),
        page_tokens=page_tokens,
        window_tokens=window,
        n_window_pages=least + rng.choice([0, 0, rng.randint(0, 30)]),
        max_running=max_running,
        step_tokens=step_tokens,
        cache=cache,
        eviction=eviction,
        seed=seed,
    )
    traffic(r, rng)
    scheduler = r.loop.scheduler
    assert r.most_held <= held_pages(window, page_tokens, scheduler.step_tokens)
    scheduler.cache.clear()
    assert scheduler.pages.n_free == scheduler.pages.size
    assert r.pool.n_free == r.pool.size


def traffic(r: Rig, rng: random.Random, n_requests: int = 30) -> None:
    room = r.loop.scheduler.pages.size * r.loop.scheduler.pages.page_tokens
    known: list[list[int]] = [[0]]
    cancelled = added = steps = 0
    while added < n_requests or r.loop.has_work:
        if added < n_requests and rng.random() < 0.5:
            prompt = rng.choice(known)[: rng.randint(0, 90)]
            prompt = prompt + [rng.randint(0, 2) for _ in range(rng.randint(1, 30))]
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
            cancelled += r.loop.cancel(rng.randrange(n_requests))
            r.loop.scheduler.check_integrity()
        r.step()
        steps += 1
        assert steps < 20_000, f"no end: {r.loop.scheduler.running}"
    assert len(r.finished) + cancelled == n_requests
