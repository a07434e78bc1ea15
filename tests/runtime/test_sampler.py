from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hullspeed.core.request import Request, Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.step import Sampled
from hullspeed.runtime.draw import row_max
from hullspeed.runtime.sampler import Sampler
from support.patience import least_cpu_s

from .sampling_reference import changed, distribution, log_softmax

EOS = (3, 9)
VOCAB = 50


def sequence(params: SamplingParams, *, id_: int = 0, n_output: int = 0) -> Sequence:
    request = Request(
        id=id_, prompt=(1, 2, 2, 7), sampling=params, max_tokens=10_000, eos_token_ids=EOS
    )
    seq = Sequence.of(request)
    seq.tokens += [(5 * i) % 11 for i in range(n_output)]
    return seq


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def one(logits: torch.Tensor, params: SamplingParams, **options: int) -> Sampled:
    return Sampler(logits.shape[1]).sample(logits.clone(), [sequence(params, **options)])[0]


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 49, 50]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20), max_size=3),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (4,)]),
    ignore_eos=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
)
case_strategy = st.tuples(params_strategy, st.integers(0, 8))


@given(cases=st.lists(case_strategy, min_size=1, max_size=6), seed=st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_every_row_follows_the_reference(
    cases: list[tuple[SamplingParams, int]], seed: int
) -> None:
    logits = logits_of(seed, len(cases))
    sequences = [sequence(p, id_=i, n_output=n) for i, (p, n) in enumerate(cases)]
    got = Sampler(VOCAB).sample(logits.clone(), sequences)
    for row, seq, sampled in zip(logits.double().numpy(), sequences, got, strict=True):
        params = seq.request.sampling
        want = changed(row, params, list(seq.request.prompt), seq.output, EOS)
        allowed = distribution(want, params)
        assert sampled.error is None
        # At the very edge of a cut, float32 may decide otherwise than float64.
        near = np.isclose(want, want[allowed > 0].min(), atol=1e-4)
        assert allowed[sampled.token] > 0 or near[sampled.token]
        check_logprobs(sampled, log_softmax(want), params.logprobs)


def check_logprobs(sampled: Sampled, want: np.ndarray, asked: int | None) -> None:
    if asked is None:
        assert (sampled.logprob, sampled.top) == (None, ())
        return
    assert sampled.logprob is not None
    assert math.isclose(sampled.logprob, want[sampled.token], abs_tol=1e-4)
    assert len(sampled.top) == asked
    assert np.allclose([t.logprob for t in sampled.top], np.sort(want)[::-1][:asked], atol=1e-4)


CHI_SQUARE = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.8),
    SamplingParams(temperature=1.5, top_p=0.3),
    SamplingParams(temperature=1.2, top_k=6),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.7),
    SamplingParams(temperature=2.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=0.95, min_p=0.02, presence_penalty=0.5),
]


@pytest.mark.parametrize("params", CHI_SQUARE, ids=str)
@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_are_distributed_as_they_should(params: SamplingParams, by: str) -> None:
    if by == "position" and params.presence_penalty:
        params = replace(params, presence_penalty=0.0)
    n, row = (4000 if by == "seed" else 1500), logits_of(11, scale=1.2)
    batch = [
        sequence(replace(params, seed=i if by == "seed" else 77), id_=i,
                 n_output=3 if by == "seed" else i)
        for i in range(n)
    ]  # fmt: skip
    drawn = [s.token for s in Sampler(VOCAB).sample(row.repeat(n, 1), batch)]
    counts = np.bincount(drawn, minlength=VOCAB)
    want = changed(row[0].double().numpy(), params, [1, 2, 2, 7], batch[3].output, EOS)
    p = distribution(want, params)
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * n
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = max(1, int((p > 0).sum()) - 1)
    # 99.99 % point, Wilson and Hilferty's approximation.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


