"""What the families share: the fields that every config.json has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hullspeed.arch.fields import Fields
from hullspeed.arch.mixers import FullAttention
from hullspeed.arch.model import Extra, Layer, ModelArch, Rope
from hullspeed.arch.tensors import Role, TensorSpec

DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
}  # fmt: skip


def decoder(
    config: Fields,
    family: str,
    layers: Iterable[Layer],
    *,
    outer: Fields | None = None,
    tied_if_absent: bool | None = None,
    **particulars: Any,
) -> ModelArch:
    """A ``ModelArch`` from the fields that have the same name in every family.

    Args:
        config: The language model's fields.
        family: Key of the family.
        layers: The layers.
        outer: The enclosing config of a multimodal model, which holds some of the fields.
        tied_if_absent: Meaning of an absent ``tie_word_embeddings``; ``None``: it is required.
        **particulars: Further fields of ``ModelArch``.
    """
    places = [place for place in (config, outer) if place is not None]
    tied = next((place for place in reversed(places) if place.has("tie_word_embeddings")), config)
    settings: dict[str, Any] = {
        "hidden": config.natural("hidden_size"),
        "vocab": config.natural("vocab_size"),
        "tied_embeddings": tied.flag("tie_word_embeddings", tied_if_absent),
        "max_context_tokens": config.natural("max_position_embeddings"),
        "bos_token_id": next(iter(config.naturals("bos_token_id")), None),
        "eos_token_ids": union(*(place.naturals("eos_token_id") for place in places)),
    }
    if "norm_eps" not in particulars:
        settings["norm_eps"] = config.number("rms_norm_eps")
    if "rope" not in particulars:
        settings["rope"] = rope(config)
    if "dtype" not in particulars:
        settings["dtype"] = dtype(*places)
    return ModelArch(family=family, layers=tuple(layers), **settings, **particulars)


def attention(config: Fields, *, head_dim: int | None = None, **particulars: Any) -> dict[str, Any]:
    """Arguments of an attention mixer from the fields of the same name in every family.

    Args:
        config: The language model's fields.
        head_dim: Width of a head where the family does not state it.
        **particulars: Further arguments.
    """
    q_heads, kv_heads = config.natural("num_attention_heads"), config.natural("num_key_value_heads")
    if q_heads % kv_heads:
        config.wrong("num_key_value_heads", f"a divisor of the {q_heads} query heads")
    width = head_dim or config.natural("head_dim")
    return {
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": width,
        "rotary_dim": rotary_dim(config, width),
        **particulars,
    }


def full_attention(config: Fields, **particulars: Any) -> FullAttention:
    """Full attention from the fields of the same name in every family."""
    return FullAttention(**attention(config, **particulars))


def derived_head_dim(config: Fields) -> int:
    """``head_dim``, or hidden / heads in families whose config may leave it out."""
    if config.has("head_dim"):
        return config.natural("head_dim")
    hidden, heads = config.natural("hidden_size"), config.natural("num_attention_heads")
    if hidden % heads:
        config.wrong("hidden_size", f"a multiple of the {heads} heads, as there is no head_dim")
    return hidden // heads


def rotary_dim(config: Fields, head_dim: int) -> int:
    """Rotated dimensions of a head, from ``partial_rotary_factor``."""
    place = config.section_or_none("rope_parameters") or config
    if not place.has("partial_rotary_factor"):
        place = config
    share = place.number_or(1.0, "partial_rotary_factor")
    if share > 1 or not (head_dim * share).is_integer():
        place.wrong("partial_rotary_factor", f"a share of the head dimension {head_dim}")
    return int(head_dim * share)


def rope(config: Fields, theta_if_absent: float | None = None) -> Rope:
    """Rotary embedding from ``rope_parameters`` (transformers 5) or ``rope_theta`` and
    ``rope_scaling`` (before).
    """
    scaling = config.section_or_none("rope_parameters") or config.section_or_none("rope_scaling")
    place = scaling if scaling and scaling.has("rope_theta") else config
    if theta_if_absent is None:
        theta = place.number("rope_theta")
    else:
        theta = place.number_or(theta_if_absent, "rope_theta")
    kept = {k: v for k, v in (scaling.values if scaling else {}).items() if k != "rope_theta"}
    kind = kept.get("rope_type", kept.get("type", "default"))
    plain = kind == "default" and not any("mrope" in key for key in kept)
    return Rope(theta=theta, scaling=() if plain else tuple(sorted(kept.items())))


def dtype(*places: Fields, absent: str | None = None) -> str:
    """Type of the unquantized weights, from the first place that states it."""
    for place in places:
        for name in ("dtype", "torch_dtype"):
            if place.has(name):
                word = place.text(name).removeprefix("torch.")
                return DTYPES.get(word) or place.wrong(name, f"one of {', '.join(DTYPES)}")
    return absent or places[0].missing("dtype or torch_dtype")


def layer_count(config: Fields) -> int:
    """``num_hidden_layers``."""
    return config.natural("num_hidden_layers")


def union(*groups: Iterable[int]) -> tuple[int, ...]:
    """All ids, each once, in the order seen."""
    return tuple(dict.fromkeys(item for group in groups for item in group))


def vectors(prefix: str, width: int, *names: str, role: Role = Role.NORM) -> list[TensorSpec]:
    """One-dimensional weights of one width."""
    return [TensorSpec(prefix + name, (width,), role) for name in names]


def linear(prefix: str, rows: int, columns: int, *, bias: bool, role: Role) -> list[TensorSpec]:
    """A linear layer and its bias."""
    found = [TensorSpec(f"{prefix}.weight", (rows, columns), role)]
    return found + ([TensorSpec(f"{prefix}.bias", (rows,), role)] if bias else [])


def mtp(hidden: int, layers: tuple[Layer, ...]) -> Extra:
    """Qwen's multi-token-prediction layers: decoder layers behind a projection of the last hidden
    state and the next token's embedding.
    """
    specs = [TensorSpec("mtp.fc.weight", (hidden, 2 * hidden), Role.LINEAR)]
    for i, layer in enumerate(layers):
        specs += [tensor.under(f"mtp.layers.{i}.") for tensor in layer.tensors(hidden)]
    names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    specs += vectors("mtp.", hidden, *(f"{name}.weight" for name in names))
    return Extra(name="mtp", tensors=tuple(specs), layers=layers)
