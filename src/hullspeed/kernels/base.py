"""Kernels: what a back end computes. The decoder is written against this and nothing else.

Shapes: T tokens of a step, S spans, H hidden, D head_dim, G key/value heads, Q query heads,
P page_tokens. Activations are float32 ``[T, ...]`` on the back end's device. Query heads that share
key/value head g are ``g * Q // G ..``, as in the checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from hullspeed.kernels.batch import Batch
from hullspeed.kernels.blocks import BlockWeight

KvDtype = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
"""Formats of keys and values; ``fp8`` is e4m3. See :mod:`hullspeed.kernels.kv_codes`."""


@dataclass(frozen=True, slots=True)
class KvPages:
    """The keys and values of one layer, page by page, as numbers of one format.

    Keys lie transposed so that 64 scores of a query are one run over contiguous keys.

    Attributes:
        keys: ``[n_pages, G, D, P]``.
        values: ``[n_pages, G, P, D]``.
        key_scales: float32 ``[n_pages, G, P]`` that keys are to be multiplied by; int8 and fp8.
        value_scales: The same of the values.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[3]

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """All that a page has a part of: its first index is the page."""
        pools = (self.keys, self.values, self.key_scales, self.value_scales)
        return tuple(pool for pool in pools if pool is not None)


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines, float32 ``[max_context_tokens, rotary_dim / 2]`` each. Dimension i of a
    head turns with dimension i + rotary_dim / 2 (the "rotate half" convention).
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norm of each query and key head before rotation (Qwen3): weights ``[D]``."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a layer. ``window_tokens`` 0 sees the whole context; ``query_scale`` 0 multiplies
    scores by 1 / sqrt(D).
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int = 0
    query_scale: float = 0.0

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.query_scale or float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads of a gated delta rule layer; value head v uses key head ``v * k_heads // v_heads``."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """C, the width of the convolution: queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class StateSlots:
    """What one recurrent layer remembers of sequences, slot by slot, float32.

    Attributes:
        recurrent: ``[n_slots, v_heads, k_dim, v_dim]``.
        inputs: ``[n_slots, taps - 1, C]``: the convolution's last inputs, oldest first.
    """

    recurrent: Tensor
    inputs: Tensor


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """Learned parameters of the decay, float32 ``[v_heads]`` each: a token's state decays by
    ``exp(-rate * softplus(a + bias))``.
    """

    rate: Tensor
    bias: Tensor


Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""``silu(gate) * up``; ``gelu(gate) * up`` in the tanh form (Gemma); or, with both clamped,
``gate * sigmoid(1.702 * gate) * (up + 1)`` (gpt-oss)."""
SWIGLU_ALPHA = 1.702


class Linear(Protocol):
    """A packed ``x @ weight.T + bias``."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in]`` to ``[T, out]``."""
        ...


