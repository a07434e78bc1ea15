"""The Pixtral vision tower with Mistral 3's projector.

Source: ``modeling_pixtral`` and ``modeling_mistral3`` in transformers.
"""

from __future__ import annotations

from hullspeed.arch.families.common import linear, vectors
from hullspeed.arch.fields import Fields
from hullspeed.arch.model import Extra
from hullspeed.arch.tensors import Role, TensorSpec


def vision_tower(config: Fields, text_hidden: int) -> Extra:
    """Weights of the tower and the projector, named as in the checkpoint."""
    vision = config.section("vision_config")
    width, inner = vision.natural("hidden_size"), vision.natural("intermediate_size")
    patch, channels = vision.natural("patch_size"), vision.natural("num_channels")
    root = "vision_tower."
    specs = [TensorSpec(f"{root}patch_conv.weight", (width, channels, patch, patch), Role.VISION)]
    specs += vectors(root, width, "ln_pre.weight", role=Role.VISION)
    for i in range(vision.natural("num_hidden_layers")):
        layer = f"{root}transformer.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            specs += linear(f"{layer}attention.{name}", width, width, bias=False, role=Role.VISION)
        for name, rows, columns in (
            ("gate_proj", inner, width),
            ("up_proj", inner, width),
            ("down_proj", width, inner),
        ):
            full_name = f"{layer}feed_forward.{name}"
            specs += linear(full_name, rows, columns, bias=False, role=Role.VISION)
        names = ("attention_norm.weight", "ffn_norm.weight")
        specs += vectors(layer, width, *names, role=Role.VISION)
    return Extra(name="vision", tensors=(*specs, *_projector(config, width, text_hidden)))


def _projector(config: Fields, width: int, text_hidden: int) -> list[TensorSpec]:
    merge = config.natural("spatial_merge_size")
    bias = config.flag("multimodal_projector_bias")
    root = "multi_modal_projector."
    return [
        *vectors(root, width, "norm.weight", role=Role.VISION),
        *linear(
            f"{root}patch_merger.merging_layer", width, width * merge**2, bias=False,
            role=Role.VISION,
        ),
        *linear(f"{root}linear_1", text_hidden, width, bias=bias, role=Role.VISION),
        *linear(f"{root}linear_2", text_hidden, text_hidden, bias=bias, role=Role.VISION),
    ]  # fmt: skip