@given(cases=st.lists(case_strategy, min_size=2, max_size=6), seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_neighbours_do_not_matter(cases: list[tuple[SamplingParams, int]], seed: int) -> None:
    logits = logits_of(seed, len(cases))
    sequences = [sequence(p, id_=i, n_output=n) for i, (p, n) in enumerate(cases)]
    together = Sampler(VOCAB).sample(logits.clone(), sequences)
    for i, seq in enumerate(sequences):
        alone = Sampler(VOCAB).sample(logits[i : i + 1].clone(), [seq])[0]
        assert alone.token == together[i].token


def test_a_seed_repeats_and_its_absence_does_not() -> None:
    logits = logits_of(3, scale=0.1)
    seeded = SamplingParams(seed=5)
    run = [[one(logits, seeded, n_output=k).token for k in range(30)] for _ in range(2)]
    assert run[0] == run[1]
    assert len(set(run[0])) > 5
    free = [[one(logits, SamplingParams(), n_output=k).token for k in range(30)] for _ in range(2)]
    assert free[0] != free[1]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_faulty_row_fails_alone(params: SamplingParams, poison: float) -> None:
    logits = logits_of(1, 3)
    logits[1] = poison if poison < 0 else logits[1]
    logits[1, 20] = poison
    first, faulty, last = Sampler(VOCAB).sample(
        logits.clone(), [sequence(params, id_=i) for i in range(3)]
    )
    assert faulty.error is not None
    assert first.error is None
    assert last.error is None


def test_nothing_left_to_choose_is_an_error_of_the_row() -> None:
    params = SamplingParams(temperature=0, min_tokens=5, stop_token_ids=tuple(range(VOCAB)))
    sampled = one(logits_of(1), params)
    assert sampled.error is not None
    assert "no token is allowed" in sampled.error


@pytest.mark.parametrize("top_k", [0, 5])
def test_the_smallest_top_p_leaves_the_likeliest(top_k: int) -> None:
    logits = logits_of(6)
    for seed in range(20):
        params = SamplingParams(temperature=3.0, top_p=1e-60, top_k=top_k, seed=seed)
        assert one(logits, params).token == int(logits.argmax())


def test_equal_logits_are_drawn_alike() -> None:
    counts = np.zeros(VOCAB)
    for seed in range(300):
        params = SamplingParams(temperature=1e-4, top_p=0.4, seed=seed)
        logits = torch.zeros(1, VOCAB)
        logits[0, [4, 8, 30]] = 1.0
        counts[one(logits, params).token] += 1
    assert counts[[4, 8, 30]].min() > 60
    assert counts.sum() == counts[[4, 8, 30]].sum()


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [4, 8]] = 0.0
    drawn = {one(logits, SamplingParams(seed=i)).token for i in range(60)}
    assert drawn == {4, 8}


def test_state_goes_when_a_request_ends() -> None:
    sampler = Sampler(VOCAB)
    sampler.sample(logits_of(1), [sequence(SamplingParams(repetition_penalty=1.1), id_=4)])
    sampler.forget([4, 5])
    assert not sampler._rules


def test_penalties_follow_a_growing_output() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.2)
    seq, sampler = sequence(params), Sampler(VOCAB)
    row = logits_of(9)
    for _ in range(40):
        token = sampler.sample(row.clone(), [seq])[0].token
        want = changed(row[0].double().numpy(), params, list(seq.request.prompt), seq.output, EOS)
        assert want[token] >= want.max() - 1e-4
        seq.tokens.append(token)
    assert len(set(seq.output)) > 10


@given(st.integers(1, 5), st.sampled_from([1, 7, 1023, 1024, 1025, 3000]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_row_max_is_max(rows: int, vocab: int, seed: int) -> None:
    logits = logits_of(seed, rows, vocab)
    best, where = row_max(logits)
    assert torch.equal(best, logits.amax(dim=1))
    assert torch.equal(logits.gather(1, where[:, None])[:, 0], best)
    assert bool((where < vocab).all())


@pytest.mark.parametrize(
    ("params", "share"),
    [
        (SamplingParams(temperature=0), 0.04),
        (SamplingParams(temperature=1.0, seed=1), 0.2),
        (SamplingParams(temperature=0.7, top_p=0.9, seed=1), 0.3),
        (SamplingParams(temperature=0.7, top_k=50, seed=1), 0.3),
        (SamplingParams(temperature=0, repetition_penalty=1.1), 0.08),
    ],
    ids=str,
)
def test_a_batch_of_64_is_a_small_part_of_sorting_it(params: SamplingParams, share: float) -> None:
    """1 to 20 ms where sorting the logits takes 235 ms."""
    logits = logits_of(1, 64, 49_152)
    sequences = [sequence(params, id_=i, n_output=32) for i in range(64)]
    sampler, times = Sampler(49_152), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(4):
            work = logits.clone()
            begin_s = time.thread_time()
            sampler.sample(work, sequences)
            times.append(time.thread_time() - begin_s)
        sorting_s = least_cpu_s(lambda: logits.sort(dim=1), times=2)
    finally:
        torch.set_num_threads(threads)
    assert min(times) < share * sorting_s
