"""Workload: who asks what and when, as lengths and identities of content, without any text.

A prompt is a list of parts. Two parts with the same content number are the same tokens as far as
both go; different numbers differ from the first token on. That is all a prefix cache can see, so
system prompts, conversations and traces of block hashes are all written this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from hullspeed.errors import UsageError


class Part(NamedTuple):
    """``n_tokens`` tokens of content number ``content`` (positive)."""

    content: int
    n_tokens: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        prompt: The whole prompt, earlier turns included.
        osl_tokens: Output length, exact.
        answer: Content number of the output.
        said: The output in parts, where it is not all ``answer``: what a later prompt repeats of
            it may part from it anywhere.
        wait_s: From the end of the turn before (or the session's start) to this request.
        checkpoints: Prompt positions at which a hybrid model's state is worth saving.
        measured: Whether it counts (warm-up requests do not).
    """

    prompt: tuple[Part, ...]
    osl_tokens: int
    answer: int
    wait_s: float = 0.0
    checkpoints: tuple[int, ...] = ()
    measured: bool = True
    said: tuple[Part, ...] = ()

    @property
    def isl_tokens(self) -> int:
        """Prompt length."""
        return sum(part.n_tokens for part in self.prompt)

    def tokens(self) -> list[int]:
        """The prompt, a number for each token."""
        return spelled(self.prompt)


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Requests one after another, each sent when the one before has been answered.

    Attributes:
        at_s: When it starts; closed loops start it when a place is free instead.
    """

    turns: tuple[Turn, ...]
    at_s: float = 0.0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions and how they are started.

    Attributes:
        name: What it is, for tables.
        concurrency: Sessions at a time (closed loop), in their order; 0: each at its own time.
    """

    name: str
    sessions: tuple[Session, ...]
    concurrency: int = 0

    @property
    def n_requests(self) -> int:
        """Requests of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    def scaled(self, factor: float) -> Workload:
        """The same sessions arriving ``factor`` times as fast; think times stay."""
        if factor <= 0:
            raise UsageError("arrivals can be scaled by more than 0 only", seen=factor)
        sessions = tuple(msgspec.structs.replace(s, at_s=s.at_s / factor) for s in self.sessions)
        return msgspec.structs.replace(self, sessions=sessions)


def of_turns(name: str, turns: Iterable[tuple[float, Turn]]) -> Workload:
    """Independent requests at given times."""
    sessions = tuple(Session(turns=(turn,), at_s=at_s) for at_s, turn in turns)
    return Workload(name=name, sessions=sessions)


class Contents:
    """Hands out content numbers that nobody else has."""

    def __init__(self, first: int = 1) -> None:
        self._next = first

    def new(self) -> int:
        """A number for content not seen before."""
        self._next += 1
        return self._next - 1


def spelled(parts: Iterable[Part]) -> list[int]:
    """Some parts, a number for each token."""
    tokens: list[int] = []
    for content, n_tokens in parts:
        tokens += [content] * n_tokens
    return tokens


def cut(parts: Iterable[Part], n_tokens: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The first ``n_tokens`` tokens of some parts (fewer if there are fewer), and the rest."""
    head: list[Part] = []
    tail: list[Part] = []
    left = n_tokens
    for content, size in parts:
        taken = min(size, left)
        left -= taken
        if taken:
            head.append(Part(content, taken))
        if size > taken:
            tail.append(Part(content, size - taken))
    return tuple(head), tuple(tail)


def total_tokens(parts: Sequence[Part]) -> int:
    """Tokens of some parts."""
    return sum(part.n_tokens for part in parts)
