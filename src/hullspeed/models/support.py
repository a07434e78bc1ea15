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
        mixer, mlp = attention_of(layer), mlp_of(layer)
        for what, fault in _faults(mixer, mlp, layer.norms):
            if fault:
                raise _unsupported(f"layer {i} with {what}", layer)


def attention_of(layer: Layer) -> FullAttention:
    """The layer's mixer, which is attention.

    Raises:
        UnsupportedModelError: if it is not.
    """
    if not isinstance(layer.mixer, FullAttention):
        raise _unsupported("a layer without attention", layer)
    return layer.mixer


def mlp_of(layer: Layer) -> DenseMlp:
    """The layer's MLP, which is dense.

    Raises:
        UnsupportedModelError: if it is not.
    """
    if not isinstance(layer.mlp, DenseMlp):
        raise _unsupported("a layer without a dense MLP", layer)
    return layer.mlp


def _unsupported(what: str, layer: Layer) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the embedded engine does not run {what}",
        seen=(layer.mixer.kind, layer.mlp.kind),
        fix="another engine may run it (--engine)",
    )


def _faults(mixer: FullAttention, mlp: DenseMlp, norms: tuple[str, ...]) -> list[tuple[str, bool]]:
    return [
        ("an output gate on its attention", mixer.output_gate),
        ("attention sinks", mixer.sinks),
        ("query heads that no whole number shares a key head", mixer.q_heads % mixer.kv_heads > 0),
        ("an odd rotary dimension", mixer.rotary_dim % 2 > 0),
        ("a head dimension that is no multiple of 16", mixer.head_dim % 16 > 0),
        (f"the activation {mlp.activation!r}", mlp.activation != "silu"),
        ("norms other than two", len(norms) != 2),
    ]
