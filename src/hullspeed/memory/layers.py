"""What the layers of a model keep, per rank: the bridge from ``ModelArch`` to every allocator.

A mixer is asked for its bytes; tensor parallelism makes a narrower mixer and asks that. Nothing in
``memory`` multiplies layers by heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from hullspeed.arch.dtypes import PER_TOKEN_HEAD, bytes_per_element
from hullspeed.arch.mixers import Mixer
from hullspeed.arch.model import Layer, ModelArch
from hullspeed.errors import UnsupportedModelError, UsageError

# What engines call a number format, and what we call it.
_ALIASES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
    "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2",
}  # fmt: skip


def short_dtype(name: str) -> str:
    """What we call a number format, whether there is one of this name or not."""
    short = name.lower().removeprefix("torch.")
    return _ALIASES.get(short, short)


def normal_dtype(name: str) -> str:
    """``"bfloat16"`` or ``"torch.bfloat16"`` as ``"bf16"``; per-head and NVFP4 KV names pass.

    Raises:
        UsageError: for a name that is not a number format.
    """
    short = short_dtype(name)
    if short not in (*PER_TOKEN_HEAD, "nvfp4"):
        bytes_per_element(short)
    return short


def kv_dtype_of(arch: ModelArch, asked: str | None) -> str:
    """The KV dtype in force: the flag, else what the checkpoint declares, else the model's own."""
    if asked is None or asked == "auto":
        return normal_dtype(arch.weight_format.kv_dtype or arch.dtype)
    return normal_dtype(asked)


def state_dtype_of(arch: ModelArch, asked: str | None, default: str | None = None) -> str:
    """The dtype of the recurrent state: the flag, else the configuration's (``mamba_ssm_dtype``),
    else the engine's ``default``, else the model's dtype.
    """
    if asked is None or asked == "auto":
        return normal_dtype(str(arch.options.get("state_dtype", default or arch.dtype)))
    return normal_dtype(asked)


def keeps_state(arch: ModelArch) -> bool:
    """Whether any layer keeps recurrent state (a hybrid model)."""
    return any(layer.mixer.state_bytes("fp16", "fp16") for layer in arch.layers)


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """What one layer keeps on one rank.

    Attributes:
        index: Position of the layer in the model (MTP layers follow the last decoder layer).
        token_bytes: Bytes of keys and values per token; may be a fraction for packed formats.
        window_tokens: Of sliding-window layers.
        state_bytes: Bytes of recurrent state per sequence, at any length.
    """

    index: int
    token_bytes: Fraction
    window_tokens: int | None
    state_bytes: int

    @property
    def keeps_tokens(self) -> bool:
        """Whether the layer grows with the context (or up to its window)."""
        return bool(self.token_bytes)


