"""Byte-level BPE as GPT-2's encoder.py does it, in plain Python with the ``regex`` package."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import regex  # type: ignore[import-untyped]


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    kept += range(ord("®"), ord("ÿ") + 1)
    chars, extra = {b: chr(b) for b in kept}, 0
    for byte in range(256):
        if byte not in chars:
            chars[byte] = chr(256 + extra)
            extra += 1
    return [chars[b] for b in range(256)]


class ReferenceBpe:
    """Slow and simple. Bytes that the vocabulary lacks are dropped, as ``tokenizers`` does."""

    def __init__(
        self,
        vocab: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        patterns: Sequence[str],
        *,
        nfc: bool = False,
        ignore_merges: bool = False,
    ) -> None:
        self._vocab = vocab
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._patterns = [regex.compile(p) for p in patterns]
        self._nfc = nfc
        self._ignore_merges = ignore_merges
        self._alphabet = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        words = [unicodedata.normalize("NFC", text) if self._nfc else text]
        for pattern in self._patterns:
            words = [piece for word in words for piece in _isolate(pattern, word)]
        return [i for word in words for i in self._word(word)]

    def _word(self, word: str) -> list[int]:
        text = "".join(self._alphabet[b] for b in word.encode())
        if self._ignore_merges and text in self._vocab:
            return [self._vocab[text]]
        parts = [char for char in text if char in self._vocab]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                if tuple(parts[i : i + 2]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return [self._vocab[part] for part in parts]


def _isolate(pattern: Any, text: str) -> list[str]:
    pieces, start = [], 0
    for match in pattern.finditer(text):
        pieces += [text[start : match.start()], match.group()]
        start = match.end()
    return [piece for piece in (*pieces, text[start:]) if piece]
