"""Mixers: how a layer looks at other tokens. Each says what it costs; nothing else multiplies.

``Mixer`` is the contract; a new kind of layer is one more class here or in a module beside it.
FLOPs count a multiply-add as two and leave out norms and activations (below 1 %).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from hullspeed.arch.dtypes import PER_TOKEN_HEAD, SCALE_BYTES, nbytes
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


def _kv_bytes(vectors: int, head_dim: int, dtype: str) -> int:
    """Keys or values of heads, each with its scale where the format has one."""
    if dtype in PER_TOKEN_HEAD:
        return nbytes(vectors * head_dim, PER_TOKEN_HEAD[dtype]) + vectors * SCALE_BYTES
    return nbytes(vectors * head_dim, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """Causal attention over the whole context with grouped keys and values.

    Attributes:
        rotary_dim: Dimensions of each head that are rotated (``head_dim`` unless partial).
        qk_norm: Per-head RMS norm of queries and keys (Qwen3, Gemma 3).
        output_gate: The query projection is twice as wide; its second half gates the output.
        sinks: One learned logit per query head that takes part in the softmax (gpt-oss).
        module: Name of the attention module in the checkpoint.
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
    module: str = "self_attn"

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """Weights of one layer."""
        q_width = self.q_heads * self.head_dim
        kv_width = self.kv_heads * self.head_dim
        q_rows = q_width * (2 if self.output_gate else 1)
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_width), ("v_proj", kv_width)):
            yield TensorSpec(f"{self.module}.{name}.weight", (rows, hidden), Role.LINEAR)
            if self.qkv_bias:
                yield TensorSpec(f"{self.module}.{name}.bias", (rows,), Role.BIAS)
        yield TensorSpec(f"{self.module}.o_proj.weight", (hidden, q_width), Role.LINEAR)
        if self.output_bias:
            yield TensorSpec(f"{self.module}.o_proj.bias", (hidden,), Role.BIAS)
        if self.qk_norm:
            yield TensorSpec(f"{self.module}.q_norm.weight", (self.head_dim,), Role.NORM)
            yield TensorSpec(f"{self.module}.k_norm.weight", (self.head_dim,), Role.NORM)
        if self.sinks:
            yield TensorSpec(f"{self.module}.sinks", (self.q_heads,), Role.VECTOR)

    def kv_bytes(self, context_tokens: int, dtype: str) -> int:
        """2 (K and V) x kv_heads x head_dim for each token, and scales if ``dtype`` has them."""
        return _kv_bytes(2 * self.kv_heads * context_tokens, self.head_dim, dtype)

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
        return _kv_bytes(2 * self.kv_heads * visible, self.head_dim, dtype)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Selective state space layer, second form (Nemotron-H, Bamba, Granite 4).

    State per sequence: ``[heads, head_dim, state_dim]`` plus ``conv_kernel - 1`` columns of the
    convolution's input. Source: ``NemotronHMamba2Mixer`` in transformers.

    Attributes:
        groups: Groups of heads that share B and C.
        module: Name of the mixer in the checkpoint.
    """

    kind: ClassVar[str] = "mamba2"

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_kernel: int
    conv_bias: bool = True
    projection_bias: bool = False
    module: str = "mamba"

    @property
    def inner(self) -> int:
        """Width of the layer inside."""
        return self.heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """Weights of one layer."""
        rows = self.inner + self.conv_dim + self.heads  # z, (x, B, C), dt
        for name, shape in (("in_proj", (rows, hidden)), ("out_proj", (hidden, self.inner))):
            yield TensorSpec(f"{self.module}.{name}.weight", shape, Role.LINEAR)
            if self.projection_bias:
                yield TensorSpec(f"{self.module}.{name}.bias", shape[:1], Role.BIAS)
        conv = (self.conv_dim, 1, self.conv_kernel)
        yield TensorSpec(f"{self.module}.conv1d.weight", conv, Role.CONV)
        if self.conv_bias:
            yield TensorSpec(f"{self.module}.conv1d.bias", (self.conv_dim,), Role.BIAS)
        for name in ("A_log", "D", "dt_bias"):
            yield TensorSpec(f"{self.module}.{name}", (self.heads,), Role.VECTOR)
        yield TensorSpec(f"{self.module}.norm.weight", (self.inner,), Role.NORM)

    def kv_bytes(self, context_tokens: int, dtype: str) -> int:
        """None: the past lives in the state."""
        return 0

    def state_bytes(self, state_dtype: str, conv_dtype: str, draft_tokens: int = 0) -> int:
        """State of heads x head_dim x state_dim plus conv_dim x (kernel - 1 + draft tokens)."""
        columns = self.conv_kernel - 1 + draft_tokens
        return nbytes(self.inner * self.state_dim, state_dtype) + nbytes(
            self.conv_dim * columns, conv_dtype
        )

    def flops(self, n_tokens: int, context_tokens: int) -> int:
        """Per token: decay, rank-one update and read-out (5 per state element), and the
        convolution; independent of the context.
        """
        return n_tokens * (5 * self.inner * self.state_dim + 2 * self.conv_dim * self.conv_kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, V3): one compressed vector per token and layer.

    Source: ``DeepseekV3Attention`` in transformers; the cache of the absorbed form as in the
    DeepSeek-V2 paper, section 2.1.

    Attributes:
        q_rank: Rank of the compressed queries; 0 where queries are projected at once.
        kv_rank: Width of the compressed keys and values.
        rotary_dim: Width of the one rotated key that all heads share.
        nope_dim: Width of a head's unrotated part.
        v_dim: Width of a head's values.
    """

    kind: ClassVar[str] = "latent_attention"

    q_heads: int
    q_rank: int
    kv_rank: int
    rotary_dim: int
    nope_dim: int
    v_dim: int
    bias: bool = False

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """Weights of one layer."""
        q_rows = self.q_heads * (self.nope_dim + self.rotary_dim)
        if self.q_rank:
            yield from self._down("q_a_proj", self.q_rank, hidden)
            yield TensorSpec("self_attn.q_a_layernorm.weight", (self.q_rank,), Role.NORM)
            yield TensorSpec("self_attn.q_b_proj.weight", (q_rows, self.q_rank), Role.LINEAR)
        else:
            yield TensorSpec("self_attn.q_proj.weight", (q_rows, hidden), Role.LINEAR)
        yield from self._down("kv_a_proj_with_mqa", self.kv_rank + self.rotary_dim, hidden)
        yield TensorSpec("self_attn.kv_a_layernorm.weight", (self.kv_rank,), Role.NORM)
        kv_rows = self.q_heads * (self.nope_dim + self.v_dim)
        yield TensorSpec("self_attn.kv_b_proj.weight", (kv_rows, self.kv_rank), Role.LINEAR)
        o_shape = (hidden, self.q_heads * self.v_dim)
        yield TensorSpec("self_attn.o_proj.weight", o_shape, Role.LINEAR)
        if self.bias:
            yield TensorSpec("self_attn.o_proj.bias", (hidden,), Role.BIAS)

    def _down(self, name: str, rows: int, hidden: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"self_attn.{name}.weight", (rows, hidden), Role.LINEAR)
        if self.bias:
            yield TensorSpec(f"self_attn.{name}.bias", (rows,), Role.BIAS)

    def kv_bytes(self, context_tokens: int, dtype: str) -> int:
        """kv_rank + rotary_dim for each token, whatever the number of heads."""
        return nbytes((self.kv_rank + self.rotary_dim) * context_tokens, dtype)

    def state_bytes(self, state_dtype: str, conv_dtype: str, draft_tokens: int = 0) -> int:
        """None."""
        return 0

    def flops(self, n_tokens: int, context_tokens: int) -> int:
        """The cheaper of two forms: heads attend to the compressed vectors (absorbed), or the
        context is first expanded to keys and values of every head.
        """
        pairs = n_tokens * context_tokens + n_tokens * (n_tokens + 1) // 2
        absorbed = 2 * self.q_heads * (2 * self.kv_rank + self.rotary_dim) * pairs
        expanded = 2 * self.q_heads * (self.nope_dim + self.rotary_dim + self.v_dim) * pairs
        expansion = 2 * self.kv_rank * self.q_heads * (self.nope_dim + self.v_dim) * context_tokens
        return min(absorbed, expanded + expansion)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMixer:
    """A layer that is only an MLP (Nemotron-H)."""

    kind: ClassVar[str] = "none"

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """None."""
        return iter(())

    def kv_bytes(self, context_tokens: int, dtype: str) -> int:
        """None."""
        return 0

    def state_bytes(self, state_dtype: str, conv_dtype: str, draft_tokens: int = 0) -> int:
        """None."""
        return 0

    def flops(self, n_tokens: int, context_tokens: int) -> int:
        """None."""
        return 0
