"""Reading checkpoints: names, shapes, formats and what is wrong with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

from hullspeed.arch.mixers import FullAttention
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Layer, ModelArch, Rope
from hullspeed.errors import CorruptFileError, UnsupportedModelError, UsageError
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.ref import RefKernels
from hullspeed.models.decoder import Decoder
from hullspeed.models.gguf_weights import GgufWeights
from hullspeed.models.load import load_decoder, open_weights
from hullspeed.models.safetensors_weights import SafetensorsWeights
from hullspeed.models.weights import TensorWeights

ARCH = ModelArch(
    family="llama",
    hidden=64,
    vocab=50,
    layers=(
        Layer(
            FullAttention(q_heads=4, kv_heads=2, head_dim=16, rotary_dim=16),
            DenseMlp(intermediate=96),
        ),
    )
    * 2,
    tied_embeddings=False,
    norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    max_context_tokens=64,
)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {spec.name: torch.randn(spec.shape) for spec in ARCH.tensors()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_safetensors(tmp_path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    names = sorted(stored)
    paths = [tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-2.safetensors"]
    for path, part in zip(paths, (names[:7], names[7:]), strict=True):
        safetensors.torch.save_file({name: stored[name] for name in part}, path)
    weights = open_weights(paths, ARCH)
    assert isinstance(weights, SafetensorsWeights)
    weights.check(ARCH)
    for name, tensor in stored.items():
        assert torch.equal(weights.tensor(name), tensor.float())


def test_a_number_format_that_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(4, dtype=torch.int8)}, path)
    with pytest.raises(UnsupportedModelError, match="I8"):
        SafetensorsWeights([path]).tensor("a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"lacks 1 tensor.*model\.norm\.weight"),
        ({"model.layers.2.input_layernorm.weight": torch.ones(64)}, r"unexpected 1.*layers\.2"),
        ({"model.norm.weight": torch.ones(63)}, r"mis-shapes 1.*norm.*\(63,\).*\(64,\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    tensors: dict[str, torch.Tensor], change: dict[str, Any], message: str
) -> None:
    changed = {k: v for k, v in (tensors | change).items() if v is not None}
    with pytest.raises(CorruptFileError, match=message):
        Decoder(ARCH, TensorWeights(changed), RefKernels())


def test_harmless_extra_tensors_are_let_pass(tensors: dict[str, torch.Tensor]) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    TensorWeights(tensors | extra).check(ARCH)
    TensorWeights(tensors).check(replace(ARCH, tied_embeddings=True))


def test_files_of_no_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pytorch_model\.bin"):
        open_weights([tmp_path / "pytorch_model.bin"], ARCH)


def write_gguf(path: Path, tensors: dict[str, torch.Tensor], architecture: str) -> None:
    """As llama.cpp's converter writes it: its names, and for llama its order of rotary rows."""
    writer = gguf.GGUFWriter(path, architecture)
    blocks = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], len(ARCH.layers))
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        data = tensor.numpy()
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = 4 if stem.endswith("q_proj") else 2
            shape = (heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
            data = np.ascontiguousarray(data.reshape(shape).swapaxes(1, 2).reshape(data.shape))
        stored = blocks.get_name(stem)
        assert stored is not None
        writer.add_tensor(f"{stored}.{kind}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_gives_the_tensors_of_the_checkpoint(
    tmp_path: Path, tensors: dict[str, torch.Tensor], architecture: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tensors, architecture)
    weights = GgufWeights([path], ARCH)
    weights.check(ARCH)
    for name, tensor in tensors.items():
        assert torch.equal(weights.tensor(name), tensor), name


def test_gguf_with_a_tensor_too_many_or_too_few(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "m.gguf"
    less = {k: v for k, v in tensors.items() if "layers.1.mlp.up_proj" not in k}
    write_gguf(path, less, "llama")
    with pytest.raises(CorruptFileError, match=r"lacks.*layers\.1\.mlp\.up_proj"):
        load_decoder([path], ARCH, kernels="ref")
    write_gguf(path, tensors, "llama")
    with pytest.raises(CorruptFileError, match=r"unexpected.*blk\.1\.attn_k"):
        load_decoder([path], replace(ARCH, layers=ARCH.layers[:1]), kernels="ref")
    with pytest.raises(CorruptFileError, match="two shards"):
        load_decoder([path, path], ARCH, kernels="ref")


def test_frequency_factors_of_gguf_turn_the_heads(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    """Llama 3.1 in GGUF: the factors are those of its config's scaling."""
    scaling = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    from hullspeed.models.rope import frequencies

    plain = frequencies(ARCH.rope, 16)
    scaled_rope = Rope(theta=10_000.0, scaling=tuple(scaling.items()))

    class WithFactors(TensorWeights):
        def frequency_factors(self) -> torch.Tensor:
            return plain / frequencies(scaled_rope, 16)

    batch = Batch.of([SpanInput(list(range(40)), 0, [0], sample=True)])
    logits = []
    for arch, weights in (
        (replace(ARCH, rope=scaled_rope), TensorWeights(tensors)),
        (ARCH, WithFactors(tensors)),
        (ARCH, TensorWeights(tensors)),
    ):
        decoder = Decoder(arch, weights, RefKernels())
        decoder.allocate_kv(1)
        logits.append(decoder.forward(batch))
    torch.testing.assert_close(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
