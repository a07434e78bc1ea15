"""What a vLLM pool holds: blocks, the log's two numbers, and what really runs at once."""

from __future__ import annotations

from dataclasses import dataclass

from hullspeed.findings import Finding, Severity
from hullspeed.memory.vllm_groups import Layout, StateMode
from hullspeed.units import GIB, MIB

# With prefix caching on a hybrid model, state checkpoints of a long prompt hold blocks that the
# log's concurrency leaves out. One public field report measures it: two prompts of about 200,000
# tokens filled a pool of 366 blocks (0.98 in use) where the formula gives 142 each, so 0.30 blocks
# more for each attention block; 20 % more room with `--mamba-block-size 8192`. The bound used for
# what is promised is a little above.
CHECKPOINT_BLOCKS_PER_BLOCK = 0.35
LARGE_MAMBA_BLOCK_TOKENS = 8192
MAX_SEARCHED_CONTEXT_TOKENS = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPool:
    """A pool of equal blocks (implements :class:`hullspeed.memory.budget.PoolPlan`).

    Attributes:
        max_model_len: The M of the log's concurrency line.
        tokens_line: ``"concurrency"`` or ``"blocks_per_group"`` (see the profile).
        null_block_reserved: The start check leaves one block out.
        mamba_block_tokens: ``--mamba-block-size`` when given.
        graphs: FULL graphs are captured, so ``max_num_seqs`` may not exceed the blocks.
    """

    layout: Layout
    pool_bytes: int
    max_model_len: int
    asked_num_seqs: int
    tokens_line: str = "concurrency"
    null_block_reserved: bool = False
    mamba_block_tokens: int | None = None
    graphs: bool = True
    engine: str = "vllm"

    @property
    def block_tokens(self) -> int:
        """Tokens of one attention block."""
        return self.layout.block_tokens

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on the widest rank."""
        return self.layout.bytes_per_block

    @property
    def blocks(self) -> int:
        """Whole blocks in the pool."""
        return self.pool_bytes // self.layout.bytes_per_block

    @property
    def usable_blocks(self) -> int:
        """Blocks without the null block that the engine never gives to a request."""
        return max(0, self.blocks - 1)

    def blocks_per_request(self, context_tokens: int) -> int:
        """Blocks that one request of this length may hold."""
        return self.layout.blocks_per_request(context_tokens)

    def bytes_per_request(self, context_tokens: int) -> int:
        """Bytes of those blocks."""
        return self.blocks_per_request(context_tokens) * self.bytes_per_block

    def concurrency(self, context_tokens: int) -> float:
        """``blocks / blocks_per_request``, as the log computes it."""
        return self.blocks / self.blocks_per_request(context_tokens)

    @property
    def printed_concurrency(self) -> float:
        """The log's concurrency at ``max_model_len``, unrounded (it prints two decimals)."""
        return self.concurrency(self.max_model_len)

    @property
    def printed_tokens(self) -> int:
        """The log's ``GPU KV cache size``."""
        if self.tokens_line == "blocks_per_group":
            smallest = min(group.block_tokens for group in self.layout.groups)
            return self.blocks // len(self.layout.groups) * smallest
        return int(self.printed_concurrency * self.max_model_len)

    @property
    def checkpointed(self) -> bool:
        """Prefix-cache checkpoints of the state take blocks beyond the log's count."""
        large = (self.mamba_block_tokens or 0) >= LARGE_MAMBA_BLOCK_TOKENS
        return self.layout.has_state and self.layout.state_mode is StateMode.ALIGN and not large

    def held_blocks(self, context_tokens: int) -> int:
        """Blocks that a live request really holds: the formula's, and state checkpoints where
        prefix caching keeps them (an upper bound from :data:`CHECKPOINT_BLOCKS_PER_BLOCK`).
        """
        blocks = self.blocks_per_request(context_tokens)
        if self.checkpointed:
            attention = -(-context_tokens // self.block_tokens)
            blocks += int(CHECKPOINT_BLOCKS_PER_BLOCK * attention)
        return blocks

    def served_concurrency(self, context_tokens: int) -> int:
        """Whole requests that run at once without preemption."""
        fits = self.usable_blocks // self.held_blocks(context_tokens)
        # One request alone evicts its own checkpoints rather than wait.
        alone = self.usable_blocks >= self.blocks_per_request(context_tokens)
        return max(fits, int(alone))

    def max_context_tokens(self, concurrency: int) -> int:
        """Longest context at which ``concurrency`` requests fit (no checkpoints held)."""
        budget = self.usable_blocks // max(1, concurrency)
        if self.blocks_per_request(1) > budget:
            return 0
        low, high = 1, MAX_SEARCHED_CONTEXT_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_per_request(middle) <= budget:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def max_num_seqs(self) -> int | None:
        """Largest setting that starts: one state block per decoding sequence under FULL graphs."""
        return self.blocks if self.layout.has_state and self.graphs else None

    @property
    def hit_granularity_tokens(self) -> int:
        """Prefix-cache hits end at block boundaries (of the state's block when it is larger)."""
        if self.layout.has_state and self.mamba_block_tokens:
            return max(self.block_tokens, self.mamba_block_tokens)
        return self.block_tokens

    @property
    def needed_bytes(self) -> int:
        """What the start check wants for one request of ``max_model_len``."""
        return self.bytes_per_request(self.max_model_len)

    @property
    def checked_bytes(self) -> int:
        """What the start check compares it with."""
        reserved = self.bytes_per_block if self.null_block_reserved else 0
        return self.pool_bytes - reserved

    @property
    def notes(self) -> tuple[str, ...]:
        """How the numbers come about."""
        layout = self.layout
        notes = [
            f"{len(layout.groups)} groups share one pool of {self.blocks} blocks of "
            f"{layout.bytes_per_block / MIB:.4g} MiB; a request of {self.max_model_len:,} tokens "
            f"holds {self.blocks_per_request(self.max_model_len)} of them"
        ]
        if layout.has_state:
            notes.append(
                "tokens in the log are concurrency x length, not a pool of tokens: short requests "
                "are bounded by state blocks"
            )
            notes.append(f"prefix-cache hits come in multiples of {self.hit_granularity_tokens:,}")
        if layout.padding_layers:
            notes.append(f"{layout.padding_layers} padding layers hold nothing")
        return tuple(notes)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Start checks that fail, and what bites later."""
        found = []
        if self.needed_bytes > self.checked_bytes:
            found.append(self._too_short())
        if self.max_num_seqs is not None and self.asked_num_seqs > self.max_num_seqs:
            found.append(self._too_many_seqs())
        if self.checkpointed:
            found.append(self._optimistic())
        return tuple(found)

    def _too_short(self) -> Finding:
        longest = self.max_context_tokens(1)
        fix = f"--max-model-len {longest}" if longest else "raise the memory fraction, or quantize"
        return Finding(
            code="MEM001",
            severity=Severity.ERROR,
            what="one request of max_model_len does not fit the pool; vLLM will not start",
            why="the start check wants all blocks of the longest request at once",
            evidence={
                "needed": f"{self.needed_bytes / GIB:.2f} GiB",
                "available": f"{self.checked_bytes / GIB:.2f} GiB",
                "max_model_len": str(self.max_model_len),
            },
            fix=fix,
        )

    def _too_many_seqs(self) -> Finding:
        # With drafts, FlashInfer captures no FULL graphs and the check is skipped; others do.
        drafts = self.layout.draft_tokens
        return Finding(
            code="MEM002",
            severity=Severity.WARNING if drafts else Severity.ERROR,
            what="max_num_seqs exceeds the available Mamba cache blocks; vLLM "
            + ("may not start" if drafts else "will not start"),
            why="a decoding sequence needs one state block, and FULL graphs are captured for "
            "max_num_seqs; the check comes after the weights are loaded",
            evidence={"max_num_seqs": str(self.asked_num_seqs), "blocks": str(self.max_num_seqs)},
            fix=f"--max-num-seqs {self.max_num_seqs}",
        )

    def _optimistic(self) -> Finding:
        length = self.max_model_len
        over = self.held_blocks(length) / self.blocks_per_request(length) - 1
        return Finding(
            code="MEM003",
            severity=Severity.WARNING,
            what=f"the log's concurrency at {length:,} tokens is up to {over:.0%} optimistic under "
            "prefix caching",
            why="state checkpoints of long prompts take blocks that the line leaves out",
            evidence={
                "printed": f"{self.printed_concurrency:.2f}",
                "held": f"{self.usable_blocks / self.held_blocks(length):.2f}",
            },
            fix="--mamba-block-size 8192, or plan with the served concurrency",
        )
