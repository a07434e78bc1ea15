"""RoomPool: what the embedded engine's room holds, as every allocator says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hullspeed.errors import CapacityError
from hullspeed.findings import Finding, Severity
from hullspeed.memory.ours_room import Room, RoomRules, Sizes, share_out, window_pages
from hullspeed.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPool:
    """Implements :class:`hullspeed.memory.budget.PoolPlan`.

    Attributes:
        budget_bytes: What was there to share out.
        max_model_len: Longest sequence.
        room: What came of it; ``None`` if the engine would not start.
        shortage: Why it would not.
    """

    sizes: Sizes
    rules: RoomRules
    budget_bytes: int
    max_model_len: int
    room: Room | None
    shortage: CapacityError | None = None

    @classmethod
    def of(cls, sizes: Sizes, rules: RoomRules, max_model_len: int, budget_bytes: int) -> RoomPool:
        """Share ``budget_bytes`` out as the engine would.

        Raises:
            UsageError: a rule that cannot be.
        """
        room = shortage = None
        try:
            room = share_out(sizes, rules, max_model_len, budget_bytes)
        except CapacityError as error:
            shortage = error
        return cls(
            sizes=sizes,
            rules=rules,
            budget_bytes=budget_bytes,
            max_model_len=max_model_len,
            room=room,
            shortage=shortage,
        )

    @property
    def engine(self) -> str:
        """Ours."""
        return "hullspeed"

    @property
    def pool_bytes(self) -> int:
        """What the room takes; the budget if there is none."""
        return self.budget_bytes if self.room is None else self.room.total_bytes

    @property
    def block_tokens(self) -> int:
        """Tokens of a page."""
        return self.rules.page_tokens

    @property
    def bytes_per_block(self) -> int:
        """One page in all layers that have it."""
        return self.sizes.page if self.room is None else self.room.page_bytes

    @property
    def blocks(self) -> int:
        """Pages, as the engine says at start."""
        return 0 if self.room is None else self.room.n_pages

    @property
    def printed_tokens(self) -> int:
        """Tokens of these pages."""
        return self.blocks * self.block_tokens

    @property
    def printed_concurrency(self) -> float:
        """At ``max_model_len``."""
        return self.concurrency(self.max_model_len)

    @property
    def max_num_seqs(self) -> int | None:
        """With how many running sequences the engine starts: those have their states first. No
        bound for models without.
        """
        if not self.sizes.state:
            return None
        most = max(self.budget_bytes, 0) // self.sizes.state
        return _largest(most, lambda n: self._starts(replace(self.rules, max_running=n)))

    def _starts(self, rules: RoomRules) -> bool:
        return (
            RoomPool.of(self.sizes, rules, self.max_model_len, self.budget_bytes).room is not None
        )

    @property
    def hit_granularity_tokens(self) -> int:
        """Hits are exact to the token, anywhere or where a state is: a page that is cut is
        copied.
        """
        return 1

    @property
    def notes(self) -> tuple[str, ...]:
        """States and pages of windows, where there are any."""
        room, said = self.room, []
        if room is None:
            return ()
        if room.n_state_slots:
            said.append(f"{room.n_state_slots:,} states of {format_bytes(room.state_bytes)}")
        if room.n_stored_slots:
            said.append(f"{room.n_stored_slots:,} cached ones of {format_bytes(room.stored_bytes)}")
        if room.n_window_pages:
            said.append(
                f"{room.n_window_pages:,} pages of layers with a window of "
                f"{room.window_tokens:,} tokens, {format_bytes(room.window_page_bytes)} each"
            )
        return tuple(said)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Whether the engine starts."""
        if self.shortage is None:
            return ()
        longest = self.max_context_tokens(1)
        return (
            Finding(
                code="MEM001",
                severity=Severity.ERROR,
                what=self.shortage.what,
                evidence={"budget_bytes": str(self.budget_bytes)},
                fix=f"cut the context to {longest} tokens" if longest else self.shortage.fix or "",
            ),
        )

    def bytes_per_request(self, context_tokens: int) -> int:
        """Whole pages, and one state."""
        pages = -(-context_tokens // self.block_tokens)
        total = pages * self.bytes_per_block + self.sizes.state
        if self.room is not None and self.room.n_window_pages:
            held = window_pages(self.room, self.block_tokens, context_tokens)
            total += held * self.room.window_page_bytes
        return total

    def concurrency(self, context_tokens: int) -> float:
        """Pages over those of a request, at most ``max_running``."""
        return 0.0 if self.room is None else self._fits(self.room, context_tokens)

    def _fits(self, room: Room, context_tokens: int) -> float:
        fits = room.n_pages / -(-context_tokens // self.block_tokens)
        if room.n_window_pages:
            held = window_pages(room, self.block_tokens, context_tokens)
            fits = min(fits, room.n_window_pages / held)
        return min(fits, float(self.rules.max_running))

    def served_concurrency(self, context_tokens: int) -> int:
        """Whole requests at once."""
        return int(self.concurrency(context_tokens))

    def max_context_tokens(self, concurrency: int) -> int:
        """The longest context, in whole pages, with which the engine starts and holds this many
        requests.
        """

        def holds(n_pages: int) -> bool:
            n_tokens = n_pages * self.block_tokens
            pool = RoomPool.of(self.sizes, self.rules, n_tokens, self.budget_bytes)
            return pool.served_concurrency(n_tokens) >= concurrency

        smallest = self.sizes.full_page or self.sizes.page
        most = max(self.budget_bytes, 0) // smallest if smallest else 1
        return _largest(most, holds) * self.block_tokens


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to ``most`` that holds, 0 if not even 1 does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
