"""RefKernels: the contract in plain torch, written to be read. Slow; the other back ends are
tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hullspeed.kernels import ref_delta
from hullspeed.kernels.base import (
    SWIGLU_ALPHA,
    Activation,
    AttentionShape,
    DeltaGates,
    DeltaShape,
    Experts,
    HeadNorms,
    KvDtype,
    KvPages,
    Linear,
    RotaryTable,
    StateSlots,
)
from hullspeed.kernels.batch import Batch
from hullspeed.kernels.blocks import BlockWeight
from hullspeed.kernels.expert_loop import ExpertLoop
from hullspeed.kernels.kv_codes import LARGEST_CODE, decode, encode, torch_dtype


@dataclass(frozen=True, slots=True)
class RefPlan:
    """The batch and its tensors."""

    batch: Batch
    tokens: Tensor
    positions: Tensor
    logits_rows: Tensor


class RefKernels:
    """Plain torch on the CPU, float32 throughout."""

    name: ClassVar[str] = "ref"
    device = torch.device("cpu")
    threads = 1
    takes_blocks = False

    def linear(self, weight: Tensor | BlockWeight, bias: Tensor | None = None) -> Linear:
        """The weight as it is, codes as the numbers that they stand for."""
        if isinstance(weight, BlockWeight):
            weight = torch.from_numpy(weight.dequantize())
        return lambda x: F.linear(x, weight, bias)

    def table(self, weight: Tensor) -> Tensor:
        """The weight as it is."""
        return weight

    def allocate_kv(
        self, shape: AttentionShape, n_pages: int, page_tokens: int, dtype: KvDtype = "fp32"
    ) -> KvPages:
        """Zeros."""
        g, d, kind = shape.kv_heads, shape.head_dim, torch_dtype(dtype)
        keys = torch.zeros(n_pages, g, d, page_tokens, dtype=kind)
        values = torch.zeros(n_pages, g, page_tokens, d, dtype=kind)
        if kind not in LARGEST_CODE:
            return KvPages(keys, values)
        scales = (torch.zeros(n_pages, g, page_tokens) for _ in range(2))
        return KvPages(keys, values, *scales)

    def plan(self, batch: Batch) -> RefPlan:
        """Tensors of the batch."""
        return RefPlan(
            batch,
            torch.from_numpy(batch.tokens),
            torch.from_numpy(batch.positions).long(),
            torch.from_numpy(batch.logits_rows),
        )

    def embed(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Look the rows up."""
        return F.embedding(tokens, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        if delta is not None:
            x += delta
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotate_and_store(
        self,
        qkv: Tensor,
        plan: RefPlan,
        shape: AttentionShape,
        rotary: RotaryTable,
        norms: HeadNorms | None,
        kv: KvPages,
    ) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        width = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
        heads = qkv[:, :width].reshape(len(qkv), -1, shape.head_dim)
        q, k, v = torch.split(heads, [shape.q_heads, shape.kv_heads, shape.kv_heads], dim=1)
        if norms is not None:
            q = F.rms_norm(q, (shape.head_dim,), norms.q_weight, norms.eps)
            k = F.rms_norm(k, (shape.head_dim,), norms.k_weight, norms.eps)
        q = _rotate(q, plan.positions, rotary)
        k = _rotate(k, plan.positions, rotary)
        starts = plan.batch.span_starts
        for s in range(len(starts) - 1):
            rows = slice(int(starts[s]), int(starts[s + 1]))
            at = plan.positions[rows]
            table = plan.batch.table_of(shape.window_tokens)
            page = torch.from_numpy(table[s]).long()[at // kv.page_tokens]
            _store(kv, page, at % kv.page_tokens, k[rows], v[rows])
        return q.contiguous()

    def attend(
        self,
        q: Tensor,
        plan: RefPlan,
        shape: AttentionShape,
        kv: KvPages,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        out = torch.empty_like(q)
        starts = plan.batch.span_starts
        for s in range(len(starts) - 1):
            rows = slice(int(starts[s]), int(starts[s + 1]))
            at = plan.positions[rows]
            end, window = int(at[-1]) + 1, shape.window_tokens
            first = max(0, int(at[0]) - window + 1) // kv.page_tokens if window else 0
            begin = first * kv.page_tokens
            table = plan.batch.table_of(window)[s, first : -(-end // kv.page_tokens)]
            k, v = _load(kv, torch.from_numpy(table).long())
            k, v = k[:, : end - begin], v[:, : end - begin]
            keys = torch.arange(begin, end)[None]
            seen = keys <= at[:, None]
            if window:
                seen &= keys > at[:, None] - window
            group = shape.q_heads // shape.kv_heads
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            scores = q[rows].transpose(0, 1) @ k.mT * shape.scale
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                extra = sinks[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, extra], dim=-1)
            weights = scores.softmax(-1)[..., : end - begin]
            out[rows] = (weights @ v).transpose(0, 1)
        return out.flatten(1)

    def sigmoid_mul(self, x: Tensor, gate: Tensor, offset: int) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        x *= gate[:, offset : offset + x.shape[1]].sigmoid()
        return x

    def activate(self, gate_up: Tensor, activation: Activation, limit: float = 0.0) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate) * up
        if activation == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * (SWIGLU_ALPHA * gate).sigmoid() * (up + 1)

    def experts(
        self, gate_up: Sequence[Linear], down: Sequence[Linear], activation: Activation,
        limit: float = 0.0,
    ) -> Experts:  # fmt: skip
        """One after the other."""
        return ExpertLoop(gate_up, down, lambda x: self.activate(x, activation, limit))

    def allocate_states(self, shape: DeltaShape, n_slots: int) -> StateSlots:
        """Zeros."""
        recurrent = torch.zeros(n_slots, shape.v_heads, shape.k_dim, shape.v_dim)
        return StateSlots(recurrent, torch.zeros(n_slots, shape.taps - 1, shape.channels))

    def convolve(self, x: Tensor, plan: RefPlan, weight: Tensor, states: StateSlots) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        return ref_delta.convolve(x, plan.batch, weight, states)

    def delta_scan(
        self,
        qkv: Tensor,
        ba: Tensor,
        plan: RefPlan,
        shape: DeltaShape,
        gates: DeltaGates,
        states: StateSlots,
    ) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        return ref_delta.scan(qkv, ba, plan.batch, shape, gates, states)

    def gated_norm(
        self, x: Tensor, gate: Tensor, offset: int, weight: Tensor, eps: float
    ) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        heads = x.view(len(x), -1, len(weight))
        normed = F.rms_norm(heads, weight.shape, weight, eps).flatten(1)
        x.copy_(normed * F.silu(gate[:, offset : offset + x.shape[1]]))
        return x

    def copy_states(
        self, layers: Sequence[StateSlots], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        for layer in layers:
            for source, target in zip(sources, targets, strict=True):
                layer.recurrent[target] = layer.recurrent[source]
                layer.inputs[target] = layer.inputs[source]

    def copy_pages(
        self, layers: Sequence[KvPages], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        for layer in layers:
            for pool in layer.pools:
                for source, target in zip(sources, targets, strict=True):
                    pool[target] = pool[source]


def _store(kv: KvPages, page: Tensor, offset: Tensor, k: Tensor, v: Tensor) -> None:
    """Keys and values ``[n, G, D]`` to the slots ``(page[i], offset[i])``."""
    codes, scales = encode(k, kv.keys.dtype)
    kv.keys[page, :, :, offset] = codes
    if kv.key_scales is not None and scales is not None:
        kv.key_scales[page, :, offset] = scales
    codes, scales = encode(v, kv.values.dtype)
    kv.values[page, :, offset] = codes
    if kv.value_scales is not None and scales is not None:
        kv.value_scales[page, :, offset] = scales


def _load(kv: KvPages, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of ``pages`` in order: float32 ``[G, len(pages) * P, D]``."""
    key_scales, value_scales = (
        None if scales is None else scales[pages] for scales in (kv.key_scales, kv.value_scales)
    )
    k = decode(kv.keys[pages].mT, key_scales)
    v = decode(kv.values[pages], value_scales)
    return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)


def _rotate(x: Tensor, positions: Tensor, rotary: RotaryTable) -> Tensor:
    half = rotary.cos.shape[1]
    cos, sin = rotary.cos[positions][:, None], rotary.sin[positions][:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
