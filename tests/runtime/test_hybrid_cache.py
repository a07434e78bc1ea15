"""Cached equals uncached for models with recurrent state: a stale state is silent, so it is looked
for in random trees of prompts, under eviction, merges, forks and preemption (field case E01).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.core.engine import EngineLoop
from hullspeed.core.segments import SegmentTree
from hullspeed.errors import RequestError

from .hybrids import (
    PAGE_TOKENS,
    HybridCase,
    hybrid_case,
    is_close_call,
    prompt_trees,
    random_prompt,
    run,
)

WHOLE = 10_000
N_OUTPUT = 6


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HybridCase:
    torch.set_num_threads(1)
    # Two layers, one of each kind: quick enough for many trees.
    kinds = ["linear_attention", "full_attention"]
    folder = tmp_path_factory.mktemp(request.param)
    return hybrid_case(folder, request.param, num_hidden_layers=2, layer_types=kinds)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_cached_equals_uncached(hybrid: HybridCase, data: st.DataObject) -> None:
    """Small pools: states and pages are evicted and merged while others run."""
    marked = data.draw(prompt_trees())
    max_running = data.draw(st.integers(1, 4))
    loop = hybrid.loop(
        step_tokens=data.draw(st.sampled_from([3, 16, 40, WHOLE])),
        max_running=max_running,
        n_pages=data.draw(st.integers(22, 60)),
        n_slots=2 * max_running + 1 + data.draw(st.integers(0, 6)),
        cache=data.draw(st.sampled_from(["segment", "align", "prompt_end", "lru"])),
        eviction=data.draw(st.sampled_from(["lru", "density"])),
    )
    # Twice: the second time around what is left in the cache serves.
    for again in (marked, marked[::-1]):
        prompts = [prompt for prompt, _ in again]
        got = run(loop, prompts, N_OUTPUT, [places for _, places in again])
        for prompt, sequence in zip(prompts, got, strict=True):
            want = hybrid.uncached(prompt, N_OUTPUT)
            assert sequence.output == want or is_close_call(hybrid, prompt, sequence.output, want)


def test_a_stale_state_would_be_seen(hybrid: HybridCase) -> None:
    """The property has teeth: a hit that reads another prompt's state changes the output."""
    prompt, other = random_prompt(60, 1), random_prompt(60, 2)
    wanted = hybrid.uncached(prompt, 8)
    loop = hybrid.loop(step_tokens=WHOLE, max_running=1)
    run(loop, [prompt, other], 8)
    slots = {tuple(node.tokens[:5]): node.state for node in _tree(loop).nodes()}
    mine, others = slots[tuple(prompt[:5])], slots[tuple(other[:5])]
    assert mine is not None
    assert others is not None
    hybrid.decoder.copy_states(list(others), list(mine))
    (stale,) = run(loop, [prompt], 8)
    assert stale.cached_tokens == 59
    assert stale.output != wanted


def test_eviction_and_merge_during_traffic(hybrid: HybridCase) -> None:
    """A conversation that grows turn by turn beside unrelated ones, with few slots: states of
    earlier turns are merged away, the last one is still hit.
    """
    loop = hybrid.loop(step_tokens=32, max_running=2, n_slots=7, n_pages=60)
    turns, hits = random_prompt(30, 5), []
    for turn in range(6):
        beside = random_prompt(40, 100 + turn)
        sequence, _ = run(loop, [turns, beside], 8)
        hits.append(sequence.cached_tokens)
        assert sequence.output == hybrid.uncached(turns, 8)
        turns = turns + sequence.output + random_prompt(20, 50 + turn)
    assert hits[0] == 0
    lengths = [29 + 28 * turn for turn in range(6)]
    assert hits[1:] == lengths[:-1]
    stats = loop.scheduler.cache.stats()
    assert stats.resident_states < 12  # twelve were saved
    assert stats.resident_tokens > 0


def test_a_snapshot_costs_no_copy(hybrid: HybridCase) -> None:
    """A checkpoint donates the slot: the sequence reads it and writes elsewhere (field case E03).
    No state is copied.
    """
    loop = hybrid.loop(step_tokens=WHOLE, max_running=1)
    seen = []
    while_running = loop.executor.execute

    def recording(step):  # type: ignore[no-untyped-def]
        seen.append([(s.start, s.length, s.read_slot, s.write_slot) for s in step.spans])
        assert not step.state_copies
        return while_running(step)

    loop.executor.execute = recording  # type: ignore[method-assign]
    (sequence,) = run(loop, [random_prompt(50, 9)], 3, [(20,)])
    (first,), (second,), *decodes = seen
    assert first[:2] == (0, 20)
    assert second[:3] == (20, 30, first[3])
    assert second[3] != first[3]
    assert all(read == write == second[3] for ((_, _, read, write),) in decodes)
    assert sequence.cached_tokens == 0


def test_state_at_the_end_of_decoding_is_not_kept(hybrid: HybridCase) -> None:
    loop = hybrid.loop(step_tokens=WHOLE, max_running=1)
    run(loop, [random_prompt(50, 9)], 10)
    assert [node.end for node in _tree(loop).nodes()] == [49]


def test_short_prompts_hit_at_pages_and_inside(hybrid: HybridCase) -> None:
    """No unified block: a prompt of 20 tokens is hit too (field case E04)."""
    loop = hybrid.loop(step_tokens=WHOLE, max_running=1)
    prompt = random_prompt(PAGE_TOKENS + 4, 3)
    run(loop, [prompt], 2)
    assert run(loop, [prompt], 2)[0].cached_tokens == PAGE_TOKENS + 3


@pytest.mark.parametrize("places", [(0,), (-1,), (31,), (5, 40)])
def test_checkpoints_outside_the_prompt_are_refused(
    hybrid: HybridCase, places: tuple[int, ...]
) -> None:
    with pytest.raises(RequestError, match="checkpoint"):
        run(hybrid.loop(step_tokens=8, max_running=1), [random_prompt(30, 1)], 1, [places])


def _tree(loop: EngineLoop) -> SegmentTree:
    cache = loop.scheduler.cache
    assert isinstance(cache, SegmentTree)
    return cache
