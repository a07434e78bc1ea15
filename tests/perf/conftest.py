"""Architectures and ceilings with round numbers."""

from __future__ import annotations

import pytest

from hullspeed.arch.mixers import FullAttention, GatedDeltaNet, SlidingAttention
from hullspeed.arch.mlps import DenseMlp, MoeMlp
from hullspeed.arch.model import Layer, ModelArch, Rope
from hullspeed.hardware.ceilings import Ceilings, Curve, Overheads


def dense_arch(n_layers: int = 4, *, tied: bool = True) -> ModelArch:
    mixer = FullAttention(q_heads=8, kv_heads=2, head_dim=64, rotary_dim=64)
    return arch_of((Layer(mixer, DenseMlp(intermediate=1024)),) * n_layers, tied=tied)


def arch_of(layers: tuple[Layer, ...], *, tied: bool = True, quant: str = "none") -> ModelArch:
    return ModelArch(
        family="llama",
        hidden=512,
        vocab=1000,
        layers=layers,
        tied_embeddings=tied,
        norm_eps=1e-5,
        rope=Rope(theta=1e4),
        max_context_tokens=8192,
        quant=quant,
    )


def moe_arch() -> ModelArch:
    mixer = FullAttention(q_heads=8, kv_heads=2, head_dim=64, rotary_dim=64)
    mlp = MoeMlp(experts=32, experts_per_token=4, intermediate=256)
    return arch_of((Layer(mixer, mlp),) * 2)


def hybrid_arch() -> ModelArch:
    full = Layer(
        FullAttention(q_heads=8, kv_heads=2, head_dim=64, rotary_dim=64),
        DenseMlp(intermediate=1024),
    )
    linear = Layer(
        GatedDeltaNet(k_heads=4, v_heads=8, k_dim=64, v_dim=64, conv_kernel=4),
        DenseMlp(intermediate=1024),
    )
    sliding = Layer(
        SlidingAttention(q_heads=8, kv_heads=2, head_dim=64, rotary_dim=64, window_tokens=256),
        DenseMlp(intermediate=1024),
    )
    return arch_of((linear, linear, sliding, full))


@pytest.fixture
def ceilings() -> Ceilings:
    """1 GFLOP/s everywhere, 1 GB/s everywhere, no overheads."""
    flat = Curve((1.0,), (1e9,))
    return Ceilings(
        fingerprint="test",
        source="calibrated",
        measured_at="",
        threads=1,
        dram_bytes_per_s=1e9,
        linear_flops_per_s={"fp16": flat, "fp32": flat},
        head_flops_per_s={"fp16": flat, "fp32": flat},
        decode_bytes_per_s=flat,
        chunk_flops_per_s=flat,
        overheads=Overheads(
            step_s=0.0,
            layer_s=0.0,
            layer_token_s=0.0,
            sequence_s=0.0,
            request_s=0.0,
            prompt_token_s=0.0,
            stream_token_s=0.0,
        ),
        relative_error=0.2,
    )
