"""What the decoder computes; everything else is refused before a weight is read."""

from __future__ import annotations

from hullspeed.arch.mixers import FullAttention
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Layer, ModelArch
from hullspeed.errors import UnsupportedModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def check_supported(arch: ModelArch) -> None:
    """Refuse what this decoder would compute wrongly.

    Raises:
        UnsupportedModelError: naming the family, layer kind or particular.
    """
    if arch.family not in FAMILIES:
        raise UnsupportedModelError(
            "the embedded engine does not run this family",
            seen=arch.family,
            fix=f"it runs {', '.join(FAMILIES)}; another engine may run it (--engine)",
        )
    for i, layer in enumerate(arch.layers):
        for what, fault in _faults(layer):
            if fault:
                raise UnsupportedModelError(
                    f"the embedded engine does not run layer {i}: {what}",
                    seen=(layer.mixer.kind, layer.mlp.kind),
                    fix="another engine may run it (--engine)",
                )


def _faults(layer: Layer) -> list[tuple[str, bool]]:
    mixer, mlp = layer.mixer, layer.mlp
    if not isinstance(mixer, FullAttention):
        return [("not an attention layer", True)]
    if not isinstance(mlp, DenseMlp):
        return [("not a dense MLP", True)]
    return [
        ("attention with an output gate", mixer.output_gate),
        ("attention sinks", mixer.sinks),
        ("query heads that no whole number shares a key head", mixer.q_heads % mixer.kv_heads > 0),
        ("an odd rotary dimension", mixer.rotary_dim % 2 > 0),
        ("a head dimension that is no multiple of 16", mixer.head_dim % 16 > 0),
        (f"the activation {mlp.activation!r}", mlp.activation != "silu"),
        ("norms other than two", len(layer.norms) != 2),
    ]
