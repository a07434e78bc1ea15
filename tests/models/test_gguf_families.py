"""GGUF files of families whose weights llama.cpp's converter rearranges, against transformers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from hullspeed.arch.gguf_arch import arch_from_gguf
from hullspeed.arch.mlps import MoeMlp
from hullspeed.errors import UnsupportedModelError
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.models.decoder import Decoder
from hullspeed.models.gguf_weights import GgufWeights
from hullspeed.models.load import load_decoder
from support.families import VOCAB, write_family
from support.gguf_families import ARCHITECTURES, CHANGES, write_gguf_of


def logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    decoder.allocate_kv(4, 64)
    decoder.allocate_states(2)
    batch = Batch.of([SpanInput(tokens, 0, [1, 0, 3], True, -1, 0)])
    return decoder.forward(replace(batch, logits_rows=np.arange(len(tokens))))


def wanted(module: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = module(torch.tensor([tokens])).logits[0]
    return result


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    module = write_family(tmp_path / "hf", family, **CHANGES.get(family, {}))
    path = tmp_path / "m.gguf"
    write_gguf_of(path, family, module)
    arch = arch_from_gguf([path])
    assert not arch.extras  # every tensor has its place
    decoder = load_decoder([path], arch, kernels="ref", weight_dtype="fp32")
    tokens = random.Random(1).choices(range(VOCAB), k=150)  # beyond a window and a page
    torch.testing.assert_close(logits(decoder, tokens), wanted(module, tokens), atol=1e-4, rtol=0)


def test_quantized_experts_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    """Each expert by itself: its dequantized rows, and the same as blocks of codes."""
    module = write_family(
        tmp_path / "hf", "qwen3_moe", **CHANGES["qwen3_moe"], moe_intermediate_size=64
    )
    path = tmp_path / "m.gguf"
    write_gguf_of(path, "qwen3_moe", module, expert_type="Q8_0")
    arch = arch_from_gguf([path])
    mlp = arch.layers[0].mlp
    assert isinstance(mlp, MoeMlp)
    weights = GgufWeights([path], arch)
    weights.check(arch)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for part in ("gate", "up", "down"):
        whole = stored[f"blk.1.ffn_{part}_exps.weight"]
        values = gguf.quants.dequantize(whole.data, whole.tensor_type)
        for i in range(mlp.experts):
            name = f"model.layers.1.mlp.experts.{i}.{part}_proj.weight"
            assert np.array_equal(weights.tensor(name).numpy(), values[i])
            blocks = weights.blocks(name)
            assert blocks is not None
            assert np.array_equal(blocks.dequantize(), values[i])


def test_experts_in_a_tensor_each_are_refused(tmp_path: Path) -> None:
    """As Mixtral's first conversions came."""
    module = write_family(tmp_path / "hf", "mixtral")
    path, older = tmp_path / "m.gguf", tmp_path / "older.gguf"
    write_gguf_of(path, "mixtral", module)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(older, "llama")
    for key, field in reader.fields.items():
        if key.startswith("llama."):
            writer.add_key_value(key, field.contents(), field.types[0], *field.types[1:2])
    for tensor in reader.tensors:
        whole = np.array(tensor.data)
        if "_exps." not in tensor.name:
            writer.add_tensor(tensor.name, whole)
            continue
        for i, part in enumerate(whole):
            writer.add_tensor(tensor.name.replace("_exps.", f".{i}."), part.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="a tensor for each expert"):
        arch_from_gguf([older])


def test_layers_behind_the_decoder_are_its_drafts(tmp_path: Path) -> None:
    """llama.cpp appends multi-token-prediction layers as further blocks."""
    module = write_family(tmp_path / "hf", "qwen3_5")
    path = tmp_path / "m.gguf"
    write_gguf_of(path, "qwen3_5", module)
    reader = gguf.GGUFReader(path)
    longer = tmp_path / "mtp.gguf"
    writer = gguf.GGUFWriter(longer, "qwen35")
    for key, field in reader.fields.items():
        if key.startswith("qwen35.") and key != "qwen35.block_count":
            writer.add_key_value(key, field.contents(), field.types[0], *field.types[1:2])
    writer.add_block_count(5)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("blk.4.nextn.enorm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    arch = arch_from_gguf([longer])
    assert len(arch.layers) == 4
    assert [(e.name, len(e.tensors)) for e in arch.extras] == [("mtp", 1)]
    load_decoder([longer], arch, kernels="ref", weight_dtype="fp32")
