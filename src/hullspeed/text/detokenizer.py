"""Detokenizer: token ids to text as they come, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from hullspeed.text.tokenizer import Tokenizer

_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one stream of tokens; time per token does not grow with the stream.

    A character whose bytes are spread over tokens appears with its last byte. Everything pushed
    and finished, joined, equals ``Tokenizer.decode`` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = _decoder(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete."""
        return self._decoder.decode(
            self._tokenizer.decode_bytes(ids, skip_special=self._skip_special)
        )

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became whole, else nothing."""
        return self._decoder.decode(b"", final=True)
