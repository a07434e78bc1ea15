"""PagePool and StatePool: who owns which page of KV and which slot of recurrent state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hullspeed.errors import IntegrityError, UsageError


class ByteBudget:
    """Bytes that several pools take their pieces from.

    Attributes:
        free_bytes: Not taken by any of them.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = self.free_bytes = total_bytes


class Pool:
    """Numbered, reference-counted pieces of memory.

    A piece is free when its count is 0. The count equals the number of owners: page tables and
    cache nodes that hold it. The pool hands out numbers; the memory itself is the executor's.

    Args:
        budget: Where the pool's pieces come out of memory shared with other pools.
        piece_bytes: What a piece takes of it.
    """

    def __init__(
        self, size: int, noun: str, budget: ByteBudget | None = None, piece_bytes: int = 1
    ) -> None:
        self.size = size
        self.budget = budget
        self._piece_bytes = piece_bytes
        self._noun = noun
        self._refs = [0] * size
        # Popped from the end: low numbers first, recently freed (cache-warm) ones again.
        self._free = list(range(size - 1, -1, -1))

    @property
    def n_free(self) -> int:
        """Pieces without an owner, as far as there are bytes for them."""
        if self.budget is None:
            return len(self._free)
        return min(len(self._free), self.budget.free_bytes // self._piece_bytes)

    @property
    def n_taken(self) -> int:
        """Pieces with an owner."""
        return self.size - len(self._free)

    def take(self, n: int) -> list[int]:
        """``n`` free pieces, each with one owner: the caller, who made sure that they exist."""
        if n > self.n_free:
            raise IntegrityError(f"took {n} {self._noun}s of {self.n_free} free")
        if self.budget is not None:
            self.budget.free_bytes -= n * self._piece_bytes
        taken = [self._free.pop() for _ in range(n)]
        for piece in taken:
            self._refs[piece] = 1
        return taken

    def share(self, pieces: Iterable[int]) -> None:
        """One more owner for each of ``pieces``."""
        for piece in pieces:
            if self._refs[piece] == 0:
                raise IntegrityError(f"shared free {self._noun} {piece}")
            self._refs[piece] += 1

    def release(self, pieces: Iterable[int]) -> int:
        """One owner less for each of ``pieces``; returns how many became free."""
        freed = 0
        for piece in pieces:
            count = self._refs[piece] - 1
            if count < 0:
                raise IntegrityError(f"released free {self._noun} {piece}")
            self._refs[piece] = count
            if count == 0:
                self._free.append(piece)
                freed += 1
        if self.budget is not None:
            self.budget.free_bytes += freed * self._piece_bytes
        return freed

    def owners(self, piece: int) -> int:
        """Number of owners of ``piece``."""
        return self._refs[piece]

    reach_tokens = 0
    """An end state lets go on from its own place, and from places less than this before it."""

    def place(
        self, ends: Sequence[tuple[int, tuple[int, ...]]], limit: int
    ) -> tuple[int, tuple[int, ...]] | None:
        """The deepest place up to ``limit`` from which a sequence can go on, and the pieces that it
        needs there.

        Args:
            ends: Places of end states and their pieces, on one line of tokens, in order of place.
            limit: Up to where that line is the sequence's own.
        """
        return next((found for found in reversed(ends) if found[0] <= limit), None)

    def check_integrity(self, owners: Mapping[int, int]) -> None:
        """Raise :class:`IntegrityError` unless counts equal ``owners`` and free + owned = all."""
        for piece, count in enumerate(self._refs):
            if count != owners.get(piece, 0):
                raise IntegrityError(
                    f"{self._noun} {piece} counts {count} owners, {owners.get(piece, 0)} found"
                )
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError(f"a {self._noun} is free twice")
        if any(self._refs[piece] for piece in free) or len(free) != self._refs.count(0):
            raise IntegrityError(f"free {self._noun}s and unowned {self._noun}s differ")


class PagePool(Pool):
    """Pages of KV, ``page_tokens`` tokens each."""

    def __init__(
        self,
        n_pages: int,
        page_tokens: int,
        budget: ByteBudget | None = None,
        page_bytes: int = 1,
    ) -> None:
        super().__init__(n_pages, "page", budget, page_bytes)
        self.page_tokens = page_tokens

    def pages_for(self, n_tokens: int) -> int:
        """Pages that ``n_tokens`` tokens start."""
        return -(-n_tokens // self.page_tokens)


class WindowPool(PagePool):
    """Pages of the layers that see ``window_tokens`` tokens back, the present one included. A
    sequence holds those that its next token sees; those behind are returned.
    """

    def __init__(
        self,
        n_pages: int,
        page_tokens: int,
        window_tokens: int,
        budget: ByteBudget | None = None,
        page_bytes: int = 1,
    ) -> None:
        if window_tokens < 1:
            raise UsageError("a window has at least one token", seen=window_tokens)
        super().__init__(n_pages, page_tokens, budget, page_bytes)
        self.window_tokens = window_tokens
        self.reach_tokens = window_tokens + page_tokens

    def first_page(self, position: int) -> int:
        """Index of the first page that a query at ``position`` sees."""
        return max(0, position - self.window_tokens + 1) // self.page_tokens

    def pages_between(self, start: int, end: int) -> int:
        """Pages that a sequence holds while it computes tokens ``start .. end``."""
        return self.pages_for(end) - self.first_page(start)

    def place(
        self, ends: Sequence[tuple[int, tuple[int, ...]]], limit: int
    ) -> tuple[int, tuple[int, ...]] | None:
        """Any place whose last window lies in pages of the end states: of one or of several."""
        known: dict[int, tuple[int, int]] = {}  # by index: the page, and where its content ends
        for end, state in ends:
            reached = min(end, limit)
            for i, page in enumerate(state, self.first_page(end)):
                known[i] = page, min(reached, (i + 1) * self.page_tokens)
        for last in sorted(known, reverse=True):
            n_tokens = known[last][1]
            window = range(self.first_page(n_tokens), last)
            whole = all(i in known and known[i][1] == (i + 1) * self.page_tokens for i in window)
            if whole and n_tokens > last * self.page_tokens:
                return n_tokens, tuple(known[i][0] for i in (*window, last))
        return super().place(ends, limit)  # a window of one token needs no page


class StatePool(Pool):
    """Slots of recurrent state; none for models that keep only KV."""

    def __init__(
        self, n_slots: int, budget: ByteBudget | None = None, state_bytes: int = 1
    ) -> None:
        super().__init__(n_slots, "state slot", budget, state_bytes)
