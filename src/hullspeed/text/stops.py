"""StopStrings: end a text at the first stop string, whatever the chunks it comes in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class StopMatch(NamedTuple):
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Watches one stream of text.

    Only what may yet turn out to begin a stop string is held back. Of several stop strings the
    one that is complete first wins, the longer one in a tie; so the outcome does not depend on
    how the text is cut into chunks.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._ignored = 0  # a stop string counts only if it ends after this index of _held

    def push(self, text: str, *, armed: bool = True) -> StopMatch:
        """Add ``text``; unarmed, stop strings that end in it are ignored (``min_tokens``)."""
        if not self._stops:
            return StopMatch(text)
        self._held += text
        if not armed:
            self._ignored = len(self._held)
        elif hit := self._first_hit():
            start, stop = hit
            shown, self._held = self._held[:start], ""
            return StopMatch(shown, stop)
        return StopMatch(self._release(len(self._held) - self._possible_start()))

    def finish(self) -> str:
        """The text still held back: the stream is over, no stop string can come of it."""
        return self._release(len(self._held))

    def _first_hit(self) -> tuple[int, str] | None:
        hits = []
        for stop in self._stops:
            start = self._held.find(stop, max(0, self._ignored - len(stop) + 1))
            if start >= 0:
                hits.append((start + len(stop), start, stop))
        if not hits:
            return None
        _, start, stop = min(hits)
        return start, stop

    def _possible_start(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _release(self, n_chars: int) -> str:
        shown, self._held = self._held[:n_chars], self._held[n_chars:]
        self._ignored = max(0, self._ignored - n_chars)
        return shown
