"""ShadowExecutor: an executor whose memory remembers what was written where.

Each page cell holds a hash of the whole token prefix that its KV would depend on, each state slot a
hash of the prefix that its state would. Before computing a span it reads everything the model would
read and compares: a wrong page, a stale state or a missing copy shows at once. Layers with a window
have cells of their own and read what the window holds; a page that was returned is not in the table
any more, and whoever gets it next writes over it.
"""

from __future__ import annotations

from collections.abc import Callable

from hullspeed.clock import VirtualClock
from hullspeed.core.request import Sequence
from hullspeed.core.step import PageCopy, Sampled, Span, Step, StepResult


class ShadowExecutor:
    def __init__(
        self,
        clock: VirtualClock,
        page_tokens: int,
        next_token: Callable[[Sequence], int],
        *,
        stateful: bool = False,
        window_tokens: int = 0,
        step_seconds: Callable[[Step], float] = lambda _: 1.0,
    ) -> None:
        self.clock = clock
        self.page_tokens = page_tokens
        self.next_token = next_token
        self.stateful = stateful
        self.window_tokens = window_tokens
        self.step_seconds = step_seconds
        self.cells: dict[tuple[int, int], int] = {}
        self.window_cells: dict[tuple[int, int], int] = {}
        self.states: dict[int, int] = {}
        self.computed_tokens = 0
        self.results: list[StepResult] = []
        self.keys: list[tuple[object, ...]] = []

    def execute(self, step: Step) -> StepResult:
        self.keys.append(step.key())
        self._copy(self.cells, step.copies)
        self._copy(self.window_cells, step.window_copies)
        # All spans are computed at once: read everything first, then write everything.
        prefixes = [prefix_hashes(span.sequence) for span in step.spans]
        for span, prefix in zip(step.spans, prefixes, strict=True):
            self._read(span, prefix)
        for span, prefix in zip(step.spans, prefixes, strict=True):
            self._write(span, prefix)
        self.clock.advance(self.step_seconds(step))
        result = StepResult([Sampled(self.next_token(s.sequence)) for s in step.spans if s.sample])
        self.results.append(result)
        return result

    def _copy(self, cells: dict[tuple[int, int], int], copies: list[PageCopy]) -> None:
        for copy in copies:
            for offset in range(self.page_tokens):
                source = cells.get((copy.source, offset))
                if source is None:
                    cells.pop((copy.target, offset), None)
                else:
                    cells[copy.target, offset] = source

    def _window_cell(self, sequence: Sequence, position: int) -> tuple[int, int]:
        index = position // self.page_tokens - sequence.window_first
        assert index >= 0, f"{sequence} has returned what it reads at {position}"
        return sequence.window_pages[index], position % self.page_tokens

    def _read(self, span: Span, prefix: list[int]) -> None:
        for position in range(span.start):
            page = span.sequence.pages[position // self.page_tokens]
            found = self.cells.get((page, position % self.page_tokens))
            assert found == prefix[position + 1], f"{span} reads a wrong cell at {position}"
        if self.window_tokens:
            for position in range(max(0, span.start - self.window_tokens + 1), span.start):
                found = self.window_cells.get(self._window_cell(span.sequence, position))
                assert found == prefix[position + 1], f"{span} reads a wrong cell at {position}"
        if self.stateful:
            state = prefix[0] if span.read_slot < 0 else self.states[span.read_slot]
            assert state == prefix[span.start], f"{span} starts from a wrong state"

    def _write(self, span: Span, prefix: list[int]) -> None:
        assert span.length > 0
        assert span.sample == (span.end == len(span.sequence.tokens))
        for position in range(span.start, span.end):
            page = span.sequence.pages[position // self.page_tokens]
            self.cells[page, position % self.page_tokens] = prefix[position + 1]
            if self.window_tokens:
                cell = self._window_cell(span.sequence, position)
                self.window_cells[cell] = prefix[position + 1]
        if self.stateful:
            assert span.write_slot >= 0
            self.states[span.write_slot] = prefix[span.end]
        self.computed_tokens += span.length


def prefix_hashes(sequence: Sequence) -> list[int]:
    """Hash of salt and each prefix of the tokens: element ``n`` is of the first ``n`` tokens."""
    hashes = [hash(sequence.request.salt)]
    for token in sequence.tokens:
        hashes.append(hash((hashes[-1], token)))
    return hashes
