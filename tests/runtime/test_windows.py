"""Models with sliding windows on pages of their own: nothing that was returned is read, and the
output is that of the whole context kept, and transformers'.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.core.engine import EngineLoop
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.step import Step, StepResult
from hullspeed.errors import CapacityError
from hullspeed.kernels.base import KvPages
from hullspeed.kernels.batch import Batch
from hullspeed.memory.ours_room import Room, page_size
from hullspeed.memory.windows import held_pages, least_pages
from hullspeed.models.attention import Attention
from hullspeed.models.decoder import Decoder
from hullspeed.runtime.library import Engine
from support.families import write_family

from .hybrids import (
    N_PAGES,
    N_WINDOW_PAGES,
    PAGE_TOKENS,
    HybridCase,
    hybrid_case,
    is_close_call,
    prompt_trees,
    random_prompt,
    run,
)
from .tiny import write_tokenizer

WINDOW = 40
WHOLE = 10_000
N_OUTPUT = 6


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss", "mistral"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HybridCase:
    torch.set_num_threads(1)
    kinds = ["sliding_attention", "full_attention"]
    changes = {"num_hidden_layers": 2, "layer_types": kinds}
    if request.param == "mistral":  # every layer has the window
        changes = {}
    return hybrid_case(tmp_path_factory.mktemp(request.param), request.param, **changes)


def window_layers(decoder: Decoder) -> list[KvPages]:
    mixers = [layer.mixer for layer in decoder._layers]
    return [m.kv for m in mixers if isinstance(m, Attention) and m.window_tokens]


def poison_what_is_free(loop: EngineLoop, decoder: Decoder) -> list[int]:
    """Before every step, pages of windows that nobody holds become NaN: reading one would show in
    the logits. Returns the list of how many were held.
    """
    windows, execute = loop.scheduler.windows, loop.executor.execute
    assert windows is not None
    held: list[int] = []

    def poisoned(step: Step) -> StepResult:
        owners = [windows.pool.owners(page) for page in range(windows.pool.size)]
        free = [page for page, n in enumerate(owners) if n == 0]
        for kv in window_layers(decoder):
            kv.keys[free] = torch.nan
            kv.values[free] = torch.nan
        held.extend(len(span.sequence.window_pages) for span in step.spans)
        result = execute(step)
        assert all(sampled.error is None for sampled in result.sampled)
        return result

    loop.executor.execute = poisoned  # type: ignore[method-assign]
    return held


def last_logits(case: HybridCase, loop: EngineLoop, prompt: list[int]) -> torch.Tensor:
    """Logits after ``prompt``, run through the loop."""
    seen: list[torch.Tensor] = []
    forward = case.decoder.forward

    def recording(batch: Batch) -> torch.Tensor:
        seen.append(forward(batch))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case.decoder, "forward", recording)
        run(loop, [prompt], 1)
    return seen[-1][0]


@pytest.mark.parametrize("cache", ["segment", "none"])
@pytest.mark.parametrize("chunk", [7, 64])
def test_a_long_context_in_a_pool_that_could_not_hold_it(
    case: HybridCase, chunk: int, cache: str
) -> None:
    """460 tokens are 29 pages of every layer; the windows have 11 or 12 for all."""
    least = least_pages(WINDOW, PAGE_TOKENS, chunk)
    assert least < 13
    loop = case.loop(step_tokens=chunk, max_running=1, n_window_pages=least, cache=cache)
    held = poison_what_is_free(loop, case.decoder)
    prompt = random_prompt(400, 11)
    (sequence,) = run(loop, [prompt], 60)
    want = case.uncached(prompt, 60)
    assert sequence.output == want or is_close_call(case, prompt, sequence.output, want)
    assert sequence.preemptions == 0
    assert max(held) <= held_pages(WINDOW, PAGE_TOKENS, chunk)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_cached_equals_uncached(case: HybridCase, data: st.DataObject) -> None:
    """Small pools: pages of windows and of the rest are evicted and merged while others run, and
    prompts are preempted; the uncached run keeps windows in full.
    """
    marked = data.draw(prompt_trees())
    chunk = data.draw(st.sampled_from([3, 16, 40]))
    loop = case.loop(
        step_tokens=chunk,
        max_running=data.draw(st.integers(1, 4)),
        n_pages=data.draw(st.integers(22, 60)),
        n_window_pages=least_pages(WINDOW, PAGE_TOKENS, chunk) + data.draw(st.integers(0, 20)),
        cache=data.draw(st.sampled_from(["segment", "align", "prompt_end", "lru", "none"])),
        eviction=data.draw(st.sampled_from(["lru", "density"])),
    )
    poison_what_is_free(loop, case.decoder)
    # Twice: the second time around what is left in the cache serves.
    for again in (marked, marked[::-1]):
        got = run(loop, [p for p, _ in again], N_OUTPUT, [places for _, places in again])
        for (prompt, _), sequence in zip(again, got, strict=True):
            want = case.uncached(prompt, N_OUTPUT)
            assert sequence.output == want or is_close_call(case, prompt, sequence.output, want)


def test_reading_a_returned_page_would_be_seen(case: HybridCase) -> None:
    """The property has teeth: pages of another prompt change the logits."""
    prompt, other = random_prompt(90, 1), random_prompt(90, 2)
    loop = case.loop(step_tokens=64, max_running=1)
    run(loop, [prompt, other], 1)
    right = last_logits(case, loop, prompt)
    tree = loop.scheduler.cache
    mine = tree.match(prompt, b"", limit=89, now_s=0.0).state
    others = tree.match(other, b"", limit=89, now_s=0.0).state
    assert mine is not None
    assert others is not None
    case.decoder.copy_window_pages(list(others), list(mine))
    assert (last_logits(case, loop, prompt) - right).abs().max() > 0.1


def test_one_prefix_in_many_continuations(case: HybridCase) -> None:
    """Six forks of one prefix, at a place inside a page, all at once."""
    prefix = random_prompt(150, 4)
    prompts = [prefix + random_prompt(5 + i, 60 + i) for i in range(6)]
    loop = case.loop(step_tokens=64, max_running=6)
    run(loop, [[*prefix, 1]], 1, [(150,)])
    got = run(loop, prompts, N_OUTPUT)
    assert [sequence.cached_tokens for sequence in got] == [150] * 6
    for prompt, sequence in zip(prompts, got, strict=True):
        want = case.uncached(prompt, N_OUTPUT)
        assert sequence.output == want or is_close_call(case, prompt, sequence.output, want)


def test_preempted_in_the_middle_of_a_prompt_for_pages_of_windows(case: HybridCase) -> None:
    """Windows are the scarce memory: two that decode grow to a window each while a long prompt is
    computed.
    """
    loop = case.loop(step_tokens=7, max_running=3, n_window_pages=10)
    poison_what_is_free(loop, case.decoder)
    prompts = [random_prompt(n, n) for n in (20, 21, 280)]
    got = run(loop, prompts, 60)
    assert got[2].preemptions > 0
    for prompt, sequence in zip(prompts, got, strict=True):
        want = case.uncached(prompt, 60)
        assert sequence.output == want or is_close_call(case, prompt, sequence.output, want)


def test_logits_are_transformers_over_many_windows(case: HybridCase) -> None:
    """Within 1e-4, chunk by chunk, at a context of twelve windows."""
    prompt = random_prompt(480, 8)
    with torch.inference_mode():
        want = case.module(torch.tensor([prompt])).logits[0, -1]
    loop = case.loop(step_tokens=50, max_running=1)
    for _ in range(2):  # computed, then continued from the cache
        got = last_logits(case, loop, prompt)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert loop.scheduler.counters.cached_tokens == 479


PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
TEXT = "The keeper of the lighthouse climbed the stairs every evening and wrote in his book: "
OPTIONS = {"weight_dtype": "fp32", "threads": 1, "max_running": 3, "page_tokens": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windows")
    kinds = ["sliding_attention", "full_attention"]
    write_family(
        path, "gemma3", num_hidden_layers=2, layer_types=kinds, vocab_size=307, sliding_window=40
    )
    write_tokenizer(path)
    return path


@pytest.mark.parametrize("kernels", ["cpu", "ref"])
def test_through_the_library(folder: Path, kernels: str) -> None:
    options = {**OPTIONS, "step_tokens": 64, "kernels": kernels}
    with Engine(str(folder), **options) as engine:  # type: ignore[arg-type]
        info = engine.info
        assert info.n_window_pages > 0
        assert info.window_tokens == WINDOW
        assert info.keeps_ends
        first, second = (engine.generate(TEXT, PARAMS)[0] for _ in range(2))
        talk = [{"role": "user", "content": TEXT * 3}]
        chats = [engine.chat(talk, PARAMS)[0] for _ in range(2)]
        stats = engine.stats
        assert stats.window_pages_total == info.n_window_pages
    assert (first.cached_tokens, second.cached_tokens) == (0, len(TEXT) - 1)
    assert chats[1].cached_tokens == 3 * len(TEXT) - 1
    assert second.token_ids == first.token_ids
    assert chats[1].token_ids == chats[0].token_ids
    with Engine(str(folder), cache="hash", **options) as full:  # type: ignore[arg-type]
        assert full.info.n_window_pages == 0
        assert full.generate(TEXT, PARAMS)[0].token_ids == first.token_ids


def test_what_is_allocated_is_what_was_planned(case: HybridCase) -> None:
    decoder = case.decoder
    mixers = [layer.mixer for layer in decoder._layers]
    held = [pool for m in mixers if isinstance(m, Attention) for pool in m.kv.pools]
    apart, shared = (
        page_size(decoder.arch, PAGE_TOKENS, windowed=windowed) for windowed in (True, False)
    )
    planned = Room(N_PAGES, shared, n_window_pages=N_WINDOW_PAGES, window_page_bytes=apart)
    assert sum(pool.nbytes for pool in held) == planned.total_bytes


def test_too_little_for_one_context_is_refused(folder: Path) -> None:
    with pytest.raises(CapacityError, match="windows of 40 tokens included"):
        Engine(str(folder), kernels="ref", kv_budget_bytes=200_000, **OPTIONS)  # type: ignore[arg-type]
