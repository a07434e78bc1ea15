"""TextStream: what a client sees of one request's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hullspeed.text.detokenizer import Detokenizer
from hullspeed.text.stops import StopStrings
from hullspeed.text.tokenizer import Tokenizer


class TextStream:
    """Tokens in, text out, up to the first stop string.

    Attributes:
        stopped: The stop string that was found: the request can be cancelled, and it finished
            with reason "stop".
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Iterable[str] = (),
        min_tokens: int = 0,
        skip_special: bool = True,
    ) -> None:
        self.stopped: str | None = None
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._stops = StopStrings(stop)
        self._min_tokens = min_tokens
        self._n_tokens = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be shown now that ``ids`` are known; nothing after a stop."""
        shown = ""
        for token in ids:
            if self.stopped is not None:
                break
            self._n_tokens += 1
            match = self._stops.push(
                self._detokenizer.push((token,)), armed=self._n_tokens > self._min_tokens
            )
            shown += match.text
            self.stopped = match.stop
        return shown

    def finish(self) -> str:
        """The rest of the text once no more tokens come."""
        if self.stopped is not None:
            return ""
        # An incomplete character can still complete a stop string that asks for U+FFFD.
        match = self._stops.push(
            self._detokenizer.finish(), armed=self._n_tokens > self._min_tokens
        )
        self.stopped = match.stop
        return match.text if match.stop is not None else match.text + self._stops.finish()
