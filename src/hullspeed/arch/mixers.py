"""Mixers: how a layer looks at other tokens. Each says what it costs; nothing else multiplies.

``Mixer`` is the contract; a new kind of layer is one more class here or in a module beside it.
FLOPs count a multiply-add as two and leave out norms and activations (below 1 %).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from hullspeed.arch.dtypes import nbytes
from hullspeed.arch.tensors import Role, TensorSpec


class Mixer(Protocol):
    """What every kind of token mixer can say about itself."""

    kind: ClassVar[str]

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """The weights of one layer, named as in the Hugging Face checkpoint, below the layer."""
        ...

    def kv_bytes(self, context_tokens: int, dtype: str) -> int:
        """Bytes of keys and values that ``context_tokens`` tokens leave in one layer."""
        ...

    def state_bytes(self, state_dtype: str, conv_dtype: str, draft_tokens: int = 0) -> int:
        """Bytes of recurrent state that one sequence keeps in one layer, at any length.

        ``draft_tokens`` speculative tokens widen a convolution's history by as many columns.
        """
        ...

    def flops(self, n_tokens: int, context_tokens: int) -> int:
        """FLOPs beyond the weights' own (2 per parameter and token) for ``n_tokens`` new tokens
        that follow ``context_tokens`` earlier ones.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """Causal attention over the whole context with grouped keys and values.

    Attributes:
        rotary_dim: Dimensions of each head that are rotated (``head_dim`` unless partial).
        qk_norm: Per-head RMS norm of queries and keys (Qwen3, Gemma 3).
        output_gate: The query projection is twice as wide; its second half gates the output.
    """

    kind: ClassVar[str] = "full_attention"

    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    sinks: bool = False

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """Weights of one layer."""
        q_width = self.q_heads * self.head_dim
        kv_width = self.kv_heads * self.head_dim
        q_rows = q_width * (2 if self.output_gate else 1)
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_width), ("v_proj", kv_width)):
            yield TensorSpec(f"self_attn.{name}.weight", (rows, hidden), Role.LINEAR)
            if self.qkv_bias:
                yield TensorSpec(f"self_attn.{name}.bias", (rows,), Role.BIAS)
        yield TensorSpec("self_attn.o_proj.weight", (hidden, q_width), Role.LINEAR)
        if self.output_bias:
            yield TensorSpec("self_attn.o_proj.bias", (hidden,), Role.BIAS)
        if self.qk_norm:
            yield TensorSpec("self_attn.q_norm.weight", (self.head_dim,), Role.NORM)
            yield TensorSpec("self_attn.k_norm.weight", (self.head_dim,), Role.NORM)
        if self.sinks:
            yield TensorSpec("self_attn.sinks", (self.q_heads,), Role.VECTOR)

    def kv_bytes(self, context_tokens: int, dtype: str) -> int:
        """2 (K and V) x kv_heads x head_dim for each token."""
        return nbytes(2 * self.kv_heads * self.head_dim * context_tokens, dtype)

    def state_bytes(self, state_dtype: str, conv_dtype: str, draft_tokens: int = 0) -> int:
        """None."""
        return 0

    def flops(self, n_tokens: int, context_tokens: int) -> int:
        """QK^T and PV: 4 x head_dim for each query head and each (query, visible key) pair."""
        pairs = n_tokens * context_tokens + n_tokens * (n_tokens + 1) // 2
        return 4 * self.q_heads * self.head_dim * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingAttention(FullAttention):
    """Causal attention over the last ``window_tokens`` tokens, the current one included."""

    kind: ClassVar[str] = "sliding_attention"

    window_tokens: int

    def kv_bytes(self, context_tokens: int, dtype: str) -> int:
        """As full attention, but never more than one window."""
        visible = min(context_tokens, self.window_tokens)
        return nbytes(2 * self.kv_heads * self.head_dim * visible, dtype)

    def flops(self, n_tokens: int, context_tokens: int) -> int:
        """As full attention with each query's visible keys cut at the window."""
        window = self.window_tokens
        # Queries before the window is full see a growing prefix; the rest see exactly one window.
        growing = max(0, min(n_tokens, window - context_tokens))
        pairs = growing * context_tokens + growing * (growing + 1) // 2
        pairs += (n_tokens - growing) * window
        return 4 * self.q_heads * self.head_dim * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """Linear attention with the gated delta rule (Qwen3-Next, Qwen3.5 and later).

    State per sequence: ``[v_heads, k_dim, v_dim]`` plus ``conv_kernel - 1`` columns of the
    convolution's input. Source: Qwen3-Next / Qwen3.5 modelling code in transformers.

    Attributes:
        fused_projections: Qwen3-Next stores ``in_proj_qkvz`` and ``in_proj_ba``; Qwen3.5 stores
            ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and ``in_proj_a``.
    """

    kind: ClassVar[str] = "gated_delta_net"

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int
    fused_projections: bool = False

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """Weights of one layer."""
        v_width = self.v_heads * self.v_dim
        if self.fused_projections:
            width = self.conv_dim + v_width
            yield TensorSpec("linear_attn.in_proj_qkvz.weight", (width, hidden), Role.LINEAR)
            yield TensorSpec("linear_attn.in_proj_ba.weight", (2 * self.v_heads, hidden), Role.GATE)
        else:
            yield TensorSpec("linear_attn.in_proj_qkv.weight", (self.conv_dim, hidden), Role.LINEAR)
            yield TensorSpec("linear_attn.in_proj_z.weight", (v_width, hidden), Role.LINEAR)
            yield TensorSpec("linear_attn.in_proj_b.weight", (self.v_heads, hidden), Role.GATE)
            yield TensorSpec("linear_attn.in_proj_a.weight", (self.v_heads, hidden), Role.GATE)
        yield TensorSpec(
            "linear_attn.conv1d.weight", (self.conv_dim, 1, self.conv_kernel), Role.CONV
        )
        yield TensorSpec("linear_attn.A_log", (self.v_heads,), Role.VECTOR)
        yield TensorSpec("linear_attn.dt_bias", (self.v_heads,), Role.VECTOR)
        yield TensorSpec("linear_attn.norm.weight", (self.v_dim,), Role.NORM)
        yield TensorSpec("linear_attn.out_proj.weight", (hidden, v_width), Role.LINEAR)

    def kv_bytes(self, context_tokens: int, dtype: str) -> int:
        """None: the past lives in the state."""
        return 0

    def state_bytes(self, state_dtype: str, conv_dtype: str, draft_tokens: int = 0) -> int:
        """v_heads x v_dim x k_dim plus conv_dim x (kernel - 1 + draft tokens)."""
        recurrent = nbytes(self.v_heads * self.v_dim * self.k_dim, state_dtype)
        columns = self.conv_kernel - 1 + draft_tokens
        return recurrent + nbytes(self.conv_dim * columns, conv_dtype)

    def flops(self, n_tokens: int, context_tokens: int) -> int:
        """Per token and value head: decay, S^T k, rank-one update, S^T q (7 per state element),
        and the convolution; independent of the context.
        """
        recurrent = 7 * self.v_heads * self.k_dim * self.v_dim
        return n_tokens * (recurrent + 2 * self.conv_dim * self.conv_kernel)