def shard(mixer: Mixer, tp: int) -> Mixer:
    """The mixer as one of ``tp`` ranks holds it.

    Query and state heads must divide; fewer KV heads than ranks are replicated; MLA's latent is
    whole on every rank.

    Raises:
        UsageError: heads that do not divide by ``tp``.
    """
    if tp == 1:
        return mixer
    names = {field.name for field in fields(mixer)}  # type: ignore[arg-type]
    changes: dict[str, int] = {}
    for name in sorted(names & {"q_heads", "k_heads", "v_heads", "heads", "groups"}):
        heads = getattr(mixer, name)
        if name == "groups":  # Mamba-2 repeats groups that do not divide
            changes[name] = max(1, -(-heads // tp))
            continue
        if heads % tp:
            raise UsageError(
                f"tensor parallelism {tp} does not divide {heads} {name} of {mixer.kind}",
                seen=tp,
                fix="choose a divisor of every head count",
            )
        changes[name] = heads // tp
    if "kv_heads" in names:
        kv_heads = mixer.kv_heads  # type: ignore[attr-defined]
        if kv_heads % tp and tp % kv_heads:
            raise UsageError(
                f"tensor parallelism {tp} neither divides {kv_heads} KV heads nor is a multiple",
                seen=tp,
                fix="choose a divisor or a multiple of the KV heads",
            )
        changes["kv_heads"] = max(1, kv_heads // tp)
    if not changes:
        return mixer
    narrow: Any = replace(mixer, **changes)  # type: ignore[type-var]
    result: Mixer = narrow
    return result


def _token_bytes(mixer: Mixer, dtype: str) -> Fraction:
    """KV bytes of one token, exact, with the scales of packed formats.

    Sources: vLLM v1/kv_cache_interface.py (per-token-head scales: one fp32 for K and V of each
    head; NVFP4: half a byte per value and one fp8 scale per 16 values).
    """
    if not mixer.kv_bytes(1, "fp8"):
        return Fraction(0)
    if dtype == "nvfp4":
        return Fraction(9, 16) * mixer.kv_bytes(1, "fp8")
    if dtype in PER_TOKEN_HEAD and not hasattr(mixer, "kv_heads"):
        raise UsageError(f"{dtype} needs attention heads", seen=mixer.kind, fix="use fp8")
    # 16 tokens, so that half-byte formats stay exact
    return (
        Fraction(mixer.kv_bytes(16, dtype), 16)
        if _unbounded(mixer)
        else Fraction(mixer.kv_bytes(1, dtype))
    )


def _unbounded(mixer: Mixer) -> bool:
    return getattr(mixer, "window_tokens", None) is None


def _kept_by(
    mixer: Mixer, tp: int, kv_dtype: str, state_dtype: str, conv_dtype: str, draft_tokens: int
) -> tuple[Fraction, int | None, int]:
    """Token bytes, window and state bytes of one layer on one rank."""
    narrow = shard(mixer, tp)
    return (
        _token_bytes(narrow, kv_dtype),
        getattr(narrow, "window_tokens", None),
        narrow.state_bytes(state_dtype, conv_dtype, draft_tokens),
    )


def cache_layers(
    arch: ModelArch, *, kv_dtype: str, state_dtype: str, tp: int = 1, draft_tokens: int = 0
) -> tuple[CacheLayer, ...]:
    """Every layer that keeps something, per rank; MTP layers only when drafts are on.

    Raises:
        UsageError: ``tp`` does not divide the heads.
        UnsupportedModelError: no layer keeps anything.
    """
    layers: list[Layer] = list(arch.layers)
    if draft_tokens:
        drafted = [layer for extra in arch.extras for layer in extra.layers]
        if not drafted:
            raise UsageError(
                "speculative tokens need a multi-token-prediction layer, and this model has none",
                seen=draft_tokens,
                fix="leave speculative decoding off, or size the draft model separately",
            )
        layers += drafted
    conv_dtype = normal_dtype(arch.dtype)
    # Most layers are equal: ask each kind only once.
    asked: dict[Mixer, tuple[Fraction, int | None, int]] = {}
    kept = []
    for i, layer in enumerate(layers):
        mixer = layer.mixer
        if mixer not in asked:
            asked[mixer] = _kept_by(mixer, tp, kv_dtype, state_dtype, conv_dtype, draft_tokens)
        kept.append(CacheLayer(i, *asked[mixer]))
    kept = [layer for layer in kept if layer.keeps_tokens or layer.state_bytes]
    if not kept:
        raise UnsupportedModelError("no layer keeps keys, values or state", seen=arch.family)
    return tuple(kept)


def bytes_per_sequence(layers: Sequence[CacheLayer], context_tokens: int) -> int:
    """Exact bytes of one sequence without any block rounding: the floor every engine lies above."""
    total = Fraction(0)
    for layer in layers:
        visible = min(context_tokens, layer.window_tokens or context_tokens)
        total += layer.token_bytes * visible + layer.state_bytes
    return -(-total.numerator // total.denominator)


def partition(n_layers: int, stages: int) -> tuple[range, ...]:
    """Layers of each pipeline stage: vLLM's ``get_pp_indices`` gives the remainder to the stages
    before the last.
    """
    if stages > n_layers:
        raise UsageError("more pipeline stages than layers", seen=stages, fix=f"<= {n_layers}")
    sizes = [n_layers // stages] * stages
    for i in range(2, n_layers % stages + 2):
        sizes[-i] += 1
    starts = [sum(sizes[:i]) for i in range(stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
