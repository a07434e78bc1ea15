"""TorchExecutor: runs a Step on the decoder."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hullspeed.core.step import Step, StepResult
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.runtime.sampler import Sampler


class Model(Protocol):
    """What the executor asks of a decoder (``models.decoder.Decoder``)."""

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole pages in every layer that has them, in order."""
        ...

    def copy_window_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole pages in the layers with a window, in order."""
        ...

    def copy_states(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole recurrent states, in order."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Logits of the batch's sampled rows: float32 ``[R, vocab]``."""
        ...


class TorchExecutor:
    """Copies pages and states, computes the spans and samples."""

    def __init__(self, model: Model, sampler: Sampler) -> None:
        self._model = model
        self._sampler = sampler

    def execute(self, step: Step) -> StepResult:
        """See :class:`hullspeed.core.executor.Executor`."""
        self._sampler.forget(step.ended)
        if step.copies:
            self._model.copy_pages([c.source for c in step.copies], [c.target for c in step.copies])
        if step.window_copies:
            self._model.copy_window_pages(
                [c.source for c in step.window_copies], [c.target for c in step.window_copies]
            )
        if step.state_copies:
            self._model.copy_states(
                [c.source for c in step.state_copies], [c.target for c in step.state_copies]
            )
        batch = Batch.of(
            [
                SpanInput(
                    span.sequence.tokens[span.start : span.end],
                    span.start,
                    span.sequence.pages,
                    span.sample,
                    span.read_slot,
                    span.write_slot,
                    span.sequence.window_pages,
                    span.sequence.window_first,
                )
                for span in step.spans
            ]
        )
        sampling = [span.sequence for span in step.spans if span.sample]
        with torch.inference_mode():
            logits = self._model.forward(batch)
            return StepResult(self._sampler.sample(logits, sampling) if sampling else [])
