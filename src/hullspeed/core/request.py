"""Request: what was asked. Sequence: how far we are with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from hullspeed.core.sampling import SamplingParams

if TYPE_CHECKING:
    from hullspeed.core.prefix import CacheNode


class FinishReason(StrEnum):
    """Why a request ended; every admitted request ends exactly once."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Status(StrEnum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to complete once (``n`` > 1 is several requests).

    Attributes:
        id: Unique in the engine, given by us and never by a client.
        prompt: Token ids; at least one.
        max_tokens: Resolved limit of output tokens, at least 1.
        eos_token_ids: The model's end tokens (the request may ignore them).
        priority: Smaller runs first; ties by arrival.
        salt: Cache namespace: requests match cached prefixes of equal salt only.
        checkpoints: Prompt positions worth a state checkpoint (end of the system block, end of
            the prompt before the generation tail); used by models with recurrent state or
            windows.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    salt: bytes = b""
    arrival_s: float = 0.0
    checkpoints: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way: its tokens, how many are computed, and the memory it holds.

    Attributes:
        tokens: Prompt and output so far.
        computed: How many of ``tokens`` have their KV (and state) in memory.
        pages: Page table: page ``i`` holds tokens ``[i * page_tokens, (i + 1) * page_tokens)``.
        window_pages: The same for layers with a window, from page ``window_first`` on: those before
            were returned.
        state_slot: Slot of the recurrent state at ``computed``; ``None`` for models without, or
            before start.
        owns_state: Whether the sequence may write ``state_slot``; else it is the cache's.
        next_slot: Slot that the step in flight writes, until it is committed.
        checkpoints: Positions, in order, at which the state goes to the cache.
        match_version: Version of the cache that was last searched for this sequence.
        node: Deepest prefix-cache node this sequence holds a lock on.
        cached_tokens: Prompt tokens served from the cache at first admission (what usage reports).
        preemptions: How often its memory was taken away.
    """

    request: Request
    tokens: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    window_first: int = 0
    state_slot: int | None = None
    owns_state: bool = False
    next_slot: int | None = None
    checkpoints: list[int] = field(default_factory=list)
    match_version: int = -1
    node: CacheNode | None = None
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    preemptions: int = 0
    first_token_s: float | None = None

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """A fresh sequence for ``request``."""
        return cls(request, list(request.prompt))

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def output(self) -> list[int]:
        """Output token ids so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def output_tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens known but not yet computed: 1 while decoding, more while prefilling."""
        return len(self.tokens) - self.computed

    def __repr__(self) -> str:
        return (
            f"Sequence(id={self.id}, {self.status}, computed={self.computed}/{len(self.tokens)}, "
            f"pages={len(self.pages)})"
        )
