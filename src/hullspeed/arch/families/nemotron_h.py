"""Nemotron-H and Nemotron 3: layers that are a Mamba-2 mixer, attention, an MLP or experts.

Source: ``modeling_nemotron_h`` in transformers; names as in the checkpoint (``backbone``).
"""

from __future__ import annotations

from collections.abc import Callable

from hullspeed.arch.families.common import attention, decoder
from hullspeed.arch.fields import MAX_LAYERS, Fields
from hullspeed.arch.mixers import FullAttention, Mamba2, NoMixer
from hullspeed.arch.mlps import UNGATED, DenseMlp, MoeMlp, NoMlp
from hullspeed.arch.model import Layer, ModelArch, Rope

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_ALIASES = {"linear_attention": "mamba", "full_attention": "attention"}


def build(config: Fields) -> ModelArch:
    """Nemotron-H 8B to 56B, Nemotron Nano 2 and 3."""
    if config.has("moe_latent_size"):
        config.wrong("moe_latent_size", "absent: latent experts are not sized here")
    makers: dict[str, Callable[[Fields], Layer]] = {
        "mamba": _mamba,
        "attention": _attention,
        "mlp": _mlp,
        "moe": _experts,
    }
    kinds = _kinds(config)
    layers = {kind: makers[kind](config) for kind in set(kinds)}
    return decoder(
        config,
        "nemotron_h",
        [layers[kind] for kind in kinds],
        prefix="backbone.",
        embedding_name="embeddings",
        final_norm_name="norm_f",
        norm_eps=config.number("layer_norm_epsilon", "rms_norm_eps", "norm_eps"),
        rope=Rope(theta=config.number_or(10_000.0, "rope_theta")),
        options={"rotary": False, "state_dtype": config.text("mamba_ssm_cache_dtype", "float32")},
    )


def _kinds(config: Fields) -> list[str]:
    """Each layer's kind, from ``layers_block_type`` or the letters of the older pattern."""
    listed = config.words("layers_block_type") or config.words("layer_types")
    if listed is None:
        pattern = config.text("hybrid_override_pattern")
        if unknown := set(pattern) - set(_LETTERS):
            config.wrong("hybrid_override_pattern", f"made of M * - E, not {sorted(unknown)}")
        listed = [_LETTERS[letter] for letter in pattern]
    kinds = [_ALIASES.get(kind, kind) for kind in listed]
    if not 1 <= len(kinds) <= MAX_LAYERS or set(kinds) - set(_LETTERS.values()):
        config.wrong("layers_block_type", "a list of mamba, attention, mlp and moe")
    if config.has("num_hidden_layers") and config.natural("num_hidden_layers") != len(kinds):
        config.wrong("num_hidden_layers", f"the {len(kinds)} layers of the pattern")
    return kinds


def _mamba(config: Fields) -> Layer:
    mixer = Mamba2(
        heads=config.natural("mamba_num_heads"),
        head_dim=config.natural("mamba_head_dim"),
        groups=config.natural("n_groups"),
        state_dim=config.natural("ssm_state_size"),
        conv_kernel=config.natural("conv_kernel"),
        conv_bias=config.flag("use_conv_bias"),
        projection_bias=config.flag("mamba_proj_bias"),
        module="mixer",
    )
    return Layer(mixer, NoMlp(), ("norm",))


def _attention(config: Fields) -> Layer:
    biased = config.flag("attention_bias")
    head_dim = config.natural("head_dim", "attention_head_dim")
    settings = attention(
        config, head_dim=head_dim, qkv_bias=biased, output_bias=biased, module="mixer"
    )
    return Layer(FullAttention(**settings), NoMlp(), ("norm",))


def _mlp(config: Fields) -> Layer:
    mlp = DenseMlp(
        intermediate=config.natural("intermediate_size"),
        activation=config.text("mlp_hidden_act"),
        bias=config.flag("mlp_bias"),
        names=UNGATED,
        module="mixer",
    )
    return Layer(NoMixer(), mlp, ("norm",))


def _experts(config: Fields) -> Layer:
    mlp = MoeMlp(
        experts=config.natural("n_routed_experts"),
        experts_per_token=config.natural("num_experts_per_tok"),
        intermediate=config.natural("moe_intermediate_size"),
        shared_intermediate=config.natural("moe_shared_expert_intermediate_size")
        * config.natural("n_shared_experts", zero=True),
        correction_bias=True,
        activation=config.text("mlp_hidden_act"),
        names=UNGATED,
        shared_name="shared_experts",
        module="mixer",
    )
    return Layer(NoMixer(), mlp, ("norm",))
