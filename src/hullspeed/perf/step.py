"""StepCost: seconds of a step of the embedded engine from this machine's measured ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hullspeed.arch.model import ModelArch
from hullspeed.arch.tensors import Role
from hullspeed.errors import UnsupportedModelError
from hullspeed.hardware.ceilings import NEAR_TOKENS, Ceilings
from hullspeed.memory.held import read_bytes
from hullspeed.memory.ours_room import kv_format
from hullspeed.perf.work import Shape, Work


class StepParts(NamedTuple):
    """Where a step's time goes, in seconds."""

    linear_s: float
    head_s: float
    decode_attention_s: float
    chunk_attention_s: float
    layer_overhead_s: float
    step_overhead_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self)


# Seconds of decode attention for one number of the cache over those in float32, contexts beyond the
# last-level cache: 32 sequences of 2,048 tokens, 9/3 heads of 64, one core of an AMD EPYC of 2022
# (AVX-512): 5.0 ms a layer in fp32, 3.0 in fp16, 2.6 in bf16 and int8, 3.2 in fp8. Where it
# fits (8 sequences, 16/2 heads of 128) they are 0.75 to 0.87.
DECODE_SHARE = {"fp32": 1.0, "fp16": 0.61, "bf16": 0.53, "int8": 0.53, "fp8": 0.64}


class StepCost:
    """Seconds of a step of ``arch`` on the machine that ``ceilings`` describe.

    Linear layers run at the rate measured for this many rows, but never faster than their weights
    can be read; decode attention at the measured KV read rate; chunk attention at its measured
    FLOP rate; norms, rotations, page writes and calls as fitted overheads. What is left between the
    sum of these and whole steps as they were measured is a factor on all of them.

    Args:
        weight_dtype: How the engine holds linear weights: ``native``, ``fp16`` or ``fp32``, as
            :func:`hullspeed.memory.held.held_dtype` gives it.
        kv_dtype: How it keeps keys and values. Rates are measured in fp32; the others' are
            :data:`DECODE_SHARE` of it. Prompt chunks compute more than they read: no difference.

    Raises:
        UnsupportedModelError: when the ceilings hold no rate for ``weight_dtype``.
        UsageError: for a KV cache type that the engine does not have.
    """

    def __init__(
        self,
        arch: ModelArch,
        ceilings: Ceilings,
        weight_dtype: str = "fp16",
        kv_dtype: str = "fp32",
    ) -> None:
        if weight_dtype not in ceilings.linear_flops_per_s:
            raise UnsupportedModelError(
                "no measured rate for this weight format",
                seen=weight_dtype,
                fix=f"use one of {', '.join(ceilings.linear_flops_per_s)}",
            )
        self.ceilings = ceilings
        kv_format(kv_dtype)  # refuses what the engine does not have
        self._decode_share = DECODE_SHARE[kv_dtype]
        self.work = Work(arch, kv_dtype="fp32")
        self._linear = ceilings.linear_flops_per_s[weight_dtype]
        self._head = ceilings.head_flops_per_s[weight_dtype]
        self._weight_bytes = _linear_bytes(arch, weight_dtype)
        self._hidden_units = arch.hidden / 1024
        self._kv_heads = kv_heads_of(arch)

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Seconds of one step that computes all of ``shapes``."""
        return self.parts(shapes).total_s

    def parts(self, shapes: Sequence[Shape]) -> StepParts:
        """The same, term by term."""
        work, ceilings, over = self.work, self.ceilings, self.ceilings.overheads
        n_tokens = sum(shape.n_tokens for shape in shapes)
        if n_tokens == 0:
            return StepParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        n_logits = sum(shape.sample for shape in shapes)
        body_bytes = work.body_bytes(n_tokens) / work.bytes_per_param * self._weight_bytes
        # The last layer's MLP runs only for the rows whose logits are wanted.
        skipped_flops = 2.0 * work.last_mlp_params * (n_tokens - n_logits)
        linear_s = max(
            (work.body_flops(n_tokens) - skipped_flops) / self._linear.at(n_tokens),
            # What the kernels read cannot come faster than memory gives it, unless it fits a cache;
            # the curve was measured beyond the cache, so this only binds for routed experts.
            body_bytes / ceilings.dram_bytes_per_s if body_bytes > 2**28 else 0.0,
        )
        head_s = 2.0 * work.head_params * n_logits / self._head.at(n_logits) if n_logits else 0.0
        n_decode, chunk_s = 0, 0.0
        read = _Read()
        for shape in shapes:
            if shape.n_tokens == 1:
                read.add(work, shape)
                n_decode += 1
            else:
                rate = ceilings.chunk_flops_per_s.at(shape.context_tokens + shape.n_tokens)
                chunk_s += work.attention_flops(shape) / rate
        decode_s = read.seconds(ceilings, n_decode * self._kv_heads) if n_decode else 0.0
        layer_s = work.n_layers * (
            over.layer_s + over.layer_token_s * n_tokens * self._hidden_units
        )
        factor = (
            ceilings.decode_factor.at(n_decode)
            if n_decode == len(shapes)
            else ceilings.chunk_factor.at(n_tokens) * ceilings.mixed_factor.at(n_decode + 1)
        )
        return StepParts(
            linear_s=factor * linear_s,
            head_s=factor * head_s,
            decode_attention_s=factor * decode_s * self._decode_share,
            chunk_attention_s=factor * chunk_s,
            layer_overhead_s=factor * layer_s,
            step_overhead_s=over.step_s + over.sequence_s * len(shapes),
        )


class _Read:
    """KV bytes that decoding sequences read: near and far, each its own and shared with another."""

    __slots__ = ("far", "far_shared", "near", "near_shared")

    def __init__(self) -> None:
        self.near = self.near_shared = self.far = self.far_shared = 0.0

    def add(self, work: Work, shape: Shape) -> None:
        """One sequence; what it shares is the begin of its past."""
        tokens = shape.context_tokens + 1
        near_tokens = min(tokens, NEAR_TOKENS)
        near = work.kv_bytes(near_tokens)
        shared = near * min(shape.shared_tokens, near_tokens) / near_tokens
        self.near += near - shared
        self.near_shared += shared
        if tokens > near_tokens:
            far = work.kv_bytes(tokens) - near
            shared = far * max(shape.shared_tokens - near_tokens, 0) / (tokens - near_tokens)
            self.far += far - shared
            self.far_shared += shared

    def seconds(self, ceilings: Ceilings, width: int) -> float:
        """At the rates of ``width`` pairs of sequences and KV heads side by side."""
        own = ceilings.decode_bytes_per_s
        shared = ceilings.shared_bytes_per_s or own
        far = ceilings.far_decode_bytes_per_s or own
        far_shared = ceilings.far_shared_bytes_per_s or shared
        return (
            self.near / own.at(width)
            + self.near_shared / shared.at(width)
            + self.far / far.at(width)
            + self.far_shared / far_shared.at(width)
        )


def _linear_bytes(arch: ModelArch, weight_dtype: str) -> float:
    """Bytes read of a parameter of the layers' matrices, on average."""
    specs = [t for t in arch.tensors(extras=False) if t.role in (Role.LINEAR, Role.EXPERT)]
    held = sum(read_bytes(arch, spec, weight_dtype) for spec in specs)
    return held / max(1, sum(spec.elements for spec in specs))


def kv_heads_of(arch: ModelArch) -> int:
    """KV heads of the attention layers: what decode attention can run side by side."""
    heads = [getattr(layer.mixer, "kv_heads", 0) for layer in arch.layers]
    return max([h for h in heads if h], default=1)
