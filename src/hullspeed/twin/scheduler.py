"""TwinScheduler: the production scheduler, with decoding sequences advanced together.

What costs time in a simulation is not deciding but bookkeeping: a thousand sequences that decode
for a thousand steps are a million spans, all alike. Here a sequence that decodes is written down
once: since which round it decodes and when it next needs a page or ends. A round then costs the
same for one such sequence as for a thousand; whatever else happens to a sequence (a page, a
preemption, its end) is first brought up to date and then handled by the production code.

The decisions are those of :class:`~hullspeed.core.scheduler.Scheduler`: a test compares every step
of both on random traffic, page numbers and state slots included.

Other engines differ in two choices, given as :class:`Policy`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal

import msgspec

from hullspeed.core.pages import PagePool, StatePool, WindowPool
from hullspeed.core.placement import Placement
from hullspeed.core.prefix import Match, PrefixCache
from hullspeed.core.request import Sequence, Status
from hullspeed.core.scheduler import Output, Scheduler, age
from hullspeed.core.step import Sampled, Span, Step, StepResult


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine's scheduler differs from ours.

    Attributes:
        order: ``mixed``: decoding sequences and prompt chunks share a step; ``prefill_first``:
            while a prompt can be computed nothing decodes.
        reserve: Pages that admission asks to be free beside those of the prompt. ``page``: one for
            each running sequence; ``none``; ``ratio``: a share of what all running sequences may
            still generate; ``whole``: the whole length is taken at once and nothing is preempted.
        ratio: The share, for ``ratio``.
    """

    order: Literal["mixed", "prefill_first"] = "mixed"
    reserve: Literal["page", "none", "ratio", "whole"] = "page"
    ratio: float = 0.0


@dataclass(slots=True)
class LazyStep(Step):
    """A step whose decoding sequences are mostly a number.

    Attributes:
        n_lazy: Sequences that decode one token each and have no span.
        lazy_context_tokens: Sum of the tokens before each of them.
        n_decode_spans: How many of the first spans are decodes.
        decodes: Whether this step advances decoding sequences at all.
    """

    n_lazy: int = 0
    lazy_context_tokens: int = 0
    n_decode_spans: int = 0
    decodes: bool = True

    def withdraw(self, sequence: Sequence) -> None:
        """Also counts a decode less, if one was planned."""
        decodes = self.spans[: self.n_decode_spans]
        self.n_decode_spans -= sum(span.sequence is sequence for span in decodes)
        Step.withdraw(self, sequence)

    def __bool__(self) -> bool:
        return bool(self.spans) or self.n_lazy > 0


@dataclass(slots=True, eq=False)
class _Decoding:
    """A sequence that decodes a token every round.

    Attributes:
        since: The first round in which it decodes this way.
        computed: Its tokens in memory before that round.
    """

    sequence: Sequence
    since: int
    computed: int


