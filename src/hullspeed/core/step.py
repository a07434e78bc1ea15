"""Step: what the executor does next. StepResult: what came of it. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hullspeed.core.request import Sequence


class PageCopy(NamedTuple):
    """Copy the KV of page ``source`` (all layers of its pool) to page ``target`` before the step
    computes.
    """

    source: int
    target: int


class StateCopy(NamedTuple):
    """Copy recurrent state ``source`` to slot ``target`` before the step computes."""

    source: int
    target: int


class Span(NamedTuple):
    """Compute ``tokens[start : start + length]`` of ``sequence``; there are no phases.

    Attributes:
        sample: Choose a token from the logits of the span's last position. Set exactly when the
            span reaches the last known token.
        read_slot: State slot to start from, -1 for none (fresh zero state, or a model without).
        write_slot: State slot that receives the state after the span, -1 for a model without.
    """

    sequence: Sequence
    start: int
    length: int
    sample: bool
    read_slot: int = -1
    write_slot: int = -1

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.start + self.length


@dataclass(slots=True)
class Step:
    """One pass through the model.

    Attributes:
        spans: Decoding sequences first, then prompt chunks, in scheduling order.
        copies: Page copies to make first.
        window_copies: The same among the pages of layers with a window.
        ended: Ids of requests that left since the last step: their sampler state can go.
    """

    spans: list[Span] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    window_copies: list[PageCopy] = field(default_factory=list)
    state_copies: list[StateCopy] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(span.length for span in self.spans)

    def withdraw(self, sequence: Sequence) -> None:
        """Leave out what was planned for ``sequence``, whose memory is gone."""
        self.spans = [span for span in self.spans if span.sequence is not sequence]

    def key(self) -> tuple[object, ...]:
        """Everything the step says, as a comparable value: two runs that plan alike agree."""
        spans = tuple(
            (s.sequence.id, s.start, s.length, s.sample, s.read_slot, s.write_slot,
             tuple(s.sequence.pages), s.sequence.window_first, tuple(s.sequence.window_pages))
            for s in self.spans
        )  # fmt: skip
        copies = (tuple(self.copies), tuple(self.window_copies), tuple(self.state_copies))
        return (spans, *copies, tuple(self.ended))

    def __bool__(self) -> bool:
        return bool(self.spans)


class TokenLogprob(NamedTuple):
    """Log-probability (natural) of a token after all logit changes except temperature cuts."""

    token: int
    logprob: float


class Sampled(NamedTuple):
    """The outcome for one span with ``sample`` set.

    Attributes:
        token: The chosen id.
        logprob: Of the chosen token, if asked for.
        top: Most likely alternatives, likeliest first, if asked for.
        error: Why no token could be chosen for this request (NaN logits, ...): ends it alone.
    """

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(slots=True)
class StepResult:
    """One :class:`Sampled` for each span with ``sample`` set, in the order of the spans."""

    sampled: list[Sampled]
