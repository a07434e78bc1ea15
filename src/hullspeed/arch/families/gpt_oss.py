"""gpt-oss: alternating sliding windows, attention sinks, fused experts with biases.

Source: ``modeling_gpt_oss`` in transformers.
"""

from __future__ import annotations

from hullspeed.arch.families.common import attention, decoder, dtype, layer_count
from hullspeed.arch.fields import Fields
from hullspeed.arch.mixers import FullAttention, SlidingAttention
from hullspeed.arch.mlps import MoeMlp
from hullspeed.arch.model import Layer, ModelArch


def build(config: Fields) -> ModelArch:
    """gpt-oss-20b and -120b."""
    biased = config.flag("attention_bias")
    settings = attention(config, qkv_bias=biased, output_bias=biased, sinks=True)
    window = config.natural("sliding_window")
    table = {
        "full_attention": FullAttention(**settings),
        "sliding_attention": SlidingAttention(**settings, window_tokens=window),
    }
    kinds = config.words("layer_types", layer_count(config))
    if kinds is None:
        config.missing("layer_types")
    if unknown := set(kinds) - set(table):
        config.wrong("layer_types", f"made of {', '.join(table)}, not {', '.join(sorted(unknown))}")
    mlp = MoeMlp(
        experts=config.natural("num_local_experts"),
        experts_per_token=config.natural("num_experts_per_tok", "experts_per_token"),
        intermediate=config.natural("intermediate_size"),
        fused_experts=True,
        transposed=True,
        bias=True,
        router="router",
        router_bias=True,
        activation="clamped_swiglu",
    )
    options = {"swiglu_limit": config.number_or(7.0, "swiglu_limit")}
    layers = [Layer(table[kind], mlp) for kind in kinds]
    # The official configs state no type; what MXFP4 does not hold is BF16 (model card).
    own = dtype(config, absent="bf16")
    return decoder(config, "gpt_oss", layers, options=options, dtype=own)
