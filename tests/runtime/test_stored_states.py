"""Cached states in fewer bits: what is read back is close, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.errors import EngineError, UsageError
from hullspeed.kernels.base import DeltaShape
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.ref import RefKernels
from hullspeed.models.decoder import Decoder
from hullspeed.models.stored_states import StoredDtype, StoredStates

from .hybrids import N_PAGES, PAGE_TOKENS, HybridCase, hybrid_case, random_prompt, run

DTYPES: list[StoredDtype] = ["bf16", "int8"]
_CLOSE = 0.25  # logits of these models spread over 5
KINDS = ["linear_attention", "full_attention"]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> HybridCase:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hybrid")
    return hybrid_case(folder, "qwen3_5", num_hidden_layers=2, layer_types=KINDS)


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 2**-8), ("int8", 1 / 250)])
def test_rounding_is_bounded_by_the_row(dtype: StoredDtype, error: float) -> None:
    torch.manual_seed(0)
    live = RefKernels().allocate_states(DeltaShape(2, 4, 16, 32, 4), 3)
    live.recurrent[1].normal_().mul_(torch.rand(4, 16, 1) * 10)
    live.recurrent[1, 0, 0] = 0  # a row of zeros stays one
    live.inputs[1].normal_()
    stored = StoredStates(live, 2, dtype)
    stored.store(1, 0)
    stored.load(0, 2)
    largest = live.recurrent[1].abs().amax(-1, keepdim=True)
    assert ((live.recurrent[2] - live.recurrent[1]).abs() <= error * largest).all()
    torch.testing.assert_close(live.inputs[2], live.inputs[1], atol=0, rtol=2**-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hits_continue_close_to_the_exact_state(hybrid: HybridCase, dtype: StoredDtype) -> None:
    decoder = hybrid.decoder
    decoder.allocate_states(4, 3, dtype)
    tokens, n_live = random_prompt(90, 1), 4
    pages = list(range(6))
    decoder.forward(Batch.of([SpanInput(tokens[:60], 0, pages, False, -1, 0)]))
    decoder.copy_states([0], [n_live + 2])
    exact, rounded = (
        decoder.forward(Batch.of([SpanInput(tokens[60:], 60, pages, True, read, 1)]))
        for read in (0, n_live + 2)
    )
    assert 0 < (exact - rounded).abs().max() < 0.05 * exact.abs().max()
    with pytest.raises(EngineError, match="copy states"):
        decoder.copy_states([0], [n_live + 3])
    with pytest.raises(EngineError, match="copy states"):
        decoder.copy_states([n_live], [0])
    with pytest.raises(EngineError, match="state slot"):
        decoder.forward(Batch.of([SpanInput(tokens[60:], 60, pages, True, 0, n_live)]))


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_the_ledger_holds_and_outputs_stay_likely(hybrid: HybridCase, data: st.DataObject) -> None:
    """Random conversations over few slots: every token is one that transformers finds about as
    likely as its best; with a stale state it would be any.
    """
    dtype = data.draw(st.sampled_from(DTYPES))
    loop = hybrid.loop(
        step_tokens=data.draw(st.sampled_from([7, 40, 1000])),
        max_running=3,
        n_pages=data.draw(st.integers(24, 60)),
        n_slots=3,
        n_stored=data.draw(st.integers(1, 5)),
        stored=dtype,
    )
    roots = [random_prompt(50, seed) for seed in range(2)]
    branch = st.tuples(st.sampled_from(roots), st.integers(1, 50), st.integers(1, 30))
    prompts = [
        root[:keep] + random_prompt(own, 99 + 31 * keep + own)
        for root, keep, own in data.draw(st.lists(branch, min_size=2, max_size=6))
    ]
    marks: list[tuple[int, ...]] = [(len(p) // 2, len(p) - 1) for p in prompts if len(p) > 2]
    prompts = [p for p in prompts if len(p) > 2]
    for _ in range(2):
        sequences = run(loop, prompts, 5, marks)  # checks every invariant after every step
        for sequence in sequences:
            n = len(sequence.output)
            with torch.inference_mode():
                logits = hybrid.module(torch.tensor([sequence.tokens])).logits[0, -n - 1 : -1]
            chosen = logits.gather(1, torch.tensor(sequence.output)[:, None])[:, 0]
            assert n == 5
            assert (logits.amax(1) - chosen).max() < _CLOSE


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_hit_nothing_is_rounded(hybrid: HybridCase, dtype: StoredDtype) -> None:
    """Running states stay float32, beyond their own checkpoints too."""
    loop = hybrid.loop(step_tokens=20, max_running=2, n_slots=2, n_stored=4, stored=dtype)
    prompt = random_prompt(80, 3)
    (sequence,) = run(loop, [prompt], 12, [(20, 50, 79)])
    assert sequence.output == hybrid.uncached(prompt, 12)
    assert loop.scheduler.cache.stats().resident_states == 3
    (again,) = run(loop, [prompt], 3)
    assert again.cached_tokens == 79


def test_stored_states_need_running_ones(hybrid: HybridCase) -> None:
    with pytest.raises(UsageError, match="too few state slots"):
        hybrid.loop(step_tokens=8, max_running=3, n_slots=2, n_stored=2)


@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 1e-6), ("int8", 5e-6)])
def test_drift_of_a_long_decode_is_bounded(
    tmp_path_factory: pytest.TempPathFactory, dtype: StoredDtype, bound: float
) -> None:
    """4,000 tokens after a rounded state: the error decays with the state instead of growing."""
    n_prefix, n_decode, chunk = 96, 4000, 50
    folder = tmp_path_factory.mktemp("long")
    case = hybrid_case(folder, "qwen3_5", max_position_embeddings=8192)
    tokens = random_prompt(n_prefix + n_decode, 7)
    divergences = _divergences(case.decoder, tokens, n_prefix, chunk, dtype)
    assert divergences[:10].mean() < bound
    assert divergences[-10:].mean() <= divergences[:10].mean()


def _divergences(
    decoder: Decoder, tokens: list[int], n_prefix: int, chunk: int, dtype: StoredDtype
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """KL divergence at the end of each chunk between going on exactly and from a rounded state."""
    n_pages = -(-len(tokens) // PAGE_TOKENS)
    decoder.allocate_kv(max(N_PAGES, 2 * n_pages), PAGE_TOKENS)
    decoder.allocate_states(3, 1, dtype)
    tables = [list(range(n_pages)), list(range(n_pages, 2 * n_pages))]
    for slot, pages in enumerate(tables):
        decoder.forward(Batch.of([SpanInput(tokens[:n_prefix], 0, pages, False, -1, slot)]))
    decoder.copy_states([1], [3])
    found, reads = [], [0, 3]
    for start in range(n_prefix, len(tokens), chunk):
        part = tokens[start : start + chunk]
        spans = [SpanInput(part, start, tables[i], True, reads[i], i) for i in (0, 1)]
        exact, rounded = decoder.forward(Batch.of(spans)).double().log_softmax(-1)
        found.append(float((exact.exp() * (exact - rounded)).sum()))
        reads = [0, 1]
    return np.array(found)
