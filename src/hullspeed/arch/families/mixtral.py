"""Mixtral: Mistral's attention with routed experts.

Source: ``modeling_mixtral`` in transformers; names as in the checkpoint (``block_sparse_moe``).
"""

from __future__ import annotations

from hullspeed.arch.families.common import attention, decoder, derived_head_dim, layer_count
from hullspeed.arch.fields import Fields
from hullspeed.arch.mixers import FullAttention, SlidingAttention
from hullspeed.arch.mlps import MIXTRAL, MoeMlp
from hullspeed.arch.model import Layer, ModelArch


def build(config: Fields) -> ModelArch:
    """Mixtral 8x7B and 8x22B."""
    settings = attention(config, head_dim=derived_head_dim(config))
    mixer = FullAttention(**settings)
    if config.has("sliding_window"):
        mixer = SlidingAttention(**settings, window_tokens=config.natural("sliding_window"))
    mlp = MoeMlp(
        experts=config.natural("num_local_experts"),
        experts_per_token=config.natural("num_experts_per_tok"),
        intermediate=config.natural("intermediate_size"),
        names=MIXTRAL,
        module="block_sparse_moe",
        activation=config.text("hidden_act", absent="silu"),
    )
    return decoder(config, "mixtral", (Layer(mixer, mlp),) * layer_count(config))
