"""DeepSeek V2 and V3: latent attention, a few dense layers, then many small experts.

Source: ``modeling_deepseek_v2`` and ``modeling_deepseek_v3`` in transformers; the layer for
multi-token prediction from the README_WEIGHTS of DeepSeek-V3.
"""

from __future__ import annotations

from hullspeed.arch.families.common import decoder, layer_count, vectors
from hullspeed.arch.families.llama import dense_mlp
from hullspeed.arch.fields import Fields
from hullspeed.arch.mixers import LatentAttention
from hullspeed.arch.mlps import Mlp, MoeMlp
from hullspeed.arch.model import Extra, Layer, ModelArch
from hullspeed.arch.tensors import Role, TensorSpec


def build_v2(config: Fields) -> ModelArch:
    """DeepSeek V2 and V2-Lite."""
    return _build(config, "deepseek_v2", correction_bias=False)


def build_v3(config: Fields) -> ModelArch:
    """DeepSeek V3, V3.1 and R1."""
    corrected = config.text("topk_method", absent="noaux_tc") == "noaux_tc"
    return _build(config, "deepseek_v3", correction_bias=corrected)


def _build(config: Fields, family: str, *, correction_bias: bool) -> ModelArch:
    mixer = LatentAttention(
        q_heads=config.natural("num_attention_heads"),
        q_rank=config.natural_or(0, "q_lora_rank"),
        kv_rank=config.natural("kv_lora_rank"),
        rotary_dim=config.natural("qk_rope_head_dim"),
        nope_dim=config.natural("qk_nope_head_dim"),
        v_dim=config.natural("v_head_dim"),
        bias=config.flag("attention_bias", absent=False),
    )
    experts = MoeMlp(
        experts=config.natural("n_routed_experts"),
        experts_per_token=config.natural("num_experts_per_tok"),
        intermediate=config.natural("moe_intermediate_size"),
        shared_intermediate=config.natural("moe_intermediate_size")
        * config.natural_or(0, "n_shared_experts", zero=True),
        correction_bias=correction_bias,
        shared_name="shared_experts",
        activation=config.text("hidden_act", absent="silu"),
    )
    first = config.natural("first_k_dense_replace", zero=True)
    step = config.natural_or(1, "moe_layer_freq")
    count, dense = layer_count(config), dense_mlp(config)
    mlps: list[Mlp] = [dense if i < first or i % step else experts for i in range(count)]
    options = {
        name: config.values.get(name)
        for name in ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob")
    }
    depth = config.natural_or(0, "num_nextn_predict_layers", zero=True)
    extras: tuple[Extra, ...] = ()
    if depth:
        extras = (_mtp(config, Layer(mixer, experts), first=count, depth=depth),)
    return decoder(
        config, family, [Layer(mixer, mlp) for mlp in mlps], options=options, extras=extras
    )


def _mtp(config: Fields, layer: Layer, *, first: int, depth: int) -> Extra:
    """Layers after the last one, each with its own copy of the embedding and the head."""
    hidden, vocab = config.natural("hidden_size"), config.natural("vocab_size")
    specs: list[TensorSpec] = []
    for i in range(first, first + depth):
        root = f"model.layers.{i}."
        specs += [tensor.under(root) for tensor in layer.tensors(hidden)]
        specs += [
            TensorSpec(f"{root}embed_tokens.weight", (vocab, hidden), Role.EMBEDDING),
            TensorSpec(f"{root}shared_head.head.weight", (vocab, hidden), Role.HEAD),
            # Not quantized in the official checkpoint.
            TensorSpec(f"{root}eh_proj.weight", (hidden, 2 * hidden), Role.GATE),
        ]
        names = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
        specs += vectors(root, hidden, *names)
    return Extra(name="mtp", tensors=tuple(specs), layers=(layer,) * depth)