class TwinScheduler(Scheduler):
    """See the module.

    Output tokens are ``filler[id]``, one number for all or a list, and end nothing: a request ends
    by its length.
    """

    def __init__(
        self,
        pages: PagePool,
        states: StatePool,
        cache: PrefixCache,
        *,
        max_running: int,
        step_tokens: int,
        max_context_tokens: int,
        placement: Placement | None = None,
        stored: StatePool | None = None,
        windows: WindowPool | None = None,
        policy: Policy | None = None,
    ) -> None:
        super().__init__(
            pages,
            states,
            cache,
            max_running=max_running,
            step_tokens=step_tokens,
            max_context_tokens=max_context_tokens,
            placement=placement,
            stored=stored,
            windows=windows,
        )
        self.policy = policy or Policy()
        self.filler: dict[int, int | list[int]] = {}
        self.times: dict[int, list[float | tuple[int, int]]] = {}
        self.round_s = array("d")
        self._lazy: dict[int, _Decoding] = {}
        self._lazy_computed = 0  # tokens in memory of all lazy sequences together
        self._page_due: dict[int, list[_Decoding]] = {}
        self._end_due: dict[int, list[_Decoding]] = {}
        self._eager: dict[int, Sequence] = {}  # running, not lazy

    # -- planning ------------------------------------------------------------------------------

    def schedule(self, now: float) -> LazyStep:
        """The next step."""
        step = LazyStep(ended=self._ended)
        self._ended = []
        self._now_s = now
        self._yield_to_priority()
        if self.policy.order == "mixed":
            budget = self.step_tokens - self._decode(step)
            budget -= self._continue_prompts(step, budget, now)
            self._start_waiting(step, budget, now)
        else:
            budget = self.step_tokens - self._continue_prompts(step, self.step_tokens, now)
            self._start_waiting(step, budget, now)
            step.decodes = not step.spans
            if step.decodes:
                self._decode(step)
        if step.decodes:
            step.n_lazy, step.lazy_context_tokens = len(self._lazy), self._lazy_computed
        if step:
            step.state_copies, self._state_copies = self._state_copies, []
        return step

    def _decode(self, step: LazyStep) -> int:  # type: ignore[override]
        """Plan a token for each sequence with one pending; only those that may need memory are
        looked at one by one.
        """
        due = [d.sequence for d in self._page_due.pop(len(self.round_s), ()) if self._holds(d)]
        due += [s for s in self._eager.values() if s.pending == 1]
        if len(due) > 1:
            due.sort(key=age)
        given = 0
        for sequence in due:
            if sequence.status is not Status.RUNNING:
                continue
            decoding = self._lazy.get(sequence.id)
            if decoding is None:
                given += self._give(step, sequence, 1)
                continue
            start = self._computed(decoding)
            if self._grow(step, sequence, start, start + 1):
                self._await_page(decoding)
        step.n_decode_spans = given
        return given + len(self._lazy)

    def _continue_prompts(self, step: Step, budget: int, now: float) -> int:
        left = budget
        prompts = [s for s in self._eager.values() if s.pending > 1]
        if len(prompts) > 1:
            prompts.sort(key=age)
        for sequence in prompts:
            if left > 0 and sequence.status is Status.RUNNING:
                self._skip_to_cached(sequence, now)
                left -= self._give(step, sequence, left)
        return budget - left

    def _admit(self, step: Step, sequence: Sequence, now: float) -> bool:
        if not super()._admit(step, sequence, now):
            return False
        self._eager[sequence.id] = sequence
        return True

    def _admitted_tokens(self, sequence: Sequence) -> int:
        if self.policy.reserve == "whole":
            return sequence.prompt_tokens + sequence.request.max_tokens
        return super()._admitted_tokens(sequence)

    def _missing(self, sequence: Sequence, match: Match) -> int:
        reserve = self.policy.reserve
        if reserve == "page":
            return super()._missing(sequence, match)
        needed = self.pages.pages_for(self._admitted_tokens(sequence)) - match.shared_pages
        if reserve == "ratio":
            asked = sum(s.prompt_tokens + s.request.max_tokens for s in self.running)
            known = self._lazy_computed + sum(len(s.tokens) for s in self._eager.values())
            left = asked - known + sequence.request.max_tokens
            needed += self.pages.pages_for(round(self.policy.ratio * left))
        return needed

    # -- results -------------------------------------------------------------------------------

    def commit(self, step: LazyStep, result: StepResult, now: float) -> list[Output]:  # type: ignore[override]
        """Take the end of ``step`` (``result`` is not looked at); the outputs are those of spans
        and of sequences that ended.
        """
        self._count_step(now)
        outputs: list[Output] = []
        ending: list[Sequence] = []
        if step.decodes:
            due = self._end_due.pop(len(self.round_s), ())
            ending = [d.sequence for d in due if self._holds(d)]
            self.round_s.append(now)
            self._lazy_computed += len(self._lazy)
            self.counters.generated_tokens += len(self._lazy) - len(ending)
        decodes: list[Span | Sequence] = [*step.spans[: step.n_decode_spans], *ending]
        if ending and len(decodes) > 1:
            # In the order of the production scheduler, because memory is freed in that order.
            decodes.sort(key=lambda d: age(d.sequence if isinstance(d, Span) else d))
        for item in decodes:
            if isinstance(item, Span):
                self._take_span(item, now, outputs)
            else:
                self._take_last(item, now, outputs)
        for span in step.spans[step.n_decode_spans :]:
            self._take_span(span, now, outputs)
        return outputs

    def _take_span(self, span: Span, now: float, outputs: list[Output]) -> None:
        sequence = span.sequence
        sequence.computed = span.end
        if sequence.next_slot is not None:
            sequence.state_slot, sequence.owns_state = sequence.next_slot, True
            sequence.next_slot = None
        if span.length > 1 or sequence.checkpoints:
            self._remember_prompt(sequence, now)
        if span.sample:
            self.times.setdefault(sequence.id, []).append(now)
            outputs.append(self._take_token(sequence, self._sampled(sequence), now))
        settled = sequence.owns_state or not self.states.size
        if sequence.pending == 1 and settled and sequence.status is Status.RUNNING:
            self._join(sequence)

    def _take_last(self, sequence: Sequence, now: float, outputs: list[Output]) -> None:
        self._catch_up(self._lazy[sequence.id], n_unknown=1)
        outputs.append(self._take_token(sequence, self._sampled(sequence), now))

    def _sampled(self, sequence: Sequence) -> Sampled:
        return Sampled(self._next_tokens(sequence, 1)[0])

    def _next_tokens(self, sequence: Sequence, n_tokens: int) -> list[int]:
        """What ``sequence`` says next."""
        filler = self.filler.get(sequence.id, 0)
        if isinstance(filler, int):
            return [filler] * n_tokens
        done = sequence.output_tokens
        return filler[done : done + n_tokens]

    # -- decoding together ---------------------------------------------------------------------

    def _join(self, sequence: Sequence) -> None:
        """From the next round on, ``sequence`` is one of the lazy ones."""
        if sequence.checkpoints:
            return
        decoding = _Decoding(sequence, len(self.round_s), sequence.computed)
        self._eager.pop(sequence.id, None)
        self._lazy[sequence.id] = decoding
        self._lazy_computed += sequence.computed
        left = min(
            sequence.request.max_tokens - sequence.output_tokens,
            self.max_context_tokens - len(sequence.tokens),
        )
        self._end_due.setdefault(decoding.since + left - 1, []).append(decoding)
        self._await_page(decoding)

    def _await_page(self, decoding: _Decoding) -> None:
        sequence = decoding.sequence
        n_pages = len(sequence.pages)
        if self.windows is not None:
            n_pages = min(n_pages, sequence.window_first + len(sequence.window_pages))
        room = n_pages * self.pages.page_tokens - decoding.computed
        self._page_due.setdefault(decoding.since + room, []).append(decoding)

    def _holds(self, decoding: _Decoding) -> bool:
        return self._lazy.get(decoding.sequence.id) is decoding

    def _computed(self, decoding: _Decoding) -> int:
        return decoding.computed + len(self.round_s) - decoding.since

    def _catch_up(self, decoding: _Decoding, n_unknown: int = 0) -> None:
        """Write down what a lazy sequence has decoded; it is lazy no more. The tokens of the last
        ``n_unknown`` rounds are left to the caller.
        """
        sequence = decoding.sequence
        rounds = len(self.round_s) - decoding.since
        del self._lazy[sequence.id]
        self._eager[sequence.id] = sequence
        sequence.computed = decoding.computed + rounds
        self._lazy_computed -= sequence.computed
        sequence.tokens += self._next_tokens(sequence, rounds - n_unknown)
        if rounds:
            self.times.setdefault(sequence.id, []).append((decoding.since, len(self.round_s)))

    def _release(self, sequence: Sequence, *, remember: bool = True) -> None:
        decoding = self._lazy.get(sequence.id)
        if decoding is not None:
            self._catch_up(decoding)
        self._eager.pop(sequence.id, None)
        super()._release(sequence, remember=remember)

    def settle(self) -> None:
        """Write down what every lazy sequence has decoded so far; nothing else changes."""
        for decoding in list(self._lazy.values()):
            self._catch_up(decoding)
            self._join(decoding.sequence)

    def check_integrity(self) -> None:
        """As the production scheduler's, with every sequence up to date."""
        self.settle()
        super().check_integrity()

    def key(self, step: LazyStep) -> tuple[object, ...]:
        """What ``Step.key`` would say if the production scheduler had planned this step."""
        spans = list(step.spans[: step.n_decode_spans])
        for decoding in self._lazy.values() if step.decodes else ():
            slot = decoding.sequence.state_slot
            read = -1 if slot is None else slot
            spans.append(Span(decoding.sequence, self._computed(decoding), 1, True, read, read))
        spans.sort(key=lambda span: age(span.sequence))
        spans += step.spans[step.n_decode_spans :]
        copies = (step.copies, step.window_copies, step.state_copies)
        return Step(spans, *copies, step.ended).key()

    def token_times(self, request_id: int) -> list[float]:
        """When each output token of a request came; forgets them."""
        times: list[float] = []
        for piece in self.times.pop(request_id):
            if isinstance(piece, tuple):
                times.extend(self.round_s[piece[0] : piece[1]])
            else:
                times.append(piece)
        return times
