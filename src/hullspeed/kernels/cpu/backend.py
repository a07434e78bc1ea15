"""CpuKernels: the contract on this machine's CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hullspeed.errors import UsageError
from hullspeed.kernels.base import (
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
from hullspeed.kernels.cpu import attention, delta, gates, pointwise
from hullspeed.kernels.cpu.formats import LANES, STAND_INS
from hullspeed.kernels.cpu.int_linear import BlockLinear, fits
from hullspeed.kernels.cpu.int_tile import has_vnni
from hullspeed.kernels.cpu.jit import config
from hullspeed.kernels.cpu.linear import Fp16Linear, Fp32Linear
from hullspeed.kernels.expert_loop import ExpertLoop
from hullspeed.kernels.kv_codes import LARGEST_CODE, torch_dtype

# Waking a second thread costs about 10 us; below these sizes one thread is done sooner.
_PARALLEL_ROWS = 32
_PARALLEL_KEYS = 512
_PARALLEL_STATE = 200_000

_NONE = np.empty(0, np.float32)
_NO_SCALES = np.empty((0, 0, 0), np.float32)


@dataclass(slots=True)
class CpuPlan:
    """A batch, where its tokens go, and its attention items by kind of layer.

    Attributes:
        slots: int64 ``[T]`` by page table: page * page_tokens + offset; filled by the first layer
            that has the table.
        items: items and buckets of :func:`attention.plan_items` by attention shape.
        threads: For attention: 1 if the work is too small to share.
    """

    batch: Batch
    tokens: Tensor
    logits_rows: Tensor
    threads: int
    slots: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    items: dict[AttentionShape, tuple[NDArray[np.int32], NDArray[np.int32]]] = field(
        default_factory=dict
    )

    def slots_for(self, page_tokens: int, window_tokens: int) -> NDArray[np.int64]:
        """Slots of the tokens in layers with this window."""
        batch = self.batch
        table = batch.table_of(window_tokens)
        if id(table) not in self.slots:
            slots = self.slots[id(table)] = np.empty(len(batch.tokens), np.int64)
            attention.plan_tokens(batch.span_starts, batch.positions, table, page_tokens, slots)
        return self.slots[id(table)]

    def items_for(self, shape: AttentionShape) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Items of the batch for layers of one shape, shared out to the threads."""
        if shape not in self.items:
            group = shape.q_heads // shape.kv_heads
            self.items[shape] = attention.plan_items(
                self.batch.span_starts,
                self.batch.positions,
                shape.kv_heads,
                max(1, attention.BLOCK_ROWS // group),
                shape.window_tokens,
                self.threads,
            )
        return self.items[shape]


class CpuKernels:
    """FBGEMM (or MKL) and numba.

    Args:
        weight_dtype: ``"native"`` (a checkpoint's own codes of 4 or 8 bits, where it has them and
            the processor AVX-512 VNNI; the rest in fp16), ``"fp16"`` or ``"fp32"``.
        threads: Compute threads, of torch and numba alike, for the calling process.
    """

    name: ClassVar[str] = "cpu"
    device = torch.device("cpu")

    def __init__(self, *, weight_dtype: str = "native", threads: int = 1) -> None:
        self._half = weight_dtype != "fp32"
        self.takes_blocks = weight_dtype == "native" and has_vnni()
        self.threads = min(threads, config.NUMBA_NUM_THREADS)
        torch.set_num_threads(self.threads)

    def linear(self, weight: Tensor | BlockWeight, bias: Tensor | None = None) -> Linear:
        """Packed as codes or for FBGEMM, or kept in float32."""
        if isinstance(weight, BlockWeight):
            if self.takes_blocks and fits(weight):
                return BlockLinear(weight, bias, self.threads)
            weight = torch.from_numpy(weight.dequantize())
        if self._half:
            return Fp16Linear(weight, bias)
        return Fp32Linear(weight, bias, self.threads)

    def table(self, weight: Tensor) -> Tensor:
        """In the type of the weights."""
        return weight.half() if self._half else weight

    def allocate_kv(
        self, shape: AttentionShape, n_pages: int, page_tokens: int, dtype: KvDtype = "fp32"
    ) -> KvPages:
        """Zeros that the system hands out page by page as they are written."""
        g, d, kind = shape.kv_heads, shape.head_dim, torch_dtype(dtype)
        if d % LANES or page_tokens % LANES or page_tokens < LANES:
            raise UsageError(
                f"head dimension and tokens of a page must each be a multiple of {LANES}",
                seen=(d, page_tokens),
                fix="use pages of 64 tokens",
            )
        keys = _zeros((n_pages, g, d, page_tokens), kind)
        values = _zeros((n_pages, g, page_tokens, d), kind)
        if kind not in LARGEST_CODE:
            return KvPages(keys, values)
        scales = (_zeros((n_pages, g, page_tokens), torch.float32) for _ in range(2))
        return KvPages(keys, values, *scales)

    def plan(self, batch: Batch) -> CpuPlan:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        # numba keeps its number of threads per calling thread.
        if self.threads > 1:
            numba.set_num_threads(self.threads)
        worth = int(batch.positions.sum()) + len(batch.tokens) >= _PARALLEL_KEYS
        return CpuPlan(
            batch,
            torch.from_numpy(batch.tokens),
            torch.from_numpy(batch.logits_rows),
            self.threads if worth else 1,
        )

    def embed(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Rows as float32."""
        return F.embedding(tokens, table).float()

    def _parts(self, rows: int) -> int:
        return self.threads if rows >= _PARALLEL_ROWS else 1

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        out = torch.empty_like(x)
        n = x.shape[0]
        a, w, o, e = x.numpy(), weight.numpy(), out.numpy(), np.float32(eps)
        parts = self._parts(n)
        if delta is None:
            if parts > 1:
                pointwise.rms_norm_parallel(a, w, e, o, parts)
            else:
                pointwise.rms_norm(a, w, e, o, 0, n)
        elif parts > 1:
            pointwise.add_rms_norm_parallel(a, delta.numpy(), w, e, o, parts)
        else:
            pointwise.add_rms_norm(a, delta.numpy(), w, e, o, 0, n)
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        plan: CpuPlan,
        shape: AttentionShape,
        rotary: RotaryTable,
        norms: HeadNorms | None,
        kv: KvPages,
    ) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        n = qkv.shape[0]
        q = torch.empty(n, shape.q_heads, shape.head_dim)
        args = (
            qkv.numpy(), q.numpy(), *_pools(kv),
            plan.batch.positions, plan.slots_for(kv.page_tokens, shape.window_tokens),
            rotary.cos.numpy(), rotary.sin.numpy(),
            norms.q_weight.numpy() if norms else _NONE,
            norms.k_weight.numpy() if norms else _NONE,
            np.float32(norms.eps if norms else 0),
        )  # fmt: skip
        parts = self._parts(n)
        if parts > 1:
            pointwise.rotate_and_store_parallel(*args, parts)
        else:
            pointwise.rotate_and_store(*args, 0, n)
        return q

    def attend(
        self,
        q: Tensor,
        plan: CpuPlan,
        shape: AttentionShape,
        kv: KvPages,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        out = torch.empty(q.shape[0], shape.q_heads * shape.head_dim)
        items, buckets = plan.items_for(shape)
        batch = plan.batch
        args = (
            q.numpy(), out.view(q.shape).numpy(), *_pools(kv),
            batch.positions, batch.table_of(shape.window_tokens), items,
        )  # fmt: skip
        scale, window = np.float32(shape.scale), shape.window_tokens
        extra = _NONE if sinks is None else sinks.numpy()
        if len(buckets) > 2:
            attention.attend_parallel(*args, buckets, scale, window, extra)
        else:
            attention.attend(*args, 0, len(items), scale, window, extra)
        return out

    def sigmoid_mul(self, x: Tensor, gate: Tensor, offset: int) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        gates.sigmoid_mul(x.numpy(), gate.numpy(), offset)
        return x

    def activate(self, gate_up: Tensor, activation: Activation, limit: float = 0.0) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        n = gate_up.shape[0]
        out = torch.empty(n, gate_up.shape[1] // 2)
        parts = self._parts(n)
        if activation == "gelu_tanh":
            gates.gelu_mul(gate_up.numpy(), out.numpy())
        elif activation == "clamped_swiglu":
            gates.clamped_swiglu(gate_up.numpy(), out.numpy(), np.float32(limit))
        elif parts > 1:
            pointwise.silu_mul_parallel(gate_up.numpy(), out.numpy(), parts)
        else:
            pointwise.silu_mul(gate_up.numpy(), out.numpy(), 0, n)
        return out

    def experts(
        self, gate_up: Sequence[Linear], down: Sequence[Linear], activation: Activation,
        limit: float = 0.0,
    ) -> Experts:  # fmt: skip
        """One after the other, each on the tokens that chose it."""
        return ExpertLoop(gate_up, down, lambda x: self.activate(x, activation, limit))

    def allocate_states(self, shape: DeltaShape, n_slots: int) -> StateSlots:
        """Zeros that the system hands out as slots are written."""
        if shape.v_dim % LANES:
            raise UsageError(
                f"the width of a value head must be a multiple of {LANES}",
                seen=shape.v_dim,
                fix='use kernels="ref"',
            )
        recurrent = np.zeros((n_slots, shape.v_heads, shape.k_dim, shape.v_dim), np.float32)
        inputs = np.zeros((n_slots, shape.taps - 1, shape.channels), np.float32)
        return StateSlots(torch.from_numpy(recurrent), torch.from_numpy(inputs))

    def convolve(self, x: Tensor, plan: CpuPlan, weight: Tensor, states: StateSlots) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        out = torch.empty(x.shape[0], weight.shape[1])
        batch = plan.batch
        args = (
            x.numpy(), weight.numpy(), batch.span_starts, batch.read_slots, batch.write_slots,
            states.inputs.numpy(), out.numpy(),
        )  # fmt: skip
        if self._parts(x.shape[0]) > 1:
            delta.convolve_parallel(*args, self.threads)
        else:
            delta.convolve(*args, 0, weight.shape[1])
        return out

    def delta_scan(
        self,
        qkv: Tensor,
        ba: Tensor,
        plan: CpuPlan,
        shape: DeltaShape,
        gates: DeltaGates,
        states: StateSlots,
    ) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        n = qkv.shape[0]
        out = torch.empty(n, shape.v_heads * shape.v_dim)
        decay, beta = np.empty((2, n, shape.v_heads), np.float32)
        x, batch = qkv.numpy(), plan.batch
        gating = (
            x, ba.numpy(), gates.rate.numpy(), gates.bias.numpy(), shape.k_heads, shape.k_dim,
            decay, beta,
        )  # fmt: skip
        scanning = (
            x, decay, beta, batch.span_starts, batch.read_slots, batch.write_slots,
            states.recurrent.numpy(), shape.k_heads, out.numpy(),
        )  # fmt: skip
        if self._parts(n) > 1:
            delta.prepare_parallel(*gating, self.threads)
        else:
            delta.prepare(*gating, 0, n)
        # A head's state is worth a thread even for one token.
        if self.threads > 1 and n * shape.v_heads * shape.k_dim * shape.v_dim >= _PARALLEL_STATE:
            delta.scan_parallel(*scanning, self.threads)
        else:
            delta.scan(*scanning, 0, shape.v_heads)
        return out

    def gated_norm(
        self, x: Tensor, gate: Tensor, offset: int, weight: Tensor, eps: float
    ) -> Tensor:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        gates.gated_norm(x.numpy(), gate.numpy(), offset, weight.numpy(), np.float32(eps))
        return x

    def copy_states(
        self, layers: Sequence[StateSlots], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        for layer in layers:
            for pool in (layer.recurrent.numpy(), layer.inputs.numpy()):
                for source, target in zip(sources, targets, strict=True):
                    pool[target] = pool[source]

    def copy_pages(
        self, layers: Sequence[KvPages], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """See :class:`hullspeed.kernels.base.Kernels`."""
        for layer in layers:
            for pool in map(_codes, layer.pools):
                for source, target in zip(sources, targets, strict=True):
                    pool[target] = pool[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of NumPy's, which the system hands out page by page as they are written."""
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    bytes_each = torch.empty(0, dtype=dtype).element_size()
    flat = torch.from_numpy(np.zeros(math.prod(shape) * bytes_each, np.uint8))
    return flat.view(dtype).view(shape)


def _codes(pool: Tensor) -> NDArray[Any]:
    """A pool as kernels see it."""
    stand_in = STAND_INS[pool.dtype]
    return (pool if pool.dtype == stand_in else pool.view(stand_in)).numpy()


def _pools(kv: KvPages) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Keys, values, and the scales of both, empty if there are none."""
    keys, values = _codes(kv.keys), _codes(kv.values)
    if kv.key_scales is None or kv.value_scales is None:
        return keys, values, _NO_SCALES, _NO_SCALES
    return keys, values, kv.key_scales.numpy(), kv.value_scales.numpy()
