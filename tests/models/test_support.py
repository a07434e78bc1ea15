"""What is not computed is refused before a weight is read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hullspeed.arch.mixers import FullAttention, GatedDeltaNet, Mixer, NoMixer
from hullspeed.arch.mlps import UNGATED, DenseMlp, Mlp, MoeMlp, NoMlp
from hullspeed.arch.model import Layer, ModelArch, Rope
from hullspeed.errors import UnsupportedModelError
from hullspeed.models.support import check_supported

ATTENTION = FullAttention(q_heads=4, kv_heads=2, head_dim=16, rotary_dim=16)
MLP = DenseMlp(intermediate=32)


def arch_of(mixer: Mixer = ATTENTION, mlp: Mlp = MLP, family: str = "llama") -> ModelArch:
    return ModelArch(
        family=family,
        hidden=64,
        vocab=10,
        layers=(Layer(ATTENTION, MLP), Layer(mixer, mlp)),
        tied_embeddings=True,
        norm_eps=1e-5,
        rope=Rope(theta=1e4),
        max_context_tokens=64,
    )


def test_plain_layers_are_supported() -> None:
    check_supported(arch_of())


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        (arch_of(family="bamba"), "this family"),
        (arch_of(replace(ATTENTION, q_heads=3)), "layer 1 with query heads"),
        (arch_of(replace(ATTENTION, head_dim=40)), "multiple of 16"),
        (arch_of(replace(ATTENTION, rotary_dim=7)), "odd"),
        (arch_of(mlp=DenseMlp(intermediate=32, activation="relu2")), "relu2"),
        (arch_of(mlp=DenseMlp(intermediate=32, names=UNGATED)), "without a gate"),
        (arch_of(mlp=NoMlp()), "no MLP"),
        (
            arch_of(
                mlp=MoeMlp(experts=4, experts_per_token=2, intermediate=8, correction_bias=True)
            ),
            "correction bias",
        ),
        (
            arch_of(GatedDeltaNet(k_heads=1, v_heads=1, k_dim=16, v_dim=24, conv_kernel=4)),
            "value head",
        ),
        (arch_of(NoMixer()), "neither attention"),
    ],
)
def test_what_is_not_computed_is_refused(arch: ModelArch, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_supported(arch)
