"""Qwen 2, 3, 3-MoE, 3-Next and 3.5 (whose shapes 3.6 and 3.8 share).

Source: ``modeling_qwen2`` to ``modeling_qwen3_5_moe`` in transformers.
"""

from __future__ import annotations

from dataclasses import replace

from hullspeed.arch.families.common import (
    decoder,
    derived_head_dim,
    full_attention,
    layer_count,
    linear,
    mtp,
    vectors,
)
from hullspeed.arch.families.llama import dense_mlp
from hullspeed.arch.fields import Fields
from hullspeed.arch.mixers import FullAttention, GatedDeltaNet, SlidingAttention
from hullspeed.arch.mlps import DenseMlp, Mlp, MoeMlp
from hullspeed.arch.model import Extra, Layer, ModelArch
from hullspeed.arch.tensors import Role, TensorSpec


def build_qwen2(config: Fields) -> ModelArch:
    """Qwen 2 and 2.5: biases on queries, keys and values."""
    mixer = full_attention(config, head_dim=derived_head_dim(config), qkv_bias=True)
    return decoder(config, "qwen2", _dense_layers(config, mixer))


def build_qwen3(config: Fields) -> ModelArch:
    """Qwen 3, dense: norms on queries and keys."""
    return decoder(config, "qwen3", _dense_layers(config, _qwen3_attention(config)))


def build_qwen3_moe(config: Fields) -> ModelArch:
    """Qwen 3 with routed experts."""
    mixer = _qwen3_attention(config)
    layers = [Layer(mixer, mlp) for mlp in _mlps(config, fused=False)]
    return decoder(config, "qwen3_moe", layers, options=_routing(config))


def build_qwen3_next(config: Fields) -> ModelArch:
    """Qwen 3-Next: three Gated DeltaNet layers to one of gated full attention."""
    mixers = _hybrid_mixers(config, fused_projections=True)
    layers = [
        Layer(mixer, mlp) for mixer, mlp in zip(mixers, _mlps(config, fused=False), strict=True)
    ]
    options = {"norm_offset": 1.0, **_routing(config)}
    # Its config.json says nothing of the one layer that its checkpoints hold.
    extras = _mtp_layers(config, layers[-1].mlp, absent=1)
    return decoder(config, "qwen3_next", layers, options=options, extras=extras)


def build_qwen3_5_text(config: Fields, outer: Fields | None = None) -> ModelArch:
    """The language model of Qwen 3.5, 3.6 and 3.8, dense or with experts."""
    is_moe = "moe" in config.text("model_type")
    quantized = any(place.has("quantization_config") for place in (config, outer or config))
    # Quantized checkpoints list the experts one by one.
    mlps = (
        _mlps(config, fused=not quantized) if is_moe else [dense_mlp(config)] * layer_count(config)
    )
    mixers = _hybrid_mixers(config, fused_projections=False)
    layers = [Layer(mixer, mlp) for mixer, mlp in zip(mixers, mlps, strict=True)]
    options: dict[str, object] = {
        "norm_offset": 1.0,
        "state_dtype": config.text("mamba_ssm_dtype", absent="float32"),
        **(_routing(config) if is_moe else {}),
    }
    extras = _mtp_layers(config, mlps[-1])
    family = "qwen3_5_moe" if is_moe else "qwen3_5"
    return decoder(config, family, layers, outer=outer, options=options, extras=extras)


def build_qwen3_5(config: Fields) -> ModelArch:
    """Qwen 3.5 with its vision tower."""
    text = build_qwen3_5_text(config.section("text_config"), outer=config)
    tower = _vision_tower(config.section("vision_config"))
    return replace(text, prefix="model.language_model.", extras=(*text.extras, tower))


def _mtp_layers(config: Fields, mlp: Mlp, absent: int = 0) -> tuple[Extra, ...]:
    """The multi-token-prediction layers that the config states, full attention each."""
    depth = config.natural_or(absent, "mtp_num_hidden_layers", zero=True)
    if not depth:
        return ()
    layer = Layer(_gated_attention(config), mlp)
    return (mtp(config.natural("hidden_size"), (layer,) * depth),)


def _dense_layers(config: Fields, full: FullAttention) -> list[Layer]:
    """All layers alike; ``use_sliding_window`` bounds those from ``max_window_layers`` on."""
    mlp, count = dense_mlp(config), layer_count(config)
    if not config.flag("use_sliding_window", absent=False):
        return [Layer(full, mlp)] * count
    window = config.natural("sliding_window")
    first = config.natural("max_window_layers", zero=True)
    names = FullAttention.__dataclass_fields__
    settings = {name: getattr(full, name) for name in names if name != "kind"}
    bounded = SlidingAttention(**settings, window_tokens=window)
    return [Layer(full if i < first else bounded, mlp) for i in range(count)]


