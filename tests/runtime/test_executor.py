from __future__ import annotations

from collections.abc import Callable

import torch

from hullspeed.core.request import Request, Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.step import PageCopy, Span, StateCopy, Step
from hullspeed.kernels.batch import Batch
from hullspeed.runtime.executor import TorchExecutor
from hullspeed.runtime.sampler import Sampler
from support.patience import calls_of, least_cpu_s

VOCAB = 20


class Recorder:
    """Writes down what it is asked, in order; the logits of row r favour token r."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        self.calls.append((sources, targets))

    def copy_window_pages(self, sources: list[int], targets: list[int]) -> None:
        self.calls.append(("windows", sources, targets))

    def copy_states(self, sources: list[int], targets: list[int]) -> None:
        self.calls.append(("states", sources, targets))

    def forward(self, batch: Batch) -> torch.Tensor:
        self.calls.append(batch)
        rows = len(batch.logits_rows)
        return torch.nn.functional.one_hot(torch.arange(rows) % VOCAB, VOCAB).float()


def sequence(id_: int, tokens: list[int], pages: list[int]) -> Sequence:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.1)
    seq = Sequence.of(Request(id=id_, prompt=tuple(tokens), sampling=params, max_tokens=5))
    seq.pages = pages
    return seq


def test_a_step_becomes_one_flat_batch() -> None:
    model, sampler = Recorder(), Sampler(VOCAB)
    decoding = sequence(1, [3, 4, 5, 6, 7], [9, 2])
    chunk = sequence(2, [10, 11, 12, 13, 14, 15], [5])
    last = sequence(3, [1, 2, 3], [7])
    step = Step(
        spans=[
            Span(decoding, 4, 1, sample=True),
            Span(chunk, 1, 3, sample=False),
            Span(last, 0, 3, sample=True),
        ],
        copies=[PageCopy(4, 5), PageCopy(1, 2)],
    )
    result = TorchExecutor(model, sampler).execute(step)
    copies, batch = model.calls
    assert copies == ([4, 1], [5, 2])
    assert isinstance(batch, Batch)
    assert batch.tokens.tolist() == [7, 11, 12, 13, 1, 2, 3]
    assert batch.positions.tolist() == [4, 1, 2, 3, 0, 1, 2]
    assert batch.span_starts.tolist() == [0, 1, 4, 7]
    assert batch.page_table.tolist() == [[9, 2], [5, 0], [7, 0]]
    assert batch.logits_rows.tolist() == [0, 6]
    # Row 1 favours token 1, which its prompt holds, by more than the penalty takes.
    assert [s.token for s in result.sampled] == [0, 1]


def test_a_step_without_samples_gives_none() -> None:
    model = Recorder()
    step = Step(spans=[Span(sequence(1, [1, 2, 3], [0]), 0, 2, sample=False)])
    assert TorchExecutor(model, Sampler(VOCAB)).execute(step).sampled == []
    assert len(model.calls) == 1


def test_the_state_of_who_left_goes() -> None:
    model, sampler = Recorder(), Sampler(VOCAB)
    executor = TorchExecutor(model, sampler)
    gone, stays = sequence(1, [1], [0]), sequence(2, [1], [1])
    executor.execute(Step(spans=[Span(gone, 0, 1, True), Span(stays, 0, 1, True)]))
    executor.execute(Step(spans=[Span(stays, 0, 1, True)], ended=[1]))
    assert set(sampler._rules) == {2}


def executed(context_tokens: int) -> Callable[[], object]:
    """A step of 64 sequences, without its model and sampler."""
    spans = [
        Span(sequence(i, list(range(context_tokens)), list(range(context_tokens // 64))),
             context_tokens - 1, 1, sample=True)
        for i in range(64)
    ]  # fmt: skip
    model = Recorder()
    model.forward = lambda batch: torch.zeros(64, 2)  # type: ignore[method-assign]
    sampler = Sampler(2)
    sampler.sample = lambda logits, sequences: []  # type: ignore[method-assign]
    executor = TorchExecutor(model, sampler)
    return lambda: executor.execute(Step(spans=spans))


def test_a_batch_of_64_takes_few_calls_and_little_more_for_long_contexts() -> None:
    """0.2 to 0.4 ms on an idle core."""
    short, long = executed(512), executed(4096)
    short(), long()
    assert calls_of(short) == calls_of(long) < 1_000
    least_s = [least_cpu_s(step, times=20) for step in (short, long)]
    assert least_s[1] <= 5 * least_s[0]


def test_states_move_before_the_step_and_spans_name_their_slots() -> None:
    model = Recorder()
    step = Step(
        spans=[Span(sequence(1, [3, 4, 5], [0]), 2, 1, True, read_slot=7, write_slot=2)],
        state_copies=[StateCopy(1, 7), StateCopy(3, 8)],
    )
    TorchExecutor(model, Sampler(VOCAB)).execute(step)
    copies, batch = model.calls
    assert copies == ("states", [1, 3], [7, 8])
    assert isinstance(batch, Batch)
    assert (batch.read_slots.tolist(), batch.write_slots.tolist()) == ([7], [2])
