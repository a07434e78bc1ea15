"""How the embedded engine holds weights, on processors with and without the instructions."""

from __future__ import annotations

import dataclasses

import pytest

from hullspeed.arch.mixers import FullAttention
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Layer, ModelArch, Rope
from hullspeed.arch.quant import WeightFormat
from hullspeed.errors import UsageError
from hullspeed.memory.held import NATIVE_ISA, held_bytes, held_dtype
from hullspeed.memory.ours import held_weights


def arch(kind: str, *, tied: bool = True) -> ModelArch:
    mixer = FullAttention(q_heads=4, kv_heads=2, head_dim=64, rotary_dim=64)
    plain = ModelArch(
        family="llama",
        hidden=256,
        vocab=1024,
        layers=(Layer(mixer, DenseMlp(intermediate=512)),) * 2,
        tied_embeddings=tied,
        norm_eps=1e-5,
        rope=Rope(theta=10_000.0),
        max_context_tokens=512,
    )
    types = {spec.name: kind for spec in plain.tensors() if len(spec.shape) == 2}
    return dataclasses.replace(
        plain, quant="gguf", weight_format=WeightFormat(name="gguf", stored_types=types)
    )


@pytest.mark.parametrize(
    ("kind", "isa", "wanted"),
    [
        ("Q4_0", (NATIVE_ISA,), "native"),
        ("Q4_1", ("avx2", NATIVE_ISA), "native"),
        ("Q8_0", (NATIVE_ISA,), "native"),
        ("Q4_1", ("avx2", "avx512f"), "fp16"),
        ("Q6_K", (NATIVE_ISA,), "fp16"),
        ("F16", (NATIVE_ISA,), "fp16"),
    ],
)
def test_codes_need_the_type_and_the_instructions(
    kind: str, isa: tuple[str, ...], wanted: str
) -> None:
    assert held_dtype(arch(kind), "native", isa) == wanted
    assert held_dtype(arch(kind), "fp32", isa) == "fp32"


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 5), ("Q4_1", 5), ("Q8_0", 8.5)])
def test_bytes_of_codes(kind: str, bits: float) -> None:
    model = arch(kind)
    parts = {spec.name: spec for spec in model.tensors()}
    gate = parts[f"{model.prefix}layers.0.mlp.gate_proj.weight"]
    assert held_bytes(model, gate, "native") == 512 * 256 * bits / 8
    table = parts[f"{model.prefix}{model.embedding_name}.weight"]
    assert held_bytes(model, table, "native") == 1024 * 256 * (2 + bits / 8)  # and a head of codes
    norm = parts[f"{model.prefix}norm.weight"]
    assert held_bytes(model, norm, "native") == 4 * 256
    layers = 2 * (256 * (256 + 2 * 128 + 256) + 3 * 256 * 512)
    vectors = 4 * 256 * 5
    head = 1024 * 256 * (2 + bits / 8)
    assert held_weights(model, "native").decoder == layers * bits / 8 + head + vectors


def test_a_plain_checkpoint_is_held_in_fp16() -> None:
    plain = dataclasses.replace(arch("Q4_1"), weight_format=WeightFormat())
    assert held_dtype(plain, "native", (NATIVE_ISA,)) == "fp16"
    assert held_weights(plain, "native").decoder == held_weights(plain).decoder
    with pytest.raises(UsageError, match="fp16 or fp32"):
        held_weights(plain, "int3")
