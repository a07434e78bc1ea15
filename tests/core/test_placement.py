"""Where states are saved, and which of them go first."""

from __future__ import annotations

import pytest

from hullspeed.clock import VirtualClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.core.executor import CostModelExecutor
from hullspeed.core.request import Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.segments import SegmentTree
from hullspeed.errors import UsageError

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


def loop(cache: str, *, eviction: str = "lru", slots: int = 12, block: int = 8) -> EngineLoop:
    clock = VirtualClock()
    scheduler = build_scheduler(
        n_pages=400, page_tokens=4, max_running=2, step_tokens=64, max_context_tokens=1000,
        n_state_slots=slots, state_bytes=400, page_bytes=4, cache=cache, eviction=eviction,
        block_tokens=block, flops=lambda n, start: 1000.0 * n,
    )  # fmt: skip
    executor = CostModelExecutor(clock, lambda _: 1.0)
    return EngineLoop(scheduler, executor, clock, Limits(vocab=100, max_context_tokens=1000))


def ask(
    engine: EngineLoop, i: int, prompt: list[int], checkpoints: tuple[int, ...] = ()
) -> Sequence:
    sequence = engine.add(i, prompt, GREEDY, checkpoints=checkpoints)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    return sequence


def saved(engine: EngineLoop) -> list[int]:
    tree = engine.scheduler.cache
    assert isinstance(tree, SegmentTree)
    return sorted(node.end for node in tree.nodes() if node.state is not None)


@pytest.mark.parametrize(
    ("cache", "places"),
    [("segment", [10, 27]), ("align", [8, 16, 24]), ("prompt_end", [24]), ("lru", [10, 27])],
)
def test_places_by_policy(cache: str, places: list[int]) -> None:
    engine = loop(cache)
    ask(engine, 0, [1] * 30, checkpoints=(10, 27))
    assert saved(engine) == places
    again = ask(engine, 1, [1] * 30, checkpoints=(10, 27))
    assert again.cached_tokens == places[-1]


def test_prompts_shorter_than_a_block_are_not_saved() -> None:
    for cache in ("align", "prompt_end"):
        engine = loop(cache, block=64)
        ask(engine, 0, [1] * 30, checkpoints=(10,))
        assert saved(engine) == []
    with pytest.raises(UsageError, match="a block has at least one token"):
        loop("align", block=0)


def test_a_state_that_its_conversation_has_moved_beyond_goes_first() -> None:
    """System block (10), first turn's end (30), second turn's end (60): when a slot is needed the
    middle one goes, although it saves more tokens than the system block's.
    """
    engine = loop("segment", eviction="density")
    first = [1] * 10 + [2] * 20
    second = first + [3] * 30
    ask(engine, 0, [*first, 9], checkpoints=(10, 30))
    assert ask(engine, 1, [*second, 9], checkpoints=(10, 60)).cached_tokens == 30
    assert saved(engine) == [10, 30, 60]
    assert engine.scheduler.cache.evict_states(1) == 1
    assert saved(engine) == [10, 60]
    engine.scheduler.check_integrity()
    assert ask(engine, 2, [*second, 8], checkpoints=(10,)).cached_tokens == 60


def test_a_place_where_others_branch_off_is_no_less_worth() -> None:
    """Two conversations continue from the same first turn: its state keeps its worth."""
    engine = loop("segment", eviction="density")
    first = [1] * 10 + [2] * 20
    ask(engine, 0, [*first, 9], checkpoints=(10, 30))
    ask(engine, 1, [*first, *[3] * 5, 9], checkpoints=(10, 35))
    ask(engine, 2, [*first, *[4] * 5, 9], checkpoints=(10, 35))
    engine.scheduler.cache.evict_states(1)
    assert 30 in saved(engine)
