"""Quantized checkpoints against independent dequantization, weight by weight and token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.arch.load import load_arch
from hullspeed.arch.quant import weight_bytes
from hullspeed.errors import CorruptFileError, UnsupportedModelError
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.memory.held import held_bytes
from hullspeed.models.load import load_decoder, open_weights
from hullspeed.models.quantized import QuantizedTensor, numbers
from hullspeed.models.weights import Weights
from hullspeed.sources.files import from_folder

from .quantized_files import CONFIG, all_formats, plain_tensors, write, write_gguf_pair, write_pair

FORMATS = all_formats()


def opened(folder: Path) -> tuple[Any, Weights]:
    files = from_folder(folder, source=str(folder))
    arch = load_arch(files)
    return arch, open_weights(files.weights, arch)


def greedy(folder: Path) -> tuple[list[int], torch.Tensor]:
    """Of the model in a folder."""
    files = from_folder(folder, source=str(folder))
    return tokens_of(list(files.weights), load_arch(files))


def tokens_of(paths: list[Path], arch: Any) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logits of the first step."""
    decoder = load_decoder(paths, arch, kernels="ref", weight_dtype="fp32")
    decoder.allocate_kv(1)
    tokens, first, start = [5, 17, 3, 88, 41], None, 0
    while len(tokens) < 24:
        logits = decoder.forward(Batch.of([SpanInput(tokens[start:], start, [0], sample=True)]))[0]
        first = logits if first is None else first
        start = len(tokens)
        tokens.append(int(logits.argmax()))
    assert first is not None
    return tokens, first


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_against_independent_dequantization(name: str, tmp_path: Path) -> None:
    section, encode = FORMATS[name]()
    quantized, twin = write_pair(tmp_path, section, encode)
    arch, weights = opened(quantized)
    twin_arch, wanted = opened(twin)
    weights.check(arch)
    assert weight_bytes(arch) < weight_bytes(twin_arch)
    for spec in arch.tensors():
        got, want = weights.tensor(spec.name), wanted.tensor(spec.name)
        assert torch.equal(got, want), f"{spec.name}: {(got - want).abs().max()}"
        assert (weights.quantized(spec.name) is not None) == spec.name.endswith("proj.weight")
    tokens, logits = greedy(quantized)
    same_tokens, same_logits = greedy(twin)
    assert tokens == same_tokens
    assert torch.equal(logits, same_logits)


@pytest.mark.parametrize("name", ["fp8 block", "ct int4 asymmetric", "gptq 4", "ct nvfp4"])
@pytest.mark.parametrize("fault", ["scale infinite", "part missing", "part cut", "wrong type"])
def test_a_damaged_part_is_refused_by_name(name: str, fault: str, tmp_path: Path) -> None:
    import safetensors.torch

    section, encode = FORMATS[name]()
    folder, _ = write_pair(tmp_path, section, encode)
    arch, _ = opened(folder)  # as its intact header reads
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    stem = "model.layers.1.mlp.down_proj"
    suffix = next(
        s for s in ("weight_scale_inv", "weight_scale", "scales") if f"{stem}.{s}" in tensors
    )
    codes = next(s for s in ("weight_packed", "qweight", "weight") if f"{stem}.{s}" in tensors)
    match fault:
        case "scale infinite":
            bad = f"{stem}.{suffix}"
            scales = tensors[bad].float()
            scales[0, 0] = float("nan")
            tensors[bad] = scales.to(tensors[bad].dtype)
        case "part missing":
            bad = f"{stem}.{suffix}"
            del tensors[bad]
        case "part cut":
            bad = f"{stem}.{codes}"
            tensors[bad] = tensors[bad][:-1].contiguous()
        case _:
            bad = f"{stem}.{codes}"
            tensors[bad] = tensors[bad].to(
                torch.int64 if "q" in codes or "p" in codes else torch.int8
            )
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(CorruptFileError, match=bad.replace(".", r"\.")):
        open_weights([path], arch).tensor(f"{stem}.weight")


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    import safetensors.torch

    folder, _ = write_pair(tmp_path, *FORMATS["fp8 block"]())
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[3, 4] = 0xFF
    safetensors.torch.save_file(tensors, path)
    _, weights = opened(folder)
    with pytest.raises(CorruptFileError, match=r"layers\.0\.mlp\.up_proj\.weight.*not a number"):
        weights.tensor(name)


