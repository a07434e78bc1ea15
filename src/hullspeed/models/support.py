"""What the decoder computes; everything else is refused before a weight is read."""

from __future__ import annotations

from hullspeed.arch.mixers import FullAttention, GatedDeltaNet
from hullspeed.arch.mlps import DenseMlp, MoeMlp
from hullspeed.arch.model import Layer, ModelArch
from hullspeed.arch.schemes import PLAIN
from hullspeed.errors import UnsupportedModelError
from hullspeed.models.families import FAMILIES
from hullspeed.models.mlp import ACTIVATIONS
from hullspeed.models.quantized.readers import READERS, unreadable
from hullspeed.units import format_bytes


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
    check_format(arch)
    for i, layer in enumerate(arch.layers):
        for what, fault in (*_mixer_faults(layer), *_mlp_faults(layer)):
            if fault:
                raise UnsupportedModelError(
                    f"the embedded engine does not run layer {i} with {what}",
                    seen=(layer.mixer.kind, layer.mlp.kind),
                    fix="another engine may run it (--engine)",
                )


_SKIPPED = {
    "vision": "vision tensors ({}; images are refused)",
    "mtp": "tensors of the multi-token-prediction layer ({}; no drafts)",
    "unlisted": "tensors that the architecture does not name ({})",
}


def skipped_parts(arch: ModelArch, *, draft: bool = False) -> tuple[str, ...]:
    """Parts of the checkpoint that are not loaded: tensors, bytes in the files, and what it means
    for a user.
    """
    stored = arch.weight_format.stored_bytes or {}
    return tuple(
        f"{len(extra.tensors)} "
        + _SKIPPED[extra.name].format(
            format_bytes(sum(stored.get(t.name, 0) for t in extra.tensors))
        )
        for extra in arch.extras
        if extra.name in _SKIPPED and not (draft and extra.name == "mtp")
    )


def check_format(arch: ModelArch) -> None:
    """Refuse a weight format that is not read here.

    Raises:
        UnsupportedModelError: naming it.
    """
    found = arch.weight_format
    if found.name in ("none", "gguf"):
        return
    schemes = {found.scheme, *found.layers.values()} - {PLAIN}
    reasons = [reason for scheme in schemes if (reason := unreadable(scheme))]
    if not schemes:  # only its headers were understood
        reasons = [f"the quantization {arch.quant!r}"]
    for reason in reasons:
        raise UnsupportedModelError(
            f"the embedded engine does not read {reason}",
            seen=found.name,
            fix=f"it reads {', '.join(sorted(READERS))}; another engine may run it (--engine)",
        )


def _mixer_faults(layer: Layer) -> list[tuple[str, bool]]:
    mixer = layer.mixer
    if isinstance(mixer, FullAttention):
        return [
            (
                "query heads that no whole number shares a key head",
                mixer.q_heads % mixer.kv_heads > 0,
            ),
            ("an odd rotary dimension", mixer.rotary_dim % 2 > 0),
            ("a head dimension that is no multiple of 16", mixer.head_dim % 16 > 0),
        ]
    if isinstance(mixer, GatedDeltaNet):
        return [("a value head whose width is no multiple of 16", mixer.v_dim % 16 > 0)]
    return [("neither attention nor a gated delta rule", True)]


def _mlp_faults(layer: Layer) -> list[tuple[str, bool]]:
    mlp = layer.mlp
    if not isinstance(mlp, DenseMlp | MoeMlp):
        return [("no MLP", True)]
    found = [
        (f"the activation {mlp.activation!r}", mlp.activation not in ACTIVATIONS),
        ("an MLP without a gate", len(mlp.names) != 3),
        ("norms other than two or four", len(layer.norms) not in (2, 4)),
    ]
    if isinstance(mlp, MoeMlp):
        found.append(("a router with a correction bias", mlp.correction_bias))
    return found
