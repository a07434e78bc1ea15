"""Llama and Mistral: dense decoders with grouped keys and values.

Source: ``modeling_llama``, ``modeling_mistral`` and ``modeling_mistral3`` in transformers.
"""

from __future__ import annotations

from dataclasses import replace

from hullspeed.arch.families.common import attention, decoder, derived_head_dim, layer_count, rope
from hullspeed.arch.families.pixtral import vision_tower
from hullspeed.arch.fields import Fields
from hullspeed.arch.mixers import FullAttention, SlidingAttention
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Layer, ModelArch


def build_llama(config: Fields) -> ModelArch:
    """Llama 1 to 3, SmolLM2 and others of ``model_type: llama``.

    Llama 1 and 2 leave out ``num_key_value_heads`` (every head has its own) and ``rope_theta``
    (10,000, as in the RoPE paper).
    """
    if not config.has("num_key_value_heads"):
        heads = config.natural("num_attention_heads")
        config = Fields({**config.values, "num_key_value_heads": heads}, config.where)
    biased = config.flag("attention_bias", absent=False)
    mixer = FullAttention(
        **attention(config, head_dim=derived_head_dim(config), qkv_bias=biased, output_bias=biased)
    )
    layer = Layer(mixer, dense_mlp(config))
    layers = (layer,) * layer_count(config)
    return decoder(config, "llama", layers, rope=rope(config, theta_if_absent=10_000.0))


def build_mistral(config: Fields, outer: Fields | None = None) -> ModelArch:
    """Mistral; with a sliding window where the config has one."""
    settings = attention(config, head_dim=derived_head_dim(config))
    mixer = FullAttention(**settings)
    if config.has("sliding_window"):
        mixer = SlidingAttention(**settings, window_tokens=config.natural("sliding_window"))
    layers = (Layer(mixer, dense_mlp(config)),) * layer_count(config)
    return decoder(config, "mistral", layers, outer=outer)


def build_mistral3(config: Fields) -> ModelArch:
    """Mistral Small 3.1 and later: a Mistral decoder with the Pixtral vision tower."""
    text = build_mistral(config.section("text_config"), outer=config)
    return replace(
        text,
        prefix="language_model.model.",
        head_name="language_model.lm_head",
        extras=(vision_tower(config, text.hidden),),
    )


def dense_mlp(config: Fields) -> DenseMlp:
    """A gated MLP from the fields of Llama's config."""
    return DenseMlp(
        intermediate=config.natural("intermediate_size"),
        activation=config.text("hidden_act", absent="silu"),
        bias=config.flag("mlp_bias", absent=False),
    )
