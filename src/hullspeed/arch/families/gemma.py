"""Gemma 2 and 3: sliding windows, four norms a layer, scaled embeddings.

Source: ``modeling_gemma2``, ``modeling_gemma3`` and ``modeling_siglip`` in transformers.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hullspeed.arch.families.common import (
    attention,
    decoder,
    layer_count,
    linear,
    rope,
    vectors,
)
from hullspeed.arch.fields import Fields
from hullspeed.arch.mixers import FullAttention, SlidingAttention
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Extra, Layer, ModelArch
from hullspeed.arch.tensors import Role, TensorSpec

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def build_gemma2(config: Fields) -> ModelArch:
    """Gemma 2: every second layer, from the first, has a sliding window."""
    options: dict[str, object] = {
        "attention_soft_cap": config.number("attn_logit_softcapping"),
        "logit_soft_cap": config.number("final_logit_softcapping"),
    }
    kinds = _kinds(config, every=2)
    return _build(config, "gemma2", kinds, qk_norm=False, options=options)


def build_gemma3_text(config: Fields, outer: Fields | None = None) -> ModelArch:
    """Gemma 3's language model: five sliding layers to one that sees everything."""
    every = config.natural_or(0, "sliding_window_pattern")
    kinds = _kinds(config, every=every)
    local = config.section_or_none("rope_parameters")
    local = local.section_or_none("sliding_attention") if local else None
    theta = (local or config).number("rope_theta" if local else "rope_local_base_freq")
    options: dict[str, object] = {"sliding_rope_theta": theta}
    return _build(config, "gemma3", kinds, qk_norm=True, options=options, outer=outer)


def build_gemma3(config: Fields) -> ModelArch:
    """Gemma 3 with its SigLIP vision tower."""
    text = build_gemma3_text(config.section("text_config"), outer=config)
    tower = _siglip(config.section("vision_config"), text.hidden)
    return replace(text, prefix="language_model.model.", extras=(tower,))


def _kinds(config: Fields, *, every: int) -> list[str]:
    """Each layer's kind: as listed, or full attention in every ``every``-th layer."""
    count = layer_count(config)
    kinds = config.words("layer_types", count)
    if kinds is None:
        if not every:
            config.missing("layer_types or sliding_window_pattern")
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        config.wrong("layer_types", f"sliding_attention or full_attention, not {sorted(unknown)}")
    return kinds


def _build(
    config: Fields,
    family: str,
    kinds: list[str],
    *,
    qk_norm: bool,
    options: dict[str, object],
    outer: Fields | None = None,
) -> ModelArch:
    biased = config.flag("attention_bias", absent=False)
    settings = attention(config, qk_norm=qk_norm, qkv_bias=biased, output_bias=biased)
    window = config.natural("sliding_window")
    table = {
        "full_attention": FullAttention(**settings),
        "sliding_attention": SlidingAttention(**settings, window_tokens=window),
    }
    mlp = DenseMlp(
        intermediate=config.natural("intermediate_size"),
        activation=config.text("hidden_activation"),
    )
    options = {
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(config.natural("hidden_size")),
        "query_scale": config.number("query_pre_attn_scalar") ** -0.5,
        **options,
    }
    layers = [Layer(table[kind], mlp, _NORMS) for kind in kinds]
    nested = config.section_or_none("rope_parameters")
    global_rope = nested.section_or_none("full_attention") if nested else None
    rope_fields = (
        Fields({"rope_parameters": global_rope.values}, config.where) if global_rope else config
    )
    return decoder(
        config, family, layers, outer=outer, tied_if_absent=True, options=options,
        rope=rope(rope_fields),
    )  # fmt: skip


def _siglip(vision: Fields, text_hidden: int) -> Extra:
    """The tower without SigLIP's pooling head, which Gemma 3 does not have, and the projector."""
    width, inner = vision.natural("hidden_size"), vision.natural("intermediate_size")
    patch, image = vision.natural("patch_size"), vision.natural("image_size")
    channels = vision.natural_or(3, "num_channels")
    root, role = "vision_tower.vision_model.", Role.VISION
    embeddings = f"{root}embeddings."
    kernel = (width, channels, patch, patch)
    specs = [
        TensorSpec(f"{embeddings}patch_embedding.weight", kernel, role),
        TensorSpec(f"{embeddings}patch_embedding.bias", (width,), role),
        TensorSpec(f"{embeddings}position_embedding.weight", ((image // patch) ** 2, width), role),
    ]
    for i in range(vision.natural("num_hidden_layers")):
        layer = f"{root}encoder.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            specs += linear(f"{layer}self_attn.{name}", width, width, bias=True, role=role)
        specs += linear(f"{layer}mlp.fc1", inner, width, bias=True, role=role)
        specs += linear(f"{layer}mlp.fc2", width, inner, bias=True, role=role)
        for norm in ("layer_norm1", "layer_norm2"):
            specs += vectors(layer, width, f"{norm}.weight", f"{norm}.bias", role=role)
    specs += vectors(f"{root}post_layernorm.", width, "weight", "bias", role=role)
    projector = "multi_modal_projector."
    specs += [
        TensorSpec(f"{projector}mm_input_projection_weight", (width, text_hidden), role),
        TensorSpec(f"{projector}mm_soft_emb_norm.weight", (width,), role),
    ]
    return Extra(name="vision", tensors=tuple(specs))
