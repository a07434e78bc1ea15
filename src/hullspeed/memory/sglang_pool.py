"""What SGLang's two pools hold: KV tokens and slots of recurrent state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hullspeed.findings import Finding, Severity
from hullspeed.units import MIB

MIN_DEFAULT_RUNNING = 2048
MAX_DEFAULT_RUNNING = 4096
RUNNING_PER_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Cells:
    """The two units of a rank's memory.

    Attributes:
        token_bytes: One token in all layers that keep every token.
        window_bytes: One token in all sliding-window layers.
        window_tokens: Their window.
        slot_bytes: One state slot, all layers; drafts do not widen it.
    """

    token_bytes: int
    window_bytes: int
    window_tokens: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangPool:
    """Tokens and state slots (implements :class:`hullspeed.memory.budget.PoolPlan`)."""

    pool_bytes: int
    cells: Cells
    slots: int
    slots_per_request: int
    tokens: int
    window_pool_tokens: int
    max_model_len: int
    asked_running: int | None
    page_tokens: int = 1
    track_tokens: int = 1
    engine: str = "sglang"

    @property
    def bytes_per_token(self) -> int:
        """One token of the full-attention pool."""
        return self.cells.token_bytes

    @property
    def block_tokens(self) -> int:
        """Page size in tokens."""
        return self.page_tokens

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one page."""
        return self.cells.token_bytes * self.page_tokens

    @property
    def blocks(self) -> int:
        """Pages in the pool."""
        return self.tokens // self.page_tokens

    @property
    def printed_tokens(self) -> int:
        """The log's ``max_total_num_tokens``."""
        return self.tokens

    @property
    def max_running_requests(self) -> int:
        """The log's ``max_running_requests``: the flag, tokens and slots, whichever is least."""
        default = self.tokens * RUNNING_PER_CONTEXT // self.max_model_len
        running = min(max(default, MIN_DEFAULT_RUNNING), MAX_DEFAULT_RUNNING)
        if self.asked_running is not None:
            running = self.asked_running
        if self.cells.slot_bytes:
            running = min(running, self.slots // self.slots_per_request)
        return running

    @property
    def printed_concurrency(self) -> float:
        """Requests of ``max_model_len`` (SGLang prints no such line)."""
        return self.concurrency(self.max_model_len)

    def bytes_per_request(self, context_tokens: int) -> int:
        """KV pages, window pages and reserved slots of one request."""
        pages = -(-context_tokens // self.page_tokens) * self.page_tokens
        window = min(context_tokens, self.cells.window_tokens)
        slots = self.slots_per_request * self.cells.slot_bytes
        return pages * self.cells.token_bytes + window * self.cells.window_bytes + slots

    def concurrency(self, context_tokens: int) -> float:
        """The least of tokens, window tokens and slots, as a fraction."""
        bounds: list[float] = [float(self.max_running_requests)]
        if self.cells.token_bytes:
            pages = -(-context_tokens // self.page_tokens) * self.page_tokens
            bounds.append(self.tokens / pages)
        if self.cells.window_bytes:
            bounds.append(self.window_pool_tokens / min(context_tokens, self.cells.window_tokens))
        return min(bounds)

    def served_concurrency(self, context_tokens: int) -> int:
        """Whole requests at once."""
        return int(self.concurrency(context_tokens))

    def max_context_tokens(self, concurrency: int) -> int:
        """Longest context for this many requests; 0 when there are too few slots."""
        if concurrency > self.max_running_requests:
            return 0
        if not self.cells.token_bytes:
            return self.max_model_len
        return self.tokens // max(1, concurrency) // self.page_tokens * self.page_tokens

    @property
    def max_num_seqs(self) -> int | None:
        """SGLang lowers the flag itself instead of refusing."""
        return self.max_running_requests if self.cells.slot_bytes else None

    @property
    def hit_granularity_tokens(self) -> int:
        """State is tracked at intervals; dense models hit at pages."""
        return self.track_tokens if self.cells.slot_bytes else self.page_tokens

    @property
    def notes(self) -> Sequence[str]:
        """How the numbers come about."""
        notes = [f"{self.tokens:,} tokens of {self.cells.token_bytes:,} bytes"]
        if self.cells.slot_bytes:
            notes.append(
                f"{self.slots} state slots of {self.cells.slot_bytes / MIB:.1f} MiB, "
                f"{self.slots_per_request} for each running request"
            )
        return tuple(notes)

    @property
    def findings(self) -> Sequence[Finding]:
        """What stops the engine, or caps it silently."""
        found = []
        if self.tokens <= 0 or (self.cells.slot_bytes and self.slots < self.slots_per_request):
            found.append(
                Finding(
                    code="MEM011",
                    severity=Severity.ERROR,
                    what="not enough memory for one request; SGLang will not start",
                    evidence={"tokens": str(self.tokens), "slots": str(self.slots)},
                    fix="raise --mem-fraction-static, quantize, or use more GPUs",
                )
            )
        by_tokens = self.tokens // max(1, self.max_model_len)
        asked = self.asked_running
        capped = self.cells.slot_bytes and (
            self.max_running_requests < (by_tokens if asked is None else asked)
        )
        if capped:
            found.append(
                Finding(
                    code="MEM012",
                    severity=Severity.WARNING,
                    what="state slots, not tokens, cap the running requests",
                    why="SGLang lowers max_running_requests without an error",
                    evidence={
                        "running": str(self.max_running_requests),
                        "asked": str(asked if asked is not None else by_tokens),
                    },
                    fix="--mamba-full-memory-ratio higher, --mamba-ssm-dtype bfloat16, or "
                    "--mamba-radix-cache-strategy extra_buffer_lazy",
                )
            )
        return tuple(found)