def test_a_group_out_of_range_and_a_shape_that_contradicts(tmp_path: Path) -> None:
    import safetensors.torch

    for name, part, message in (
        ("gptq 4 ordered", "g_idx", "group outside"),
        ("ct int4 group", "weight_shape", "states another shape"),
    ):
        folder, _ = write_pair(tmp_path / part, *FORMATS[name]())
        path = folder / "model.safetensors"
        tensors = safetensors.torch.load_file(path)
        tensors[f"model.layers.0.self_attn.q_proj.{part}"][0] = 999
        safetensors.torch.save_file(tensors, path)
        _, weights = opened(folder)
        with pytest.raises(CorruptFileError, match=rf"q_proj\.{part}.*{message}"):
            weights.tensor("model.layers.0.self_attn.q_proj.weight")


def test_biases_of_gptq_pass_only_if_they_are_zero(tmp_path: Path) -> None:
    import safetensors.torch

    folder, _ = write_pair(tmp_path, *FORMATS["gptq 4"]())
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    bias = "model.layers.0.self_attn.o_proj.bias"
    tensors[bias] = torch.zeros(128, dtype=torch.float16)
    safetensors.torch.save_file(tensors, path)
    arch, weights = opened(folder)
    weights.check(arch)
    tensors[bias][3] = 0.5
    safetensors.torch.save_file(tensors, path)
    arch, weights = opened(folder)
    with pytest.raises(UnsupportedModelError, match=r"o_proj\.bias"):
        weights.check(arch)


def test_formats_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    _, encode = FORMATS["awq"]()
    unread: dict[str, tuple[dict[str, Any], str]] = {
        "gemv": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "awq"),
        "marlin": (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin"},
            "gptq",
        ),
        "hqq": ({"quant_method": "hqq"}, "hqq"),
    }
    for name, (section, message) in unread.items():
        folder, _ = write_pair(tmp_path / name, section, encode)
        files = from_folder(folder, source="x")
        with pytest.raises(UnsupportedModelError, match=f"does not read.*{message}"):
            load_decoder(files.weights, load_arch(files), kernels="ref")