def _qwen3_attention(config: Fields) -> FullAttention:
    biased = config.flag("attention_bias", absent=False)
    return full_attention(config, qkv_bias=biased, output_bias=biased, qk_norm=True)


def _gated_attention(config: Fields) -> FullAttention:
    gated = config.flag("attn_output_gate", absent=True)  # Qwen3-Next does not state it
    return replace(_qwen3_attention(config), output_gate=gated)


def _hybrid_mixers(
    config: Fields, *, fused_projections: bool
) -> list[GatedDeltaNet | FullAttention]:
    count = layer_count(config)
    kinds = config.words("layer_types", count)
    if kinds is None:
        every = config.natural("full_attention_interval")
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    linear_mixer = GatedDeltaNet(
        k_heads=config.natural("linear_num_key_heads"),
        v_heads=config.natural("linear_num_value_heads"),
        k_dim=config.natural("linear_key_head_dim"),
        v_dim=config.natural("linear_value_head_dim"),
        conv_kernel=config.natural("linear_conv_kernel_dim"),
        fused_projections=fused_projections,
    )
    if linear_mixer.v_heads % linear_mixer.k_heads:
        config.wrong("linear_num_value_heads", "a multiple of linear_num_key_heads")
    table: dict[str, GatedDeltaNet | FullAttention] = {
        "linear_attention": linear_mixer,
        "full_attention": _gated_attention(config),
    }
    if unknown := set(kinds) - set(table):
        config.wrong("layer_types", f"made of {', '.join(table)}, not {', '.join(unknown)}")
    return [table[kind] for kind in kinds]


def _mlps(config: Fields, *, fused: bool) -> list[Mlp]:
    """Each layer's MLP: experts, but for ``mlp_only_layers`` and every ``decoder_sparse_step``."""
    shared = config.natural_or(0, "shared_expert_intermediate_size", zero=True)
    experts = MoeMlp(
        experts=config.natural("num_experts", "num_local_experts"),  # the latter: transformers 5
        experts_per_token=config.natural("num_experts_per_tok"),
        intermediate=config.natural("moe_intermediate_size"),
        shared_intermediate=shared,
        shared_gate=bool(shared),
        fused_experts=fused,
        activation=config.text("hidden_act", absent="silu"),
    )
    if experts.experts_per_token > experts.experts:
        config.wrong("num_experts_per_tok", f"at most the {experts.experts} experts")
    only = set(config.naturals("mlp_only_layers"))
    step = config.natural_or(1, "decoder_sparse_step")
    routed = [i not in only and (i + 1) % step == 0 for i in range(layer_count(config))]
    dense: DenseMlp | None = None if all(routed) else dense_mlp(config)
    return [experts if is_routed or dense is None else dense for is_routed in routed]


def _routing(config: Fields) -> dict[str, object]:
    return {"norm_topk_prob": config.flag("norm_topk_prob", absent=True)}


def _vision_tower(vision: Fields) -> Extra:
    """Patch embedding, blocks and merger. Source: ``Qwen3_5VisionModel``."""
    width, inner = vision.natural("hidden_size"), vision.natural("intermediate_size")
    patch, merge = vision.natural("patch_size"), vision.natural("spatial_merge_size")
    cube = (vision.natural("in_channels"), vision.natural("temporal_patch_size"), patch, patch)
    root, role = "model.visual.", Role.VISION
    specs = [
        TensorSpec(f"{root}patch_embed.proj.weight", (width, *cube), role),
        TensorSpec(f"{root}patch_embed.proj.bias", (width,), role),
        TensorSpec(
            f"{root}pos_embed.weight", (vision.natural("num_position_embeddings"), width), role
        ),
    ]
    for i in range(vision.natural("depth")):
        block = f"{root}blocks.{i}."
        for name, rows, columns in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.linear_fc1", inner, width),
            ("mlp.linear_fc2", width, inner),
        ):
            specs += linear(block + name, rows, columns, bias=True, role=role)
        for norm in ("norm1", "norm2"):
            specs += vectors(block, width, f"{norm}.weight", f"{norm}.bias", role=role)
    merged = width * merge**2
    specs += vectors(f"{root}merger.norm.", width, "weight", "bias", role=role)
    specs += linear(f"{root}merger.linear_fc1", merged, merged, bias=True, role=role)
    out = vision.natural("out_hidden_size")
    specs += linear(f"{root}merger.linear_fc2", out, merged, bias=True, role=role)
    return Extra(name="vision", tensors=tuple(specs))
