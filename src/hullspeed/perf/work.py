"""Work: the FLOPs and bytes of one step of a model, asked of its layer kinds once and kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hullspeed.arch.mixers import Mixer
from hullspeed.arch.mlps import Mlp, MoeMlp
from hullspeed.arch.model import ModelArch
from hullspeed.arch.tensors import Role

_MULTIPLIED = (Role.LINEAR, Role.GATE)


class Shape(NamedTuple):
    """One sequence's part of a step: ``n_tokens`` new tokens after ``context_tokens``.

    Attributes:
        sample: Its last position goes through the output head.
        shared_tokens: How much of its context the step reads for another sequence anyway.
    """

    n_tokens: int
    context_tokens: int
    sample: bool = True
    shared_tokens: int = 0


class StepSeconds(Protocol):
    """Seconds that a step takes."""

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Seconds of one step that computes all of ``shapes`` together."""
        ...


class _Mlps(NamedTuple):
    mlp: Mlp
    layers: int
    token_params: int
    expert_params: int


class _Mixers(NamedTuple):
    mixer: Mixer
    layers: int
    kv_slope: float  # bytes of a token where every token is kept, 0 where memory is bounded


class Work:
    """FLOPs and bytes of steps of ``arch``.

    Args:
        weight_bytes: Of the decoder as loaded (embedding, layers, head), all ranks together;
            2 bytes a parameter unless given.
        kv_dtype: Of the KV cache.
        state_dtype: Of the recurrent state.
    """

    def __init__(
        self,
        arch: ModelArch,
        *,
        weight_bytes: int | None = None,
        kv_dtype: str = "bf16",
        state_dtype: str = "fp32",
    ) -> None:
        self.arch = arch
        self.kv_dtype = kv_dtype
        self.n_layers = len(arch.layers)
        self.head_params = arch.vocab * arch.hidden
        self._mixers = _group_mixers(arch, kv_dtype)
        self._mlps = _group_mlps(arch)
        self.mixer_params = sum(
            count * _multiplied(mixer, arch.hidden) for mixer, count, _ in self._mixers
        )
        self.state_bytes = arch.state_bytes(state_dtype, arch.dtype)
        expert_params = sum(group.layers * group.expert_params for group in self._mlps)
        dense = sum(g.layers * g.token_params for g in self._mlps if not g.expert_params) + sum(
            g.layers * _shared(g, arch.hidden) for g in self._mlps if g.expert_params
        )
        self.body_params = self.mixer_params + dense + expert_params
        self._expert_token_params = sum(
            g.layers * g.expert_params * g.mlp.experts_per_token / g.mlp.experts
            for g in self._mlps
            if isinstance(g.mlp, MoeMlp)
        )
        self.last_mlp_params = arch.layers[-1].mlp.params_per_token(arch.hidden)
        self.bytes_per_param = self._bytes_per_param(weight_bytes)

    def _bytes_per_param(self, weight_bytes: int | None) -> float:
        """Of the layers' weights: what the total leaves after 16-bit embedding and head."""
        if weight_bytes is None:
            return 2.0
        tables = self.head_params * (1 if self.arch.tied_embeddings else 2)
        if weight_bytes <= 2 * tables:  # the tables are quantized as well
            return weight_bytes / (self.body_params + tables)
        return (weight_bytes - 2 * tables) / self.body_params

    def body_flops(self, n_tokens: int) -> float:
        """2 FLOPs for each parameter of the layers that multiplies a token."""
        mlps = sum(group.layers * group.token_params for group in self._mlps)
        return 2.0 * n_tokens * (self.mixer_params + mlps)

    def body_bytes(self, n_tokens: int) -> float:
        """Bytes of layer weights that a step of ``n_tokens`` reads: all dense ones, and those
        experts that at least one token is routed to.
        """
        experts = sum(
            g.layers * g.expert_params * (1.0 - g.mlp.active_share(n_tokens))
            for g in self._mlps
            if g.expert_params
        )
        return (self.body_params - experts) * self.bytes_per_param

    def expert_bytes(self, n_tokens: int) -> float:
        """Of :meth:`body_bytes`, those of routed experts."""
        return self.bytes_per_param * sum(
            g.layers * g.expert_params * g.mlp.active_share(n_tokens) for g in self._mlps
        )

    def expert_flops(self, n_tokens: int) -> float:
        """Of :meth:`body_flops`, those of routed experts."""
        return 2.0 * n_tokens * self._expert_token_params

    def attention_flops(self, shape: Shape) -> float:
        """FLOPs of all mixers for one sequence's part."""
        return float(
            sum(
                g.layers * g.mixer.flops(shape.n_tokens, shape.context_tokens) for g in self._mixers
            )
        )

    def kv_bytes(self, context_tokens: int) -> float:
        """KV bytes of one sequence, all layers."""
        total = 0.0
        for mixer, count, slope in self._mixers:
            if slope:
                total += count * slope * context_tokens
            else:
                total += count * mixer.kv_bytes(context_tokens, self.kv_dtype)
        return total

    def read_kv_bytes(self, shape: Shape) -> float:
        """KV bytes that the part reads: its whole visible past, once for the whole chunk."""
        return self.kv_bytes(shape.context_tokens + shape.n_tokens)


def _group_mixers(arch: ModelArch, kv_dtype: str) -> list[_Mixers]:
    counts: dict[Mixer, int] = {}
    for layer in arch.layers:
        counts[layer.mixer] = counts.get(layer.mixer, 0) + 1
    groups = []
    for mixer, count in counts.items():
        unbounded = mixer.kv_bytes(2**22, kv_dtype) == 2 * mixer.kv_bytes(2**21, kv_dtype)
        slope = mixer.kv_bytes(2**10, kv_dtype) / 2**10 if unbounded else 0.0
        groups.append(_Mixers(mixer, count, slope))
    return groups


def _group_mlps(arch: ModelArch) -> list[_Mlps]:
    counts: dict[Mlp, int] = {}
    for layer in arch.layers:
        counts[layer.mlp] = counts.get(layer.mlp, 0) + 1
    return [
        _Mlps(
            mlp,
            count,
            mlp.params_per_token(arch.hidden),
            sum(t.elements for t in mlp.tensors(arch.hidden) if t.role is Role.EXPERT),
        )
        for mlp, count in counts.items()
    ]


def _multiplied(mixer: Mixer, hidden: int) -> int:
    return sum(t.elements for t in mixer.tensors(hidden) if t.role in _MULTIPLIED)


def _shared(group: _Mlps, hidden: int) -> int:
    """Parameters of an MoE layer beside its experts: router and shared expert."""
    return sum(t.elements for t in group.mlp.tensors(hidden) if t.role in _MULTIPLIED)
