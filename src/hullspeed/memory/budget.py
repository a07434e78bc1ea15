"""The budget of one GPU: weights + sequence state + runtime + headroom, term by term.

Everything here is per rank (one GPU of a tensor-parallel group). An engine's allocator turns an
architecture, a GPU and settings into a :class:`MemoryStack` (where the bytes go) and a
:class:`PoolPlan` (what the pool holds). :class:`MemoryBudget` is the engine-neutral form that each
allocator translates into its own knobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.findings import Finding, Severity
from hullspeed.units import format_bytes


class Term(StrEnum):
    """The four terms of M = weights + sequence state + runtime + headroom."""

    WEIGHTS = "weights"
    SEQUENCE_STATE = "sequence state"
    RUNTIME = "runtime"
    HEADROOM = "headroom"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One line of the memory bar.

    Attributes:
        bytes: Best estimate, per rank.
        source: The formula or measurement behind the number, in words.
        exact: Whether the number follows from shapes and rules alone.
        interval: Lower and upper bound in bytes (90 %); ``None`` when exact.
    """

    term: Term
    name: str
    bytes: int
    source: str
    exact: bool = True
    interval: tuple[int, int] | None = None

    @property
    def low(self) -> int:
        """Lower bound in bytes."""
        return self.interval[0] if self.interval else self.bytes

    @property
    def high(self) -> int:
        """Upper bound in bytes."""
        return self.interval[1] if self.interval else self.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStack:
    """Every byte of one GPU, by item.

    The sequence-state item is the pool: what the engine leaves for KV pages and recurrent state.

    Attributes:
        total_bytes: Memory of the GPU as the driver reports it.
        items: All terms; they sum to at most ``total_bytes``. The pool may be negative: the
            engine would not start, and ``findings`` say so.
        offered_bytes: What the engine divides into a pool, where its sequences may use less of it
            than there is; ``None``: the pool.
    """

    engine: str
    total_bytes: int
    items: tuple[MemoryItem, ...]
    findings: tuple[Finding, ...] = ()
    offered_bytes: int | None = None

    def bytes_of(self, term: Term) -> int:
        """Sum of one term."""
        return sum(item.bytes for item in self.items if item.term is term)

    @property
    def pool_bytes(self) -> int:
        """What is left for sequence state; never below zero."""
        return max(0, self.bytes_of(Term.SEQUENCE_STATE))

    @property
    def pool_interval(self) -> tuple[int, int]:
        """90 % interval of :attr:`pool_bytes`."""
        low = sum(i.low for i in self.items if i.term is Term.SEQUENCE_STATE)
        high = sum(i.high for i in self.items if i.term is Term.SEQUENCE_STATE)
        return max(0, low), max(0, high)

    @property
    def divided_bytes(self) -> tuple[int, int]:
        """What an allocator's ``pool`` is to be asked about: the best estimate, and the lower end
        of its 90 % interval.
        """
        if self.offered_bytes is not None:
            return self.offered_bytes, self.offered_bytes
        return self.pool_bytes, self.pool_interval[0]

    @property
    def free_bytes(self) -> int:
        """What no item claims."""
        return self.total_bytes - sum(item.bytes for item in self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """What an allocator needs to know of a GPU.

    Attributes:
        name: As in the hardware catalogue, e.g. ``"H100 SXM"``.
        total_bytes: As the driver reports it (H100 80GB: 79.2 GiB).
        compute_capability: ``(9, 0)`` for Hopper; ``(0, 0)`` when not NVIDIA or not known.
        cuda_major: CUDA major version of the engine's build; decides some kernels' availability.
        baseline_bytes: In use before the engine starts (driver context, display, other processes).
    """

    name: str
    total_bytes: int
    compute_capability: tuple[int, int] = (0, 0)
    cuda_major: int = 13
    baseline_bytes: int = 0

    def __post_init__(self) -> None:
        if self.total_bytes <= 0:
            raise UsageError(
                "a GPU needs a positive memory size",
                seen=self.total_bytes,
                fix="give the bytes that the driver reports, e.g. --memory 79.2GiB",
            )
        if self.baseline_bytes < 0:
            raise UsageError("baseline memory cannot be negative", seen=self.baseline_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes of the checkpoint as loaded, the whole model (before tensor parallelism).

    ``arch.quant`` computes them; a file's size on disk serves where it does not.

    Attributes:
        decoder: Text decoder with embeddings and head.
        mtp: Multi-token-prediction layers; loaded only when speculative decoding uses them.
        vision: Vision tower and projector; not loaded with ``language_model_only``.
        replicated: The part of ``decoder`` that every rank holds whole (norms, small gates).
    """

    decoder: int
    mtp: int = 0
    vision: int = 0
    replicated: int = 0
    source: str = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Flags that decide memory. ``None`` is the engine's own default at that version.

    Attributes:
        engine: ``"vllm"``, ``"sglang"``, ``"trtllm"``, ``"transformers"`` or ``"hullspeed"``.
        version: e.g. ``"0.33.0"``; ``None`` is the newest that was checked.
        memory_fraction: vLLM's ``--gpu-memory-utilization``, SGLang's ``--mem-fraction-static``,
            TensorRT-LLM's ``free_gpu_memory_fraction``: three meanings, see each allocator.
        kv_cache_bytes: An explicit pool size per rank (``--kv-cache-memory-bytes``).
        kv_dtype: Of the KV cache; ``None`` or ``"auto"`` follows the checkpoint.
        state_dtype: Of the recurrent state; ``None`` follows the model's configuration. Of the
            embedded engine, whose running states are in fp32, the cached ones.
        draft_tokens: Speculative tokens per step (MTP ``k``); 0 is off.
        prefix_caching: On, off or the engine's default at that version.
        block_tokens: ``--block-size`` / ``--page-size``.
        mamba_block_tokens: vLLM's ``--mamba-block-size``.
        mamba_ratio: SGLang's ``--mamba-full-memory-ratio``.
        mamba_slots: SGLang's ``--max-mamba-cache-size``.
        radix_strategy: SGLang's ``--mamba-radix-cache-strategy``.
        state_share: The embedded engine's ``--state-share``.
        cache: The embedded engine's prefix cache; ``hash`` keeps pages of windows in full.
    """

    engine: str = "vllm"
    version: str | None = None
    memory_fraction: float | None = None
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_dtype: str | None = None
    state_dtype: str | None = None
    tp: int = 1
    pp: int = 1
    draft_tokens: int = 0
    prefix_caching: bool | None = None
    language_model_only: bool = False
    enforce_eager: bool = False
    estimate_cudagraphs: bool | None = None
    block_tokens: int | None = None
    mamba_block_tokens: int | None = None
    mamba_ratio: float | None = None
    mamba_slots: int | None = None
    radix_strategy: str | None = None
    state_share: float | None = None
    cache: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (
            "kv_cache_bytes", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "tp", "pp",
            "block_tokens", "mamba_block_tokens", "mamba_slots",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be positive", seen=value)
        if self.draft_tokens < 0:
            raise UsageError("draft_tokens cannot be negative", seen=self.draft_tokens)
        fraction = self.memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise UsageError(
                "a memory fraction lies above 0 and at most 1",
                seen=fraction,
                fix="e.g. 0.92 for 92 %",
            )


POOL_TOO_LARGE = "MEM009"


def given_pool_findings(
    settings: EngineSettings, gpu: GpuMemory, items: Sequence[MemoryItem], *, in_use: int = 0
) -> tuple[Finding, ...]:
    """Whether a pool that was asked for in bytes fits beside weights and runtime, and beside
    ``in_use`` bytes that no item of those names.
    """
    asked = settings.kv_cache_bytes
    if asked is None:
        return ()
    beside = sum(i.bytes for i in items if i.term in (Term.WEIGHTS, Term.RUNTIME))
    beside += in_use
    left = gpu.total_bytes - beside
    if asked <= left:
        return ()
    return (
        Finding(
            code=POOL_TOO_LARGE,
            severity=Severity.ERROR,
            what=f"a pool of {format_bytes(asked)} is asked for, "
            f"{format_bytes(max(0, left))} are left for it",
            why="weights and runtime take the rest of the memory",
            evidence={"memory": format_bytes(gpu.total_bytes), "others": format_bytes(beside)},
            fix="a smaller pool, or leave its size to the engine",
        ),
    )


class PoolPlan(Protocol):
    """What a pool of ``pool_bytes`` per rank holds, in the engine's own units."""

    @property
    def engine(self) -> str:
        """Name of the engine."""
        ...

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool, per rank."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens of one attention block or page."""
        ...

    @property
    def bytes_per_block(self) -> int:
        """Per rank, all layers that share the block."""
        ...

    @property
    def blocks(self) -> int:
        """Whole blocks in the pool."""
        ...

    @property
    def printed_tokens(self) -> int:
        """The engine's start-up log line, to the token."""
        ...

    @property
    def printed_concurrency(self) -> float:
        """Likewise, e.g. 2.31 ("Maximum concurrency ... 2.31x")."""
        ...

    @property
    def max_num_seqs(self) -> int | None:
        """The largest setting with which the engine starts; ``None``: no such bound."""
        ...

    @property
    def hit_granularity_tokens(self) -> int:
        """Prefix-cache hits come in multiples of this."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Sentences that explain the numbers."""
        ...

    @property
    def findings(self) -> Sequence[Finding]:
        """What would stop the engine, or bite later."""
        ...

    def bytes_per_request(self, context_tokens: int) -> int:
        """Bytes per rank that one live request of this length occupies, block rounding included."""
        ...

    def concurrency(self, context_tokens: int) -> float:
        """Requests of this length that fit at once, by the engine's own formula (fractional)."""
        ...

    def served_concurrency(self, context_tokens: int) -> int:
        """Whole requests of this length that really run at once, with what the log line leaves
        out (null block, prefix-cache checkpoints of the state).
        """
        ...

    def max_context_tokens(self, concurrency: int) -> int:
        """The longest context at which ``concurrency`` requests fit at once; 0 when none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """One memory budget, before it is any engine's flag.

    Attributes:
        weights_bytes: Per rank.
        runtime_bytes: Activations, graphs, communication buffers, per rank.
        pool_bytes: For sequence state, per rank.
        max_num_seqs: Requests to run at once.
    """

    gpu: GpuMemory
    weights_bytes: int
    runtime_bytes: int
    pool_bytes: int
    max_model_len: int
    max_num_seqs: int


class Allocator(Protocol):
    """How one engine divides a GPU's memory."""

    def stack(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, weights: WeightBytes
    ) -> MemoryStack:
        """Where the bytes of one GPU go.

        Raises:
            UsageError: settings that contradict each other, or a version outside the checked range.
            UnsupportedModelError: the engine does not run this model.
        """
        ...

    def pool(
        self, arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, pool_bytes: int
    ) -> PoolPlan:
        """What ``pool_bytes`` per rank hold. Raises as :meth:`stack`."""
        ...

    def knobs(self, budget: MemoryBudget) -> dict[str, str]:
        """The flags (name to value) that give this engine the budget."""
        ...
