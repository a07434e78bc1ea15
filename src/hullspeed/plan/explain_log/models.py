"""Which shapes a log's model name stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hullspeed.arch import catalogue
from hullspeed.arch.model import ModelArch

_WORD = re.compile(r"[a-z0-9.]+")
_FORMATS = {
    "fp8", "nvfp4", "fp4", "int4", "int8", "awq", "gptq", "bf16", "instruct", "gguf", "mxfp4",
    "dynamic", "w4a16", "w8a8", "2507", "it", "hf", "text", "base", "chat",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NamedArch:
    """An architecture and how its name was found.

    Attributes:
        exact: The name is in the catalogue; otherwise a catalogue name is contained in it.
    """

    name: str
    arch: ModelArch
    exact: bool


def _words(name: str) -> list[str]:
    words = _WORD.findall(name.lower())
    return [word for word in words if word not in _FORMATS]


def find_arch(name: str | None) -> NamedArch | None:
    """The catalogue's model of this name, or the one whose name it contains word by word.

    ``/models/Qwen3.6-27B-FP8`` and ``someone/Qwen3.6-27B-Text-NVFP4-MTP`` have the shapes of
    Qwen3.6-27B; a quantized or fine-tuned copy keeps them. ``None`` when no name is contained.
    """
    if not name:
        return None
    if catalogue.lookup(name) is not None:
        return NamedArch(name, catalogue.load(name), exact=True)
    wanted = _words(name.rstrip("/").rpartition("/")[2]) or _words(name)
    best: tuple[int, str] | None = None
    for known in catalogue.names():
        words = _words(known.rpartition("/")[2])
        # A longer name wins: "qwen3.6 35b a3b" over "qwen3.6 35b"; a tie goes to the plain one.
        rank = (len(words), known) if words and _contains(wanted, words) else None
        if rank and (best is None or rank[0] > best[0] or _plainer(rank, best)):
            best = rank
    return None if best is None else NamedArch(best[1], catalogue.load(best[1]), exact=False)


def _plainer(rank: tuple[int, str], best: tuple[int, str]) -> bool:
    return rank[0] == best[0] and len(rank[1]) < len(best[1])


def _contains(words: list[str], part: list[str]) -> bool:
    return any(words[i : i + len(part)] == part for i in range(max(0, len(words) - len(part) + 1)))
