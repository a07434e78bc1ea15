"""Architectures with the shapes of public configurations, built by hand so that these tests do not
depend on the configuration readers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hullspeed.arch.mixers import FullAttention, GatedDeltaNet, Mixer, SlidingAttention
from hullspeed.arch.mlps import DenseMlp, Mlp, MoeMlp
from hullspeed.arch.model import Extra, Layer, ModelArch, Rope

Shapes = Callable[[str], ModelArch]


def _attention(q: int, kv: int, dim: int, rotary: int | None = None) -> FullAttention:
    return FullAttention(
        q_heads=q, kv_heads=kv, head_dim=dim, rotary_dim=dim if rotary is None else rotary
    )


def _sliding(q: int, kv: int, dim: int, window: int) -> SlidingAttention:
    return SlidingAttention(
        q_heads=q, kv_heads=kv, head_dim=dim, rotary_dim=dim, window_tokens=window
    )


def _gdn(k: int, v: int) -> GatedDeltaNet:
    return GatedDeltaNet(k_heads=k, v_heads=v, k_dim=128, v_dim=128, conv_kernel=4)


def _model(
    family: str,
    mixers: list[Mixer],
    mlp: Mlp,
    *,
    hidden: int,
    vocab: int,
    context: int,
    mtp: Mixer | None = None,
    ssm: str | None = None,
) -> ModelArch:
    extras = () if mtp is None else (Extra(name="mtp", tensors=(), layers=(Layer(mtp, mlp),)),)
    return ModelArch(
        family=family,
        hidden=hidden,
        vocab=vocab,
        layers=tuple(Layer(mixer, mlp) for mixer in mixers),
        tied_embeddings=False,
        norm_eps=1e-6,
        rope=Rope(theta=1e6),
        max_context_tokens=context,
        extras=extras,
        options={"state_dtype": ssm} if ssm else {},
    )


def _hybrid(n: int, attention: Mixer, gdn: Mixer) -> list[Mixer]:
    return [attention if i % 4 == 3 else gdn for i in range(n)]


def _build(name: str) -> ModelArch:
    attention: Mixer
    if name == "qwen3.5-27b":
        attention = _attention(24, 4, 256, 64)
        return _model(
            "qwen3_5", _hybrid(64, attention, _gdn(16, 48)), DenseMlp(intermediate=17408),
            hidden=5120, vocab=248320, context=262144, mtp=attention, ssm="float32",
        )  # fmt: skip
    if name == "qwen3.6-35b-a3b":
        attention = _attention(16, 2, 256, 64)
        mlp = MoeMlp(experts=256, experts_per_token=8, intermediate=512, shared_intermediate=512)
        return _model(
            "qwen3_5_moe", _hybrid(40, attention, _gdn(16, 32)), mlp,
            hidden=2048, vocab=248320, context=262144, mtp=attention, ssm="float32",
        )  # fmt: skip
    dense = {
        "qwen3-32b": (64, 64, 8, 128, 5120, 25600, 151936, 40960),
        "qwen3-8b": (36, 32, 8, 128, 4096, 12288, 151936, 40960),
        "qwen3-0.6b": (28, 16, 8, 128, 1024, 3072, 151936, 40960),
        "llama-3.1-8b": (32, 32, 8, 128, 4096, 14336, 128256, 131072),
    }
    if name in dense:
        n, q, kv, dim, hidden, inter, vocab, context = dense[name]
        return _model(
            "qwen3", [_attention(q, kv, dim)] * n, DenseMlp(intermediate=inter),
            hidden=hidden, vocab=vocab, context=context,
        )  # fmt: skip
    if name == "gpt-oss-20b":
        mixers: list[Mixer] = [
            _sliding(64, 8, 64, 128) if i % 2 == 0 else _attention(64, 8, 64) for i in range(24)
        ]
        mlp = MoeMlp(experts=32, experts_per_token=4, intermediate=2880)
        return _model("gpt_oss", mixers, mlp, hidden=2880, vocab=201088, context=131072)
    if name == "gemma-3-27b":
        mixers = [
            _attention(32, 16, 128) if i % 6 == 5 else _sliding(32, 16, 128, 1024)
            for i in range(62)
        ]
        return _model(
            "gemma3", mixers, DenseMlp(intermediate=21504),
            hidden=5376, vocab=262208, context=131072,
        )  # fmt: skip
    raise KeyError(name)


@pytest.fixture(scope="session")
def shapes() -> Shapes:
    """Architecture by name."""
    return _build
