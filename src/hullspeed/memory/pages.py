"""PagePool: pages of tokens and one state per sequence (TensorRT-LLM, Transformers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from hullspeed.findings import Finding, Severity
from hullspeed.memory.layers import CacheLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePool:
    """Implements :class:`hullspeed.memory.budget.PoolPlan` for engines without page unification.

    A sequence holds whole pages in every layer that keeps tokens (a window's worth in sliding
    layers) and one state of each recurrent layer.
    """

    engine: str
    pool_bytes: int
    layers: tuple[CacheLayer, ...]
    page_tokens: int
    max_model_len: int
    asked_num_seqs: int
    notes: Sequence[str] = ()

    @property
    def block_tokens(self) -> int:
        """Tokens of a page."""
        return self.page_tokens

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        """One page in all layers that keep every token."""
        total = sum(
            (
                layer.token_bytes * self.page_tokens
                for layer in self.layers
                if layer.window_tokens is None
            ),
            Fraction(0),
        )
        return -(-total.numerator // total.denominator)

    @property
    def blocks(self) -> int:
        """Whole pages in the pool, were it all pages."""
        return self.pool_bytes // self.bytes_per_block if self.bytes_per_block else 0

    @property
    def printed_tokens(self) -> int:
        """Tokens of the pool after the states of the sequences that may run."""
        if not self.bytes_per_block:
            return 0
        rest = max(0, self.pool_bytes - self.state_bytes * self.asked_num_seqs)
        return rest // self.bytes_per_block * self.page_tokens

    @property
    def printed_concurrency(self) -> float:
        """At ``max_model_len``."""
        return self.concurrency(self.max_model_len)

    def bytes_per_request(self, context_tokens: int) -> int:
        """Whole pages in each layer, and the state."""
        total = 0
        for layer in self.layers:
            pages = -(-context_tokens // self.page_tokens)
            if layer.window_tokens:
                pages = min(pages, -(-layer.window_tokens // self.page_tokens))
            size = layer.token_bytes * pages * self.page_tokens
            total += -(-size.numerator // size.denominator) + layer.state_bytes
        return total

    def concurrency(self, context_tokens: int) -> float:
        """Pool over request, at most ``max_num_seqs``."""
        fits = self.pool_bytes / self.bytes_per_request(context_tokens)
        return min(fits, float(self.asked_num_seqs))

    def served_concurrency(self, context_tokens: int) -> int:
        """Whole requests at once."""
        return int(self.concurrency(context_tokens))

    def max_context_tokens(self, concurrency: int) -> int:
        """Longest context at which this many requests fit, in whole pages."""
        if concurrency > self.asked_num_seqs:
            return 0
        share = self.pool_bytes // max(1, concurrency)
        if self.bytes_per_request(1) > share:
            return 0
        low, high = 1, max(1, self.blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if self.bytes_per_request(middle * self.page_tokens) <= share:
                low = middle
            else:
                high = middle - 1
        return low * self.page_tokens

    @property
    def max_num_seqs(self) -> int | None:
        """As many states as the pool holds; no bound for dense models."""
        return self.pool_bytes // self.state_bytes if self.state_bytes else None

    @property
    def hit_granularity_tokens(self) -> int:
        """Prefix hits come in pages."""
        return self.page_tokens

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Whether one request of ``max_model_len`` fits."""
        if self.bytes_per_request(self.max_model_len) <= self.pool_bytes:
            return ()
        return (
            Finding(
                code="MEM001",
                severity=Severity.ERROR,
                what="one request of the longest context does not fit the pool",
                evidence={
                    "needed_bytes": str(self.bytes_per_request(self.max_model_len)),
                    "pool_bytes": str(self.pool_bytes),
                },
                fix=f"cut the context to {self.max_context_tokens(1)} tokens",
            ),
        )