class Experts(Protocol):
    """Packed experts of one layer."""

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Each token through the experts ``chosen`` int64 ``[T, k]`` (no expert twice in a row),
        summed with ``shares`` ``[T, k]``: ``[T, H]`` to ``[T, H]``.
        """
        ...


class Plan(Protocol):
    """A batch made ready for a back end: on its device, with its work divided."""

    @property
    def batch(self) -> Batch:
        """The batch as it came."""
        ...

    @property
    def tokens(self) -> Tensor:
        """int64 ``[T]`` on the device."""
        ...

    @property
    def logits_rows(self) -> Tensor:
        """int64 ``[R]`` on the device."""
        ...


P = TypeVar("P", bound=Plan)


class Kernels(Protocol[P]):
    """A back end."""

    name: ClassVar[str]
    device: torch.device
    threads: int
    takes_blocks: bool
    """Whether :meth:`linear` is better given codes, where a checkpoint has them, than float32."""

    def linear(self, weight: Tensor | BlockWeight, bias: Tensor | None = None) -> Linear:
        """Pack ``weight`` ``[out, in]`` (float32 or codes) and ``bias`` ``[out]`` for use."""
        ...

    def table(self, weight: Tensor) -> Tensor:
        """Hold an embedding ``[vocab, H]`` (float32) as :meth:`embed` takes it."""
        ...

    def allocate_kv(
        self, shape: AttentionShape, n_pages: int, page_tokens: int, dtype: KvDtype = "fp32"
    ) -> KvPages:
        """Zeroed pages of one layer; memory is touched when first written."""
        ...

    def plan(self, batch: Batch) -> P:
        """Prepare a checked batch; the plan serves all layers of one step."""
        ...

    def embed(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Rows of ``table``: ``[T, H]`` float32, a new tensor."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None) -> Tensor:
        """``x += delta`` in place (if given), then ``weight * x / sqrt(mean(x^2) + eps)``."""
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        plan: P,
        shape: AttentionShape,
        rotary: RotaryTable,
        norms: HeadNorms | None,
        kv: KvPages,
    ) -> Tensor:
        """Split ``qkv`` ``[T, >= (Q + 2G) * D]`` (queries, keys, values; what follows is left
        alone), norm and rotate queries and keys, write keys and values to their pages, rounded to
        the pages' format. Returns the queries ``[T, Q, D]``.
        """
        ...

    def attend(
        self,
        q: Tensor,
        plan: P,
        shape: AttentionShape,
        kv: KvPages,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Each query over keys ``0 ..`` its own position of its span's pages: ``[T, Q * D]``. With
        a window only those in it are read, from ``batch.table_of(window_tokens)``.

        ``sinks`` ``[Q]`` are scores of a key without a value, one for each head.
        """
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor, offset: int) -> Tensor:
        """``x * sigmoid(gate[:, offset : offset + N])`` for ``x`` ``[T, N]``, in place."""
        ...

    def activate(self, gate_up: Tensor, activation: Activation, limit: float = 0.0) -> Tensor:
        """Gate ``[T, 2I]`` (gate first): ``[T, I]``. ``limit`` is that of ``clamped_swiglu``."""
        ...

    def experts(
        self, gate_up: Sequence[Linear], down: Sequence[Linear], activation: Activation,
        limit: float = 0.0,
    ) -> Experts:  # fmt: skip
        """Experts made of packed linears, one pair for each."""
        ...

    def allocate_states(self, shape: DeltaShape, n_slots: int) -> StateSlots:
        """Slots of one layer; memory is touched when first written."""
        ...

    def convolve(self, x: Tensor, plan: P, weight: Tensor, states: StateSlots) -> Tensor:
        """Causal convolution of each span's channels with ``weight`` ``[taps, C]`` (oldest first),
        through SiLU: ``[T, >= C]`` to ``[T, C]``. A span starts from the inputs in its read slot
        (-1: zeros) and leaves its last ones in its write slot.
        """
        ...

    def delta_scan(
        self,
        qkv: Tensor,
        ba: Tensor,
        plan: P,
        shape: DeltaShape,
        gates: DeltaGates,
        states: StateSlots,
    ) -> Tensor:
        """Gated delta rule over each span: ``[T, C]`` to ``[T, v_heads * v_dim]``.

        Queries and keys are normed first (``qkv`` may be overwritten); ``ba`` ``[T, 2 * v_heads]``
        holds b, then a. A span starts from the state in its read slot (-1: zeros) and leaves its
        last one in its write slot. A result depends neither on other spans nor on how a sequence
        was cut into spans.
        """
        ...

    def gated_norm(
        self, x: Tensor, gate: Tensor, offset: int, weight: Tensor, eps: float
    ) -> Tensor:
        """RMS norm of each head (``weight`` ``[v_dim]``) of ``x`` ``[T, N]``, times
        ``silu(gate[:, offset : offset + N])``, in place.
        """
        ...

    def copy_states(
        self, layers: Sequence[StateSlots], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Copy slot ``sources[i]`` to ``targets[i]`` in every layer, in order."""
        ...

    def copy_pages(
        self, layers: Sequence[KvPages], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Copy page ``sources[i]`` to ``targets[i]`` in every layer, in order."""
        ...
