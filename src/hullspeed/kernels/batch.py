"""Batch: the tokens of one step, packed, and where their keys and values live. Plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hullspeed.errors import EngineError


class SpanInput(NamedTuple):
    """``tokens`` of one sequence at positions ``start .. start + len(tokens)``.

    Attributes:
        pages: The sequence's pages in order; they cover position ``start + len(tokens) - 1``.
        sample: Give the logits of the last token.
        read_slot: State to start from; -1: none yet.
        write_slot: Where the state after the span goes; -1 for models without.
        window_pages: Pages of layers with a window, where they have their own, from page
            ``window_first`` of the sequence on.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: bool
    read_slot: int = -1
    write_slot: int = -1
    window_pages: Sequence[int] = ()
    window_first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """T tokens of S spans, span after span. A span sees its sequence's earlier tokens and itself.

    Attributes:
        tokens: int64 ``[T]``.
        positions: int32 ``[T]``.
        span_starts: int32 ``[S + 1]``: span s is rows ``span_starts[s] : span_starts[s + 1]``.
        page_table: int32 ``[S, P]``: page ``page_table[s, p]`` holds positions
            ``p * page_tokens ..`` of span s; the tail of a row is padding.
        logits_rows: int64 ``[R]``: rows whose logits are wanted, ascending.
        read_slots: int32 ``[S]``: state that each span starts from, -1 for none yet.
        write_slots: int32 ``[S]``: where its last state goes; each its own.
        window_table: int32 ``[S, P]``: ``page_table`` of layers with a window, -1 where a page was
            returned; ``None`` where all layers share one table.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int32]
    span_starts: NDArray[np.int32]
    page_table: NDArray[np.int32]
    logits_rows: NDArray[np.int64]
    read_slots: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    write_slots: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    window_table: NDArray[np.int32] | None = None

    @classmethod
    def of(cls, spans: Sequence[SpanInput]) -> Batch:
        """Pack ``spans``; the logits rows follow the order of the sampled spans."""
        lengths = [len(span.tokens) for span in spans]
        starts = np.zeros(len(spans) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        table = np.zeros((len(spans), max((len(s.pages) for s in spans), default=0)), np.int32)
        tokens = np.empty(starts[-1], np.int64)
        positions = np.empty(starts[-1], np.int32)
        for i, span in enumerate(spans):
            begin, end = starts[i], starts[i + 1]
            tokens[begin:end] = span.tokens
            positions[begin:end] = np.arange(span.start, span.start + lengths[i])
            table[i, : len(span.pages)] = span.pages
        windows = None
        if any(span.window_pages for span in spans):
            windows = np.full_like(table, -1)
            for i, span in enumerate(spans):
                first = span.window_first
                windows[i, first : first + len(span.window_pages)] = span.window_pages
        rows = [int(starts[i + 1]) - 1 for i, span in enumerate(spans) if span.sample]
        return cls(
            tokens=tokens,
            positions=positions,
            span_starts=starts,
            page_table=table,
            logits_rows=np.asarray(rows, np.int64),
            read_slots=np.asarray([span.read_slot for span in spans], np.int32),
            write_slots=np.asarray([span.write_slot for span in spans], np.int32),
            window_table=windows,
        )

    def table_of(self, window_tokens: int) -> NDArray[np.int32]:
        """The page table of layers with this window (0: without)."""
        if window_tokens and self.window_table is not None:
            return self.window_table
        return self.page_table

    def check(
        self,
        *,
        vocab: int,
        n_pages: int,
        page_tokens: int,
        context_tokens: int,
        n_state_slots: int | None = None,
        n_window_pages: int = 0,
        window_tokens: int = 0,
    ) -> None:
        """Kernels index memory with these numbers unchecked, so they are checked here.

        ``n_state_slots`` is ``None`` for a model without recurrent state, ``n_window_pages`` 0
        where layers with a window share the others' pages.

        Raises:
            EngineError: if a token, page, position, span, slot or row is out of bounds.
        """
        n_tokens = len(self.tokens)
        starts = self.span_starts
        lengths = np.diff(starts)
        if not n_tokens or starts[0] != 0 or starts[-1] != n_tokens or (lengths < 1).any():
            raise _bad("spans do not cover the tokens, each at least one", starts.tolist())
        if len(self.positions) != n_tokens or len(self.page_table) != len(lengths):
            raise _bad("positions or page table of another size", self.page_table.shape)
        _within("token id", self.tokens, vocab)
        _within("position", self.positions, context_tokens)
        _within("logits row", self.logits_rows, n_tokens)
        last = self.positions[starts[1:] - 1]
        if not (last - self.positions[starts[:-1]] == lengths - 1).all():
            raise _bad("positions of a span do not follow each other", self.positions.tolist())
        if int(last.max()) >= self.page_table.shape[1] * page_tokens:
            raise _bad("a position lies beyond the page table", int(last.max()))
        columns = np.arange(self.page_table.shape[1])
        used = columns <= (last // page_tokens)[:, None]
        _within("page", self.page_table[used], n_pages)
        if (self.window_table is not None) != (n_window_pages > 0):
            raise _bad("pages of windows, or none, against what was allocated", n_window_pages)
        if self.window_table is not None:
            if self.window_table.shape != self.page_table.shape:
                raise _bad("a window table of another size", self.window_table.shape)
            seen = np.maximum(self.positions[starts[:-1]] - window_tokens + 1, 0) // page_tokens
            used &= columns >= seen[:, None]
            _within("window page", self.window_table[used], n_window_pages)
        if n_state_slots is not None:
            self._check_slots(len(lengths), n_state_slots)

    def _check_slots(self, n_spans: int, n_slots: int) -> None:
        """A slot is written by one span; one that is written is read by no other."""
        read, write = self.read_slots, self.write_slots
        if len(read) != n_spans or len(write) != n_spans:
            raise _bad("spans without state slots", (len(read), len(write)))
        _within("state slot to write", write, n_slots)
        _within("state slot to read", read[read != -1], n_slots)
        if len(np.unique(write)) < n_spans:
            raise _bad("two spans write one state slot", write.tolist())
        if np.isin(read[read != write], write).any():
            raise _bad("a span reads a state that another writes", (read.tolist(), write.tolist()))
        if (self.positions[self.span_starts[:-1]][read == -1] != 0).any():
            raise _bad("a span continues a sequence without its state", read.tolist())


def _within(what: str, values: NDArray[np.integer], bound: int) -> None:
    if len(values) and (int(values.min()) < 0 or int(values.max()) >= bound):
        seen = (int(values.min()), int(values.max()))
        raise _bad(f"a {what} is outside 0 .. {bound - 1}", seen)


def _bad(what: str, seen: object) -> EngineError:
    return EngineError(f"batch: {what}", seen=seen, fix="this is a fault of the engine; report it")
