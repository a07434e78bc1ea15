"""Greedy output of every family is transformers' own, however the work is cut, batched, cached,
forked or interrupted.
"""

from __future__ import annotations

import pytest
import torch

from support.families import HYBRIDS, VOCAB

from .hybrids import PAGE_TOKENS, HybridCase, hybrid_case, random_prompt, run
from .tiny import CLEAR_MARGIN, greedy

N_OUTPUT = 20
WHOLE = 10_000
CHUNKS = [1, 7, 64, WHOLE]
LENGTHS = [130, 1, 17, 64, 90]
FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "gemma3", "gpt_oss"]


class Oracle:
    """Prompts with a clear greedy output, and that output."""

    def __init__(self, case: HybridCase) -> None:
        self.case = case
        self.prompts: list[list[int]] = []
        self.outputs: list[list[int]] = []
        for length in LENGTHS:
            self.add(length)

    def add(self, length: int, prefix: tuple[int, ...] = ()) -> None:
        """One more prompt, of ``prefix`` and ``length`` tokens of its own."""
        for seed in range(100):
            prompt = [*prefix, *random_prompt(length, 1000 * length + 7 * len(prefix) + seed)]
            result = greedy(self.case.module, prompt, N_OUTPUT)
            if result.margin > CLEAR_MARGIN and prompt not in self.prompts:
                self.prompts.append(prompt)
                self.outputs.append(result.tokens)
                return
        raise AssertionError("no prompt has a clear winner at every token")


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    torch.set_num_threads(1)
    return Oracle(hybrid_case(tmp_path_factory.mktemp(request.param), request.param))


def outputs(*args: object, **kwargs: object) -> list[list[int]]:
    return [sequence.output for sequence in run(*args, **kwargs)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chunk", "cache"), [*((chunk, "segment") for chunk in CHUNKS), (64, "none")]
)
def test_alone_cold_then_cached(oracle: Oracle, chunk: int, cache: str) -> None:
    loop = oracle.case.loop(step_tokens=chunk, max_running=1, cache=cache)
    prompt, want = oracle.prompts[0], oracle.outputs[0]
    assert outputs(loop, [prompt], N_OUTPUT) == [want]
    before = loop.scheduler.counters.cached_tokens
    assert outputs(loop, [prompt], N_OUTPUT) == [want]
    cached = loop.scheduler.counters.cached_tokens - before
    assert cached == (0 if cache == "none" else len(prompt) - 1)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_mixed_batch_cold_then_cached(oracle: Oracle, chunk: int) -> None:
    loop = oracle.case.loop(step_tokens=chunk, max_running=5)
    assert outputs(loop, oracle.prompts, N_OUTPUT) == oracle.outputs
    assert outputs(loop, oracle.prompts[::-1], N_OUTPUT) == oracle.outputs[::-1]


@pytest.mark.parametrize(("chunk", "place"), [(7, 33), (7, 64), (64, 16), (WHOLE, 1), (WHOLE, 100)])
def test_cached_at_a_requested_checkpoint(oracle: Oracle, chunk: int, place: int) -> None:
    """The end of a system block or of a prompt before its tail: on a page's border and inside."""
    prompt, want = oracle.prompts[0], oracle.outputs[0]
    loop = oracle.case.loop(step_tokens=chunk, max_running=2)
    other = [*prompt[:place], (prompt[place] + 1) % VOCAB, *random_prompt(20, place)]
    run(loop, [other], 3, [(place,)])
    (again,) = run(loop, [prompt], N_OUTPUT)
    assert again.cached_tokens == place
    assert again.output == want


def test_cached_at_a_junction(oracle: Oracle) -> None:
    """Two prompts part where nobody asked for a checkpoint: the third starts from there."""
    decoder = oracle.case.decoder
    if decoder.arch.family not in HYBRIDS and not decoder.n_window_pages:
        pytest.skip("models without state are hit at any token")
    prompt, want = oracle.prompts[0], oracle.outputs[0]
    place = 5 * PAGE_TOKENS
    loop = oracle.case.loop(step_tokens=64, max_running=2)
    hits = []
    for seed in range(2):
        other = [*prompt[:place], (prompt[place] + 1 + seed) % VOCAB, *random_prompt(30, seed)]
        hits += [sequence.cached_tokens for sequence in run(loop, [other], 3)]
    (third,) = run(loop, [prompt], N_OUTPUT)
    assert hits == [0, 0]
    assert third.cached_tokens == place
    assert third.output == want


@pytest.mark.parametrize("cache", ["segment", "none"])
@pytest.mark.parametrize(
    ("chunk", "which", "n_pages"),
    [
        # Prompts of 130 and 90 tokens grow by 20: 10 + 7 pages beside the others'.
        (64, [0, 4, 3, 2], 15),
        # The prompt of 64 tokens needs its sixth page while the one of 130 is half computed.
        (7, [3, 0], 14),
    ],
    ids=["decoding", "mid-prompt"],
)
def test_preempted(oracle: Oracle, chunk: int, which: list[int], n_pages: int, cache: str) -> None:
    loop = oracle.case.loop(step_tokens=chunk, max_running=4, n_pages=n_pages, cache=cache)
    got = outputs(loop, [oracle.prompts[i] for i in which], N_OUTPUT)
    assert loop.scheduler.counters.preemptions > 0
    assert got == [oracle.outputs[i] for i in which]


def test_one_prefix_forks_into_many_continuations(oracle: Oracle) -> None:
    if len(oracle.prompts) == len(LENGTHS):
        for length in (3, 9, 21, 40):
            oracle.add(length, tuple(oracle.prompts[0][:70]))
    prompts, wanted = oracle.prompts[len(LENGTHS) :], oracle.outputs[len(LENGTHS) :]
    loop = oracle.case.loop(step_tokens=64, max_running=4)
    marks: list[tuple[int, ...]] = [(70, len(prompt) - 1) for prompt in prompts]
    run(loop, prompts[:1], 2, marks[:1])
    forks = run(loop, prompts, N_OUTPUT, marks)
    assert [fork.output for fork in forks] == wanted
    assert all((fork.cached_tokens or 0) >= 70 for fork in forks)
