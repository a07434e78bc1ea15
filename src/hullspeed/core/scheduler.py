"""Scheduler: which tokens the next step computes.

A sequence is its known tokens and how many of them are computed. A step gives each running sequence
a number of tokens to compute; there is no prefill phase and no decode phase, only sequences with
one pending token and sequences with many:

1. sequences with one pending token, oldest first: each gets it (a new page if it starts one);
2. sequences with many, oldest first: chunks, while the token budget lasts;
3. waiting sequences, best priority first: admitted with the pages of all their known tokens, minus
   the prefix that the cache has, and given their first chunk. Pages of layers with a window come
   chunk by chunk instead, and go when the window has passed them.

Memory that runs out is taken from the cache, then from the youngest running sequence of the least
priority: it gives everything back, waits, and finds most of its prefix in the cache again. The
oldest is never asked, so the oldest always advances. A sequence that was asked three times is
admitted again only when its whole remaining length fits.

"Oldest" is by (priority, arrival, id) everywhere; that order is the only policy in this file.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from hullspeed.core.pages import PagePool, StatePool, WindowPool
from hullspeed.core.placement import Junctions, Placement
from hullspeed.core.prefix import CacheNode, EndState, Match, PrefixCache
from hullspeed.core.request import FinishReason, Request, Sequence, Status
from hullspeed.core.step import PageCopy, Sampled, Span, StateCopy, Step, StepResult
from hullspeed.core.windows import Windows
from hullspeed.errors import CapacityError, IntegrityError

PREEMPTIONS_BEFORE_WHOLE_LENGTH = 3


class Output(NamedTuple):
    """What a step meant for one sequence: a token, an end, or both."""

    sequence: Sequence
    sampled: Sampled | None
    finish: FinishReason | None


@dataclass(slots=True)
class Counters:
    """Totals since start; tokens unless the name says otherwise."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Plans steps and takes their results.

    ``schedule`` and ``commit`` alternate; ``add`` and ``cancel`` are called between them.

    Args:
        max_running: Sequences that may hold memory for computing at once.
        step_tokens: Token budget of a step, at least ``max_running``.
        max_context_tokens: Longest sequence, prompt and output.
        placement: Where models with recurrent state or windows save an end state.
        stored: The cache's own slots, where it keeps states in a form of its own; in a step they
            are numbered after those of ``states``. Without it the cache takes slots of ``states``.
        windows: Pages of the layers with a window, where they have their own; no states then.
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
    ) -> None:
        self.pages = pages
        self.states = states
        self.stored = stored
        self.cache = cache
        self.max_running = max_running
        self.step_tokens = max(step_tokens, max_running)
        self.max_context_tokens = max_context_tokens
        longest = min(self.step_tokens, max_context_tokens)
        self.windows = None if windows is None else Windows(windows, longest)
        # Whether prefixes are found only where an end state was saved.
        self.stateful = states.size > 0 or windows is not None
        self.placement = placement or Junctions()
        self.counters = Counters()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}
        self._ended: list[int] = []
        self._state_copies: list[StateCopy] = []
        self._now_s = 0.0

    # -- requests come and go ------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue a request.

        Raises:
            CapacityError: if the page pool could never hold it.
        """
        needed = self.pages.pages_for(len(request.prompt) + request.max_tokens)
        if needed > self.pages.size:
            raise CapacityError(
                "the request can grow beyond the KV cache",
                seen=f"{needed} pages of {self.pages.page_tokens} tokens; there are "
                f"{self.pages.size}",
                fix="shorten the prompt, lower max_tokens or raise the KV budget",
            )
        sequence = Sequence.of(request)
        self._by_id[request.id] = sequence
        insort(self.waiting, sequence, key=age)
        return sequence

    def cancel(self, request_id: int) -> bool:
        """End a request now, its memory free; False if it is not here (any more)."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence, FinishReason.CANCELLED)
        return True

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._by_id)

    # -- planning ------------------------------------------------------------------------------

    def schedule(self, now: float) -> Step:
        """The next step; empty when there is nothing to compute."""
        step = Step(ended=self._ended)
        self._ended = []
        self._now_s = now
        self._yield_to_priority()
        budget = self.step_tokens - self._decode(step)
        budget -= self._continue_prompts(step, budget, now)
        self._start_waiting(step, budget, now)
        if step:  # an empty one is not computed
            step.state_copies, self._state_copies = self._state_copies, []
        return step

    def _decode(self, step: Step) -> int:
        """Plan a token for each sequence with one pending; returns how many."""
        n_tokens = 0
        for sequence in list(self.running):
            if sequence.pending == 1 and sequence.status is Status.RUNNING:
                n_tokens += self._give(step, sequence, 1)
        return n_tokens

    def _continue_prompts(self, step: Step, budget: int, now: float) -> int:
        """Plan chunks of running sequences with many tokens pending; returns how many tokens."""
        left = budget
        for sequence in list(self.running):
            if sequence.pending > 1 and left > 0 and sequence.status is Status.RUNNING:
                self._skip_to_cached(sequence, now)
                left -= self._give(step, sequence, left)
        return budget - left

    def _start_waiting(self, step: Step, budget: int, now: float) -> int:
        """Admit waiting sequences and plan their first chunks; returns how many tokens."""
        left = budget
        while left > 0 and self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            if not self._admit(step, sequence, now):
                break
            given = self._give(step, sequence, left)
            if not given:
                break
            left -= given
        return budget - left

    def _give(self, step: Step, sequence: Sequence, budget: int) -> int:
        """Plan up to ``budget`` pending tokens of ``sequence``; returns how many."""
        n_tokens = min(sequence.pending, budget)
        start = sequence.computed
        if self.states.size and sequence.checkpoints and start < sequence.checkpoints[0]:
            n_tokens = min(n_tokens, sequence.checkpoints[0] - start)
        if not self._grow(step, sequence, start, start + n_tokens):
            return 0
        read, write = self._state_slots(sequence)
        if self.states.size and write < 0:
            self._preempt(sequence)
            return 0
        sample = start + n_tokens == len(sequence.tokens)
        step.spans.append(Span(sequence, start, n_tokens, sample, read, write))
        return n_tokens

    def _grow(self, step: Step, sequence: Sequence, start: int, end: int) -> bool:
        """Make the page tables cover tokens ``start .. end``, at the cost of younger sequences;
        False if the sequence had to give way itself.
        """
        missing = max(0, self.pages.pages_for(end) - len(sequence.pages))
        windows, behind = self.windows, 0
        if windows is not None:
            behind = windows.missing(sequence, end)
            if behind:
                windows.slide(sequence, start)
        if not missing and not behind:
            return True
        while not self._free(missing, behind):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
            # A prompt may need pages of a younger sequence whose token is planned already.
            step.withdraw(victim)
        sequence.pages += self.pages.take(missing)
        if windows is not None:
            sequence.window_pages += windows.pool.take(behind)
        return True

    def _free(self, n_pages: int, n_window_pages: int) -> bool:
        """Whether as many pages of both kinds are free, or could be freed."""
        if not self._free_pages(n_pages):
            return False
        if self.windows is None:
            return True
        pool = self.windows.pool
        if pool.n_free < n_window_pages:
            self.cache.evict_states(n_window_pages - pool.n_free)
        return pool.n_free >= n_window_pages

    def _free_pages(self, n_pages: int) -> bool:
        if self.pages.n_free < n_pages:
            self.cache.evict(n_pages - self.pages.n_free)
        return self.pages.n_free >= n_pages

    def _admit(self, step: Step, sequence: Sequence, now: float) -> bool:
        """Start or resume a waiting sequence, if its known tokens fit beside the running ones."""
        match = self._find(sequence, now)
        if not self._free_for(sequence, match):
            self._lock(sequence, None)
            if self.windows is not None:
                self.windows.let_go(match)
            if self.running:
                return False
            # Alone, only what its own match holds can be in the way of the pages it needs.
            match = Match()
            self._free_for(sequence, match)
        self.waiting.pop(0)
        insort(self.running, sequence, key=age)
        sequence.status = Status.RUNNING
        shared = match.pages[: match.shared_pages]
        self.pages.share(shared)
        own = self.pages.take(self.pages.pages_for(self._admitted_tokens(sequence)) - len(shared))
        sequence.pages = shared + own
        if len(match.pages) > len(shared):
            step.copies.append(PageCopy(match.pages[-1], own[0]))
        sequence.computed = match.n_tokens
        if self.windows is not None:
            copy = self.windows.start(sequence, match)
            step.window_copies += [] if copy is None else [copy]
        else:
            sequence.state_slot, sequence.owns_state = self._cached_slot(match.state), False
        self._count_admission(sequence, match)
        return True

    def _find(self, sequence: Sequence, now: float) -> Match:
        """The sequence's longest cached prefix, locked and held. The last token is left out: it is
        always computed, because its logits are wanted.
        """
        tokens, salt = sequence.tokens, sequence.request.salt
        match = self.cache.match(tokens, salt, limit=len(tokens) - 1, now_s=now)
        sequence.match_version = self.cache.version
        self._lock(sequence, match.node)
        if self.windows is not None:
            self.windows.hold(match)
        return match

    def _admitted_tokens(self, sequence: Sequence) -> int:
        """Tokens whose pages a sequence gets when it is admitted."""
        return len(sequence.tokens)

    def _missing(self, sequence: Sequence, match: Match) -> int:
        """Free pages that admission asks for. Every running sequence may start a page in the next
        steps: without room for that, admitting one now means preempting one soon.
        """
        n_tokens = self._wanted_tokens(sequence)
        return self.pages.pages_for(n_tokens) - match.shared_pages + len(self.running)

    def _wanted_tokens(self, sequence: Sequence) -> int:
        if sequence.preemptions >= PREEMPTIONS_BEFORE_WHOLE_LENGTH:
            return sequence.prompt_tokens + sequence.request.max_tokens
        return len(sequence.tokens)

    def _free_for(self, sequence: Sequence, match: Match) -> bool:
        """Whether the pages that admission asks for are free, or could be freed."""
        asked = 0
        if self.windows is not None:
            asked = self.windows.asked(match, self._wanted_tokens(sequence)) + len(self.running)
        return self._free(self._missing(sequence, match), asked)

    def _count_admission(self, sequence: Sequence, match: Match) -> None:
        if sequence.cached_tokens is not None:
            _prune(sequence)
            return
        sequence.cached_tokens = match.n_tokens
        self.counters.prompt_tokens += sequence.prompt_tokens
        self.counters.cached_tokens += match.n_tokens
        if self.stateful:
            wanted = self.placement.places(sequence, match, self.cache)
            sequence.checkpoints = sorted({p for p in wanted if p > match.n_tokens})

    def _skip_to_cached(self, sequence: Sequence, now: float) -> None:
        """While a prompt is computed in chunks, another may have put the rest into the cache."""
        if sequence.match_version == self.cache.version:
            return
        sequence.match_version = self.cache.version
        tokens = sequence.tokens
        match = self.cache.match(tokens, sequence.request.salt, limit=len(tokens) - 1, now_s=now)
        # Whole pages only; with a state the place must be exact, so it may not cut a page.
        reached = match.shared_pages * self.pages.page_tokens
        if reached <= sequence.computed or (self.stateful and reached != match.n_tokens):
            return
        self._lock(sequence, match.node)
        pages = match.pages[: match.shared_pages]
        self.pages.share(pages)
        self.pages.release(sequence.pages[: len(pages)])
        sequence.pages[: len(pages)] = pages
        if sequence.cached_tokens is not None and not sequence.preemptions:
            gained = reached - sequence.computed
            sequence.cached_tokens += gained
            self.counters.cached_tokens += gained
        sequence.computed = reached
        _prune(sequence)
        if self.windows is not None:
            self.windows.hold(match)
            self.windows.drop(sequence)
            self.windows.start(sequence, match)
        else:
            self._drop_state(sequence)
            sequence.state_slot = self._cached_slot(match.state)

    # -- end states ----------------------------------------------------------------------------

    def _state_slots(self, sequence: Sequence) -> tuple[int, int]:
        """Slots to read and to write. A state owned by the cache is read, never written."""
        if not self.states.size:
            return -1, -1
        read = -1 if sequence.state_slot is None else sequence.state_slot
        if sequence.owns_state:
            return read, read
        if not self.states.n_free and not self.cache.evict_states(1):
            return read, -1
        sequence.next_slot = self.states.take(1)[0]
        return read, sequence.next_slot

    def _cached_slot(self, state: EndState | None) -> int | None:
        """The slot of a state of the cache, as steps number it."""
        if state is None:
            return None
        return state[0] if self.stored is None else self.states.size + state[0]

    def _end_state(self, sequence: Sequence, n_tokens: int) -> EndState | None:
        """What the cache gets: the window's pages, the sequence's own slot, or one of the cache's
        that the next step copies it to; ``None`` if there is nothing to give.
        """
        if self.windows is not None:
            return self.windows.end_state(sequence, n_tokens)
        if not sequence.owns_state or sequence.state_slot is None:
            return None
        if self.stored is None:
            return (sequence.state_slot,)
        if not self.stored.n_free and not self.cache.evict_states(1):
            return None
        (slot,) = self.stored.take(1)
        self._state_copies.append(StateCopy(sequence.state_slot, self.states.size + slot))
        return (slot,)

    def _insert(
        self, sequence: Sequence, n_tokens: int, state: EndState | None, now: float
    ) -> CacheNode:
        """Put a prefix of the sequence into the cache, which may keep nothing."""
        node = self.cache.insert(sequence, n_tokens, now_s=now, state=state)
        if node is None and state is not None:
            if self.windows is not None:
                self.windows.pool.release(state)
            elif self.stored is not None:
                self.stored.release(state)
        return node

    def _drop_state(self, sequence: Sequence) -> None:
        if sequence.owns_state and sequence.state_slot is not None:
            self.states.release([sequence.state_slot])
        if sequence.next_slot is not None:
            self.states.release([sequence.next_slot])
        sequence.state_slot, sequence.owns_state, sequence.next_slot = None, False, None

    # -- results -------------------------------------------------------------------------------

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """Take the result of ``step``: tokens are appended, finished sequences leave."""
        self._count_step(now)
        outputs: list[Output] = []
        sampled = iter(result.sampled)
        for span in step.spans:
            sequence = span.sequence
            sequence.computed = span.end
            if sequence.next_slot is not None:
                sequence.state_slot, sequence.owns_state = sequence.next_slot, True
                sequence.next_slot = None
            if span.length > 1 or sequence.checkpoints:
                self._remember_prompt(sequence, now)
            if span.sample:
                outputs.append(self._take_token(sequence, next(sampled), now))
        return outputs

    def _count_step(self, now: float) -> None:
        """Count a computed step; what it was to copy is copied."""
        self.counters.steps += 1
        self._now_s = now
        if self.windows is not None:
            self.windows.copied()

    def _remember_prompt(self, sequence: Sequence, now: float) -> None:
        """Put what a prompt chunk computed into the cache, for others who wait for it."""
        if not self.stateful:
            self._lock(sequence, self._insert(sequence, sequence.computed, None, now))
            return
        # A chunk ends at a checkpoint of a recurrent state; window pages may hold more behind it.
        while sequence.checkpoints and sequence.checkpoints[0] <= sequence.computed:
            place = sequence.checkpoints.pop(0)
            state = self._end_state(sequence, place)
            node = None if state is None else self._insert(sequence, place, state, now)
            if node is None:
                continue
            self._lock(sequence, node)
            if self.states.size and self.stored is None:
                # The slot was donated; the next span reads the cache's and writes elsewhere.
                sequence.owns_state = False
                sequence.state_slot = self._cached_slot(self.cache.state_at(node))

    def _take_token(self, sequence: Sequence, sampled: Sampled, now: float) -> Output:
        if sampled.error is not None:
            return self._finish(sequence, FinishReason.ERROR, sampled)
        sequence.tokens.append(sampled.token)
        self.counters.generated_tokens += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        reason = self._end_reason(sequence, sampled.token)
        if reason is None:
            return Output(sequence, sampled, None)
        return self._finish(sequence, reason, sampled)

    def _end_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request, n_output = sequence.request, sequence.output_tokens
        if n_output >= request.sampling.min_tokens and (
            token in request.sampling.stop_token_ids
            or (not request.sampling.ignore_eos and token in request.eos_token_ids)
        ):
            return FinishReason.STOP
        if n_output >= request.max_tokens or len(sequence.tokens) >= self.max_context_tokens:
            return FinishReason.LENGTH
        return None

    # -- leaving -------------------------------------------------------------------------------

    def _yield_to_priority(self) -> None:
        """The youngest running sequence makes room for a better priority, in places and pages."""
        while (
            self.waiting
            and self.running
            and self.waiting[0].request.priority < self.running[-1].request.priority
            and (
                len(self.running) >= self.max_running
                or not self._free_for(self.waiting[0], Match())
            )
        ):
            self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's memory; its tokens stay known and its prefix may stay cached."""
        self._release(sequence)
        self.running.remove(sequence)
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self.counters.preemptions += 1
        insort(self.waiting, sequence, key=age)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, sampled: Sampled | None = None
    ) -> Output:
        # What a faulty sequence computed must not be found again.
        self._release(sequence, remember=reason is not FinishReason.ERROR)
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        del self._by_id[sequence.id]
        self._ended.append(sequence.id)
        return Output(sequence, sampled, reason)

    def _release(self, sequence: Sequence, *, remember: bool = True) -> None:
        """Give all memory back. Without recurrent state every computed token can be found again;
        with it, only what was checkpointed.
        """
        n_tokens = sequence.computed
        if remember and n_tokens and not self.states.size:
            state = None if self.windows is None else self.windows.end_state(sequence, n_tokens)
            self._insert(sequence, n_tokens, state, self._now_s)
        if self.windows is not None:
            self.windows.drop(sequence)
        self._lock(sequence, None)
        self._drop_state(sequence)
        self.pages.release(sequence.pages)
        sequence.pages = []
        sequence.computed = 0

    def _lock(self, sequence: Sequence, node: object | None) -> None:
        """Move the sequence's one lock in the cache to ``node``."""
        if node is not None:
            self.cache.lock(node)
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
        sequence.node = node

    # -- invariants ----------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` unless pools, tables, cache and queues agree."""
        self.cache.check_integrity()
        pages, kept = self.cache.page_owners(), self.cache.state_owners()
        states = kept if self.stored is None and self.windows is None else Counter[int]()
        if self.windows is not None:
            self._check_windows(self.windows, kept)
        for sequence in self.running:
            pages.update(sequence.pages)
            if sequence.owns_state and sequence.state_slot is not None:
                states[sequence.state_slot] += 1
            if sequence.next_slot is not None:
                states[sequence.next_slot] += 1
            if self.pages.pages_for(sequence.computed) > len(sequence.pages):
                raise IntegrityError(f"{sequence} has computed more than its pages hold")
        self.pages.check_integrity(pages)
        if self.stored is not None:
            self.stored.check_integrity(kept)
        self.states.check_integrity(states)
        page_tokens = self.pages.page_tokens
        _check_writers([(s, s.pages, s.computed // page_tokens) for s in self.running])
        for sequence in self.waiting:
            held = sequence.pages or sequence.window_pages
            if held or sequence.node is not None or sequence.state_slot is not None:
                raise IntegrityError(f"{sequence} waits but holds memory")
        if len(self.running) > self.max_running:
            raise IntegrityError(f"{len(self.running)} running, {self.max_running} allowed")
        if len(self._by_id) != len(self.running) + len(self.waiting):
            raise IntegrityError("a request is in no queue, or in two")

    def _check_windows(self, windows: Windows, owners: Counter[int]) -> None:
        tables = []
        owners.update(windows.copying)
        for sequence in self.running:
            windows.check(sequence)
            owners.update(sequence.window_pages)
            full = sequence.computed // self.pages.page_tokens - sequence.window_first
            tables.append((sequence, sequence.window_pages, max(0, full)))
        windows.pool.check_integrity(owners)
        _check_writers(tables)


def _check_writers(tables: list[tuple[Sequence, list[int], int]]) -> None:
    """A page that a sequence is about to write is in no other table: each table comes with the
    number of its pages that are full.
    """
    written = Counter(page for _, pages, n_full in tables for page in pages[n_full:])
    for sequence, pages, n_full in tables:
        if any(written[page] for page in pages[:n_full]) or max(written.values(), default=0) > 1:
            raise IntegrityError(f"{sequence} shares a page that somebody writes")


def _prune(sequence: Sequence) -> None:
    """Drop checkpoints that are behind what is computed."""
    while sequence.checkpoints and sequence.checkpoints[0] <= sequence.computed:
        sequence.checkpoints.pop(0)


def age(sequence: Sequence) -> tuple[int, float, int]:
    """The order of sequences: by priority, arrival, id; the least is the oldest."""
    request = sequence.request
    return request.priority, request.arrival_s, request.id
