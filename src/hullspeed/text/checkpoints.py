r"""Checkpoints: places of a prompt that later prompts will share to the token.

A model with recurrent state can only start from where a state was saved. Two places of a chat
prompt are worth it:

- the end of the system and tools block, which other conversations share;
- the end of the prompt before the generation tail (``<|im_start|>assistant\n<think>``): a template
  that drops earlier thinking writes that tail differently in the next turn, so a state behind it
  would never be found again.

Both are found by comparing renderings, not by knowing templates, and rounded down to a control
token, where the text before and after is tokenized apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

_MIN_CHARS = 32  # a shorter block is computed sooner than a state is looked up
_SYSTEM_ROLES = ("system", "developer")

# Two messages that begin differently: what a rendering shares with both is the template's.
DUMMY_TEXTS = ("\u2020", "\u2042")


class MarkedPrompt(NamedTuple):
    """Token ids of a prompt and positions in it worth a checkpoint, ascending."""

    tokens: list[int]
    checkpoints: tuple[int, ...] = ()


def raw_checkpoints(n_tokens: int) -> tuple[int, ...]:
    """Of a prompt that is no chat: all but the last token, which is always computed again."""
    return (n_tokens - 1,) if n_tokens > 1 else ()


def leading_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The system and developer messages that a conversation opens with."""
    count = 0
    while count < len(messages) and messages[count].get("role") in _SYSTEM_ROLES:
        count += 1
    return list(messages[:count])


def shared_chars(text: str, others: Iterable[str]) -> int:
    """Length of the prefix that ``text`` shares with all ``others``."""
    return len(commonprefix([text, *others]))  # noqa: RUF071 - of texts, not of paths


def cut_text(text: str, places: Iterable[int], control_starts: Sequence[int]) -> list[str]:
    """``text`` cut at the last control token that starts at or before each of ``places``."""
    cuts = set()
    for place in places:
        i = bisect_right(control_starts, place)
        if i and control_starts[i - 1] >= _MIN_CHARS:
            cuts.add(control_starts[i - 1])
    bounds = [0, *sorted(cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(bounds) if begin < end]
