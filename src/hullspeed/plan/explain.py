"""Derivations: each number of a plan as formula, values and source."""

from __future__ import annotations

from fractions import Fraction

import msgspec

from hullspeed.arch.dtypes import PER_TOKEN_HEAD, SCALE_BYTES, bytes_per_element
from hullspeed.arch.mixers import FullAttention, GatedDeltaNet, Mixer, SlidingAttention
from hullspeed.arch.model import ModelArch
from hullspeed.memory.budget import MemoryItem, MemoryStack, PoolPlan
from hullspeed.plan.capacity import Capacity, kv_dtype, state_dtype
from hullspeed.plan.case import Case
from hullspeed.units import GIB, format_bytes, format_tokens


class Derivation(msgspec.Struct, frozen=True, kw_only=True):
    """One number.

    Attributes:
        name: What it is.
        value: As printed.
        formula: With the values in it.
        source: Where the rule or the measurement comes from.
    """

    name: str
    value: str
    formula: str
    source: str


def kv_formula(arch: ModelArch, dtype: str) -> str:
    """KV bytes of one token, layer kind by layer kind, in numbers."""
    scaled = dtype in PER_TOKEN_HEAD
    size = bytes_per_element(PER_TOKEN_HEAD.get(dtype, dtype))
    parts = []
    for mixer, n_layers in _counted(arch):
        if isinstance(mixer, SlidingAttention):
            parts.append(
                f"{n_layers} sliding layers keep at most {mixer.window_tokens:,} tokens: "
                f"0 for each further token"
            )
        elif isinstance(mixer, FullAttention):
            head = f"{mixer.head_dim} x {_number(size)} B"
            if scaled:
                head = f"({head} + {SCALE_BYTES} B scale)"
            parts.append(f"{n_layers} layers x 2 (K, V) x {mixer.kv_heads} KV heads x {head}")
        elif mixer.kv_bytes(1, dtype):
            per_layer = mixer.kv_bytes(2, dtype) - mixer.kv_bytes(1, dtype)
            parts.append(f"{n_layers} {mixer.kind} layers x {per_layer} B")
        else:
            parts.append(f"{n_layers} {mixer.kind} layers x 0")
    return " + ".join(parts)


def state_formula(arch: ModelArch, dtype: str, draft_tokens: int = 0) -> str:
    """Recurrent state of one sequence in numbers; empty for a model without."""
    parts = []
    for mixer, n_layers in _counted(arch):
        if isinstance(mixer, GatedDeltaNet):
            columns = mixer.conv_kernel - 1 + draft_tokens
            parts.append(
                f"{n_layers} layers x ({mixer.v_heads} heads x {mixer.v_dim} x {mixer.k_dim} in "
                f"{dtype} + {mixer.conv_dim} channels x {columns} columns in {arch.dtype})"
            )
        elif size := mixer.state_bytes(dtype, arch.dtype, draft_tokens):
            parts.append(f"{n_layers} {mixer.kind} layers x {size} B")
    return " + ".join(parts)


def derive(
    case: Case, stack: MemoryStack, pool: PoolPlan, capacity: Capacity
) -> tuple[Derivation, ...]:
    """Every number of the memory side, in the order in which each follows from those before."""
    arch, settings, workload = case.model.arch, case.settings, case.workload
    dtype = kv_dtype(arch, settings)
    rows = [
        Derivation(
            name="parameters",
            value=f"{arch.param_count():,}",
            formula="sum of the elements of every tensor, vision and MTP included",
            source=case.model.source,
        ),
        *(
            Derivation(
                name=f"{item.term}: {item.name}",
                value=format_bytes(item.bytes),
                formula=item.source,
                source="exact"
                if item.exact
                else "measured elsewhere; 90 % interval "
                f"{format_bytes(item.low)} to {format_bytes(item.high)}",
            )
            for item in stack.items
        ),
        Derivation(
            name="KV of one token",
            value=format_bytes(arch.kv_bytes_per_token(dtype)),
            formula=f"{kv_formula(arch, dtype)} (KV in {dtype})",
            source="config fields; full-attention layers only",
        ),
    ]
    ssm = state_dtype(arch, settings)
    state = arch.state_bytes(ssm, arch.dtype, settings.draft_tokens)
    if state:
        rows.append(
            Derivation(
                name="state of one sequence",
                value=format_bytes(state),
                formula=state_formula(arch, ssm, settings.draft_tokens),
                source="config fields; the same at any length",
            )
        )
    tokens, request = workload.request_tokens, pool.bytes_per_request(workload.request_tokens)
    rows += [
        Derivation(
            name=f"one request of {format_tokens(tokens)} tokens",
            value=f"{format_bytes(request)} a GPU",
            formula=f"blocks of {pool.block_tokens:,} tokens, {format_bytes(pool.bytes_per_block)} "
            "each, state blocks included",
            source=f"{settings.engine}'s allocator",
        ),
        Derivation(
            name="requests at once",
            value=str(capacity.served),
            formula=f"{pool.blocks:,} blocks, whole requests, with what the log leaves out",
            source=f"{settings.engine}'s allocator; {capacity.served_low} at the lower end of the "
            f"pool, {capacity.pool_low_bytes / GIB:.2f} GiB",
        ),
    ]
    return tuple(rows)


def _certainty(item: MemoryItem) -> str:
    if item.exact:
        return "exact"
    if item.interval is None:
        return "estimate"
    return f"90 % interval {format_bytes(item.low)} to {format_bytes(item.high)}"


def _counted(arch: ModelArch) -> list[tuple[Mixer, int]]:
    counts: dict[Mixer, int] = {}
    for layer in arch.layers:
        counts[layer.mixer] = counts.get(layer.mixer, 0) + 1
    return list(counts.items())


def _number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):g}"