def test_experts_of_gpt_oss_as_transformers_reads_them() -> None:
    """Fused MXFP4 blocks: the plain weight is ``[experts, in, out]``."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from hullspeed.arch.safetensors import StoredTensor
    from hullspeed.arch.schemes import Scheme
    from hullspeed.models.quantized.parts import StoredParts
    from hullspeed.models.quantized.readers import mxfp4_blocks

    rng = np.random.default_rng(2)
    experts, inputs, outputs = 3, 96, 40
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, (experts, outputs, inputs // 32), dtype=np.uint8)
    stored = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}

    def find(name: str) -> StoredTensor | None:
        data = stored.get(name)
        return None if data is None else StoredTensor(name, "U8", data.shape, 0, data.nbytes, "")

    parts = StoredParts(
        "e.down_proj_", (experts, inputs, outputs), find, lambda t: stored[t.name].reshape(-1)
    )
    tensor = mxfp4_blocks(parts, Scheme("mxfp4_blocks", bits=4, group=32))
    want = convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    assert tensor.shape == (experts, inputs, outputs)
    assert torch.equal(torch.from_numpy(tensor.dequantize()), want)
    scales[1, 0, 0] = 255
    with pytest.raises(CorruptFileError, match=r"e\.down_proj_scales"):
        mxfp4_blocks(parts, Scheme("mxfp4_blocks", bits=4, group=32))


def test_tables_of_numbers_against_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(numbers.e4m3(), e4m3)
    e8m0 = codes.view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(numbers.e8m0(), e8m0)
    np.testing.assert_array_equal(numbers.int8(), codes.view(torch.int8).float().numpy())
    from transformers.integrations.mxfp4 import FP4_VALUES

    np.testing.assert_array_equal(numbers.e2m1(), np.array(FP4_VALUES, np.float32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_says_what_its_dequantized_twin_says(kind: str, tmp_path: Path) -> None:
    quantized, twin, arch = write_gguf_pair(tmp_path, kind)
    tokens, logits = tokens_of([quantized], arch)
    same_tokens, same_logits = tokens_of([twin], arch)
    assert tokens == same_tokens
    assert torch.equal(logits, same_logits)


def test_gpt_oss_says_what_its_dequantized_twin_says(tmp_path: Path) -> None:
    """MXFP4 experts through config, header and decoder, against transformers' dequantization."""
    import json

    import safetensors.torch
    import transformers as hf
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = hf.GptOssConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=16, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(2)
    module = hf.GptOssForCausalLM(config)
    twin, quantized = tmp_path / "twin", tmp_path / "quantized"
    tensors = {name: t.detach().clone() for name, t in module.state_dict().items()}
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in list(tensors.items()):
        tensors[name] = torch.randn(tensor.shape) * 0.2
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, shape, dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            packed[name] = tensors[name]
    settings = json.loads(config.to_json_string(use_diff=False)) | {"dtype": "float32"}
    settings.pop("quantization_config", None)
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    for folder, held, more in (
        (twin, tensors, {}),
        (quantized, packed, {"quantization_config": section}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(settings | more))
        kept = {name: tensor.contiguous() for name, tensor in held.items()}
        safetensors.torch.save_file(kept, folder / "model.safetensors")
    tokens, logits = greedy(quantized)
    same_tokens, same_logits = greedy(twin)
    assert tokens == same_tokens
    assert torch.equal(logits, same_logits)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_dequantization_is_level_less_zero_times_scale(data: st.DataObject) -> None:
    """Any blocks, ragged ones too, any leading dimensions, against indexing in numpy."""
    lead = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
    rows, columns, tall, wide = (data.draw(st.integers(1, 9)) for _ in range(4))
    transposed, with_zeros = data.draw(st.booleans()), data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    codes = rng.integers(0, 16, (*lead, rows, columns), dtype=np.uint8)
    levels = rng.standard_normal(16).astype(np.float32)
    group_of = None
    if data.draw(st.booleans()):
        tall, grid = 1, (*lead, rows, wide)
        group_of = rng.integers(0, wide, columns, dtype=np.int32)
        column_of = group_of
    else:
        grid = (*lead, -(-rows // tall), -(-columns // wide))
        column_of = np.arange(columns, dtype=np.int32) // wide
    scales = rng.standard_normal(grid).astype(np.float32)
    zeros = rng.standard_normal(grid).astype(np.float32) if with_zeros else None
    at: Any = (..., *np.ix_(np.arange(rows) // tall, column_of))
    want: Any = levels[codes]
    if zeros is not None:
        want = want - zeros[at]
    want = want * scales[at]
    tensor = QuantizedTensor(codes, levels, scales, zeros, tall, wide, group_of, transposed)
    if transposed:
        want = want.swapaxes(-1, -2)
    assert tensor.shape == want.shape
    np.testing.assert_array_equal(tensor.dequantize(), want)


def test_a_mixed_checkpoint_of_modelopt(tmp_path: Path) -> None:
    """A scheme for each layer: FP8, NVFP4 and none."""
    import safetensors.torch

    from .quantized_files import fp8_tensor, modelopt_nvfp4

    fp8, _ = write_pair(tmp_path / "a", FORMATS["modelopt fp8"]()[0], fp8_tensor)
    fp4, plain = write_pair(tmp_path / "b", FORMATS["modelopt nvfp4"]()[0], modelopt_nvfp4)
    _, fp8_twin = write_pair(tmp_path / "c", FORMATS["modelopt fp8"]()[0], fp8_tensor)
    tensors: dict[str, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    for folder, twin, part in ((fp8, fp8_twin, "layers.0.mlp"), (fp4, plain, "layers.1.self_attn")):
        for found, path in ((tensors, folder), (wanted, twin)):
            loaded = safetensors.torch.load_file(path / "model.safetensors")
            found |= {name: tensor for name, tensor in loaded.items() if part in name}
    for name, tensor in plain_tensors().items():
        if name not in wanted:
            tensors[name] = wanted[name] = tensor
    layers = {
        "model.layers.0.mlp": {"quant_algo": "FP8"},
        "model.layers.1.self_attn": {"quant_algo": "NVFP4", "group_size": 16},
    }
    section = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    write(tmp_path / "mixed", CONFIG | {"quantization_config": section}, tensors)
    arch, weights = opened(tmp_path / "mixed")
    weights.check(arch)
    for spec in arch.tensors():
        assert torch.equal(weights.tensor(spec.name), wanted[spec.name].float()), spec.name


CODED = ("ct int4 group", "ct int4 channel", "ct int8 channel", "ct int8 packed")


@pytest.mark.parametrize("name", [*CODED, "ct int4 asymmetric", "ct fp8 channel", "gptq 4 ordered"])
def test_codes_that_the_kernels_take_are_the_same_weight(name: str, tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, *FORMATS[name]())
    arch, weights = opened(folder)
    weight = "model.layers.1.mlp.down_proj.weight"
    found = weights.blocks(weight)
    assert (found is not None) == (name in CODED)
    if found is not None:
        np.testing.assert_array_equal(found.dequantize(), weights.tensor(weight).numpy())
        spec = next(spec for spec in arch.tensors() if spec.name == weight)
        held = found.codes.nbytes + found.scales.nbytes
        held += 0 if found.mins is None else found.mins.nbytes
        assert held_bytes(arch, spec, "native") == held
