"""The gated delta rule in plain torch, token by token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hullspeed.kernels.base import DeltaGates, DeltaShape, StateSlots
from hullspeed.kernels.batch import Batch

_NORM_EPS = 1e-6


def convolve(x: Tensor, batch: Batch, weight: Tensor, states: StateSlots) -> Tensor:
    """Causal convolution over each span; see :class:`hullspeed.kernels.base.Kernels`."""
    taps, channels = weight.shape
    out = torch.empty(len(x), channels)
    for rows, read, write in _spans(batch):
        before = states.inputs[read] if read >= 0 else torch.zeros_like(states.inputs[0])
        inputs = torch.cat([before, x[rows, :channels]])
        n = rows.stop - rows.start
        mixed = sum(inputs[j : j + n] * weight[j] for j in range(taps))
        out[rows] = F.silu(torch.as_tensor(mixed))
        states.inputs[write] = inputs[n:]
    return out


def scan(
    qkv: Tensor,
    ba: Tensor,
    batch: Batch,
    shape: DeltaShape,
    gates: DeltaGates,
    states: StateSlots,
) -> Tensor:
    """Yang et al., arXiv 2412.06464, eq. 10; see :class:`hullspeed.kernels.base.Kernels`."""
    width = shape.k_heads * shape.k_dim
    q, k, v = torch.split(qkv, [width, width, shape.v_heads * shape.v_dim], dim=1)
    group = shape.v_heads // shape.k_heads
    q = _normed(q, shape).repeat_interleave(group, 1) * shape.k_dim**-0.5
    k = _normed(k, shape).repeat_interleave(group, 1)
    v = v.reshape(-1, shape.v_heads, shape.v_dim)
    b, a = ba.chunk(2, dim=1)
    beta = b.sigmoid()[..., None]
    decay = torch.exp(-gates.rate * F.softplus(a + gates.bias))[..., None, None]
    out = torch.empty_like(v)
    for rows, read, write in _spans(batch):
        states.recurrent[write] = states.recurrent[read] if read >= 0 else 0
        state = states.recurrent[write]
        for t in range(rows.start, rows.stop):
            state *= decay[t]
            change = beta[t] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state += k[t][:, :, None] * change[:, None]
            out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out.flatten(1)


def _normed(x: Tensor, shape: DeltaShape) -> Tensor:
    heads = x.reshape(-1, shape.k_heads, shape.k_dim)
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPS)


def _spans(batch: Batch) -> list[tuple[slice, int, int]]:
    """Rows, slot to read and slot to write of each span."""
    starts = batch.span_starts.tolist()
    slots = zip(batch.read_slots.tolist(), batch.write_slots.tolist(), strict=True)
    return [(slice(*starts[i : i + 2]), read, write) for i, (read, write) in enumerate(slots)]
