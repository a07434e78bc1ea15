"""Windows: the second page table of sequences, of layers that see only a window of the context.

It grows with the tokens computed, not with those known, and what lies behind the window of the next
token is given back. The last window before a place is therefore all that such layers need to go on
from there: an end state made of pages, which cache and sequence share, because the sequence only
writes behind that place.
"""

from __future__ import annotations

from hullspeed.core.pages import WindowPool
from hullspeed.core.prefix import EndState, Match
from hullspeed.core.request import Sequence
from hullspeed.core.step import PageCopy
from hullspeed.errors import IntegrityError, UsageError
from hullspeed.memory.windows import held_pages, least_pages


class Windows:
    """Window pages of sequences.

    Args:
        step_tokens: Most tokens of a sequence that a step computes.

    Attributes:
        copying: Pages that the next step copies.

    Raises:
        UsageError: the pool is too small for one sequence to get on.
    """

    def __init__(self, pool: WindowPool, step_tokens: int) -> None:
        least = least_pages(pool.window_tokens, pool.page_tokens, step_tokens)
        if pool.size < least:
            raise UsageError(
                "too few pages for the layers with a window",
                seen=pool.size,
                fix=f"give at least {least} for windows of {pool.window_tokens} tokens and steps "
                f"of {step_tokens}",
            )
        self.pool = pool
        self.copying: list[int] = []
        self._most = held_pages(pool.window_tokens, pool.page_tokens, step_tokens)

    def asked(self, match: Match, n_tokens: int) -> int:
        """Free pages that a sequence needs to compute ``n_tokens`` tokens after ``match``, step by
        step.
        """
        pool = self.pool
        held = min(pool.pages_between(match.n_tokens, n_tokens), self._most)
        cut = match.n_tokens % pool.page_tokens > 0  # held beside its copy for a step
        return held - (match.shared_pages - pool.first_page(match.n_tokens)) + cut

    def hold(self, match: Match) -> None:
        """One owner more for the pages that ``match`` found, until ``start`` or ``let_go``: what
        is evicted to make room may be the states that they belong to.
        """
        self.pool.share(match.state or ())

    def let_go(self, match: Match) -> None:
        """Undo ``hold``."""
        self.pool.release(match.state or ())

    def start(self, sequence: Sequence, match: Match) -> PageCopy | None:
        """Let ``sequence`` go on after ``match``, which it was held for, and own its pages; if that
        cuts a page, it gets a copy of it instead. The step that copies it may find its other owners
        gone, so it stays owned until then.
        """
        sequence.window_first = self.pool.first_page(match.n_tokens)
        sequence.window_pages = list(match.state or ())
        if not match.n_tokens % self.pool.page_tokens:
            return None
        (own,) = self.pool.take(1)
        cut = sequence.window_pages[-1]
        sequence.window_pages[-1] = own
        self.copying.append(cut)
        return PageCopy(cut, own)

    def copied(self) -> None:
        """The step that was scheduled is computed."""
        self.pool.release(self.copying)
        self.copying = []

    def missing(self, sequence: Sequence, n_tokens: int) -> int:
        """Pages that the table lacks to cover ``n_tokens`` tokens."""
        covered = sequence.window_first + len(sequence.window_pages)
        return max(0, self.pool.pages_for(n_tokens) - covered)

    def slide(self, sequence: Sequence, start: int) -> None:
        """Give back the pages that no query from ``start`` on sees."""
        n_behind = self.pool.first_page(start) - sequence.window_first
        if n_behind > 0:
            self.pool.release(sequence.window_pages[:n_behind])
            del sequence.window_pages[:n_behind]
            sequence.window_first += n_behind

    def end_state(self, sequence: Sequence, n_tokens: int) -> EndState:
        """The pages from which others can go on after ``n_tokens`` tokens, with an owner more."""
        first = sequence.window_first
        begin, end = self.pool.first_page(n_tokens) - first, self.pool.pages_for(n_tokens) - first
        if begin < 0 or end > len(sequence.window_pages):
            raise IntegrityError(f"{sequence} does not hold the window before {n_tokens}")
        state = tuple(sequence.window_pages[begin:end])
        self.pool.share(state)
        return state

    def drop(self, sequence: Sequence) -> None:
        """Give everything back."""
        self.pool.release(sequence.window_pages)
        sequence.window_pages, sequence.window_first = [], 0

    def check(self, sequence: Sequence) -> None:
        """Raise ``IntegrityError`` unless the table is the window of what comes next."""
        pool = self.pool
        covered = sequence.window_first + len(sequence.window_pages)
        if sequence.window_first > pool.first_page(sequence.computed):
            raise IntegrityError(f"{sequence} has returned a page that it still sees")
        if sequence.pages and covered < pool.pages_for(sequence.computed):
            raise IntegrityError(f"{sequence} has computed more than its window pages hold")
        if len(sequence.window_pages) > self._most:
            raise IntegrityError(f"{sequence} holds more than a window and a step")
