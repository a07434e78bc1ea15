"""Bamba: Mamba-2 layers with a few of full attention, each followed by an MLP.

Source: ``modeling_bamba`` in transformers.
"""

from __future__ import annotations

from hullspeed.arch.families.common import attention, decoder, derived_head_dim, layer_count
from hullspeed.arch.fields import Fields
from hullspeed.arch.mixers import FullAttention, Mamba2
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Layer, ModelArch


def build(config: Fields) -> ModelArch:
    """Bamba-9B."""
    biased = config.flag("attention_bias", absent=False)
    head_dim = derived_head_dim(config)
    full = FullAttention(
        **attention(config, head_dim=head_dim, qkv_bias=biased, output_bias=biased)
    )
    heads = config.natural("mamba_n_heads")
    width = config.natural("mamba_expand") * config.natural("hidden_size")
    if width % heads:
        config.wrong("mamba_n_heads", f"a divisor of the inner width {width}")
    mamba = Mamba2(
        heads=heads,
        head_dim=width // heads,
        groups=config.natural("mamba_n_groups"),
        state_dim=config.natural("mamba_d_state"),
        conv_kernel=config.natural("mamba_d_conv"),
        conv_bias=config.flag("mamba_conv_bias"),
        projection_bias=config.flag("mamba_proj_bias"),
    )
    mlp = DenseMlp(
        intermediate=config.natural("intermediate_size"),
        activation=config.text("hidden_act", absent="silu"),
        bias=config.flag("mlp_bias", absent=False),
        module="feed_forward",
    )
    attending = set(config.naturals("attn_layer_indices"))
    norms = ("input_layernorm", "pre_ff_layernorm")
    layers = [
        Layer(full if i in attending else mamba, mlp, norms) for i in range(layer_count(config))
    ]
    return decoder(config, "bamba", layers, final_norm_name="final_layernorm")
