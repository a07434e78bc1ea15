"""Kernels: what a back end computes. The decoder is written against this and nothing else.

Shapes: T tokens of a step, S spans, H hidden, D head_dim, G key/value heads, Q query heads,
P page_tokens. Activations are float32 ``[T, ...]`` on the back end's device. Query heads that share
key/value head g are ``g * Q // G ..``, as in the checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from hullspeed.kernels.batch import Batch


@dataclass(frozen=True, slots=True)
class KvPages:
    """The keys and values of one layer, page by page, float32.

    Keys lie transposed so that 64 scores of a query are one run over contiguous keys.

    Attributes:
        keys: ``[n_pages, G, D, P]``.
        values: ``[n_pages, G, P, D]``.
    """

    keys: Tensor
    values: Tensor

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[3]


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
    """Heads of a layer. ``window_tokens`` 0 sees the whole context."""

    q_heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int = 0

    @property
    def scale(self) -> float:
        """1 / sqrt(D)."""
        return float(self.head_dim**-0.5)


class Linear(Protocol):
    """A packed ``x @ weight.T + bias``."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in]`` to ``[T, out]``."""
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

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack ``weight`` ``[out, in]`` (float32) and ``bias`` ``[out]`` for use."""
        ...

    def table(self, weight: Tensor) -> Tensor:
        """Hold an embedding ``[vocab, H]`` (float32) as :meth:`embed` takes it."""
        ...

    def allocate_kv(self, shape: AttentionShape, n_pages: int, page_tokens: int) -> KvPages:
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
        """Split ``qkv`` ``[T, (Q + 2G) * D]`` (queries, keys, values), norm and rotate queries and
        keys, write keys and values to their pages. Returns the queries ``[T, Q, D]``.
        """
        ...

    def attend(self, q: Tensor, plan: P, shape: AttentionShape, kv: KvPages) -> Tensor:
        """Each query over keys ``0 ..`` its own position of its span's pages: ``[T, Q * D]``."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``[T, 2I]`` (gate first): ``[T, I]``."""
        ...

    def copy_pages(
        self, layers: Sequence[KvPages], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Copy page ``sources[i]`` to ``targets[i]`` in every layer, in order."""
        ...
