"""Weight formats: which weights, which tensors, how many bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hullspeed.arch.load import arch_from_config, load_arch
from hullspeed.arch.model import ModelArch
from hullspeed.arch.quant import Modules, stored_parts, weight_bytes
from hullspeed.arch.quant_config import weight_format
from hullspeed.arch.schemes import Part
from hullspeed.errors import CorruptFileError, ModelError, UnsupportedModelError
from hullspeed.sources import resolve

_CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
_DOWN = "model.layers.1.mlp.down_proj"  # [256, 384]


def _arch(quantization: dict[str, Any] | None, **more: Any) -> ModelArch:
    config = {**_CONFIG, **more}
    return arch_from_config(
        config if quantization is None else {**config, "quantization_config": quantization}
    )


def _stored(arch: ModelArch, module: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        part.name.removeprefix(module + "."): (part.dtype, part.shape)
        for _, part in stored_parts(arch)
        if part.name.startswith(module + ".")
    }


def _group(layout: str, **weights: Any) -> dict[str, Any]:
    inputs = weights.pop("inputs", None)
    settings = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": settings, "input_activations": inputs}
        },
    }


_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}

# Layouts of one [256, 384] matrix, from the compressors' and quantizers' own documentation.
_LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]] = {
    "fp8 block": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        {"weight": ("fp8", (256, 384)), "weight_scale_inv": ("bf16", (2, 3))},
    ),
    "fp8 tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"weight": ("fp8", (256, 384)), "weight_scale": ("fp32", ()), "input_scale": ("fp32", ())},
    ),
    "fp8 channel": (
        _group("float-quantized", inputs={"dynamic": True}),
        {"weight": ("fp8", (256, 384)), "weight_scale": ("bf16", (256, 1))},
    ),
    "int8 channel": (
        _group("int-quantized", type="int", inputs={"dynamic": True}),
        {"weight": ("int8", (256, 384)), "weight_scale": ("bf16", (256, 1))},
    ),
    "fp8 static tensor": (
        _group("naive-quantized", strategy="tensor", inputs={"dynamic": False}),
        {
            "weight": ("fp8", (256, 384)),
            "weight_scale": ("bf16", (1,)),
            "input_scale": ("bf16", (1,)),
        },
    ),
    "fp8 compressed block": (
        _group("float-quantized", strategy="block", block_structure=[128, 128]),
        {"weight": ("fp8", (256, 384)), "weight_scale": ("bf16", (2, 3))},
    ),
    "wna16": (
        _group("pack-quantized", type="int", num_bits=4, strategy="group", group_size=128),
        {
            "weight_packed": ("int32", (256, 48)),
            "weight_scale": ("bf16", (256, 3)),
            "weight_shape": ("int64", (2,)),
        },
    ),
    "wna16 with zero points, ordered": (
        _group(
            "pack-quantized", type="int", num_bits=4, strategy="group", group_size=128,
            symmetric=False, actorder="group",
        ),
        {
            "weight_packed": ("int32", (256, 48)),
            "weight_scale": ("bf16", (256, 3)),
            "weight_shape": ("int64", (2,)),
            "weight_zero_point": ("int32", (32, 3)),
            "weight_g_idx": ("int32", (384,)),
        },
    ),
    "nvfp4 compressed": (
        _group("nvfp4-pack-quantized", num_bits=4, inputs={"dynamic": "local"}),
        {
            "weight_packed": ("uint8", (256, 192)),
            "weight_scale": ("fp8", (256, 24)),
            "weight_global_scale": ("fp32", (1,)),
            "input_global_scale": ("fp32", (1,)),
        },
    ),
    "mxfp4 compressed": (
        _group("mxfp4-pack-quantized", num_bits=4),
        {"weight_packed": ("uint8", (256, 192)), "weight_scale": ("uint8", (256, 12))},
    ),
    "nvfp4 modelopt": (
        _NVFP4,
        {
            "weight": ("uint8", (256, 192)),
            "weight_scale": ("fp8", (256, 24)),
            "weight_scale_2": ("fp32", ()),
            "input_scale": ("fp32", ()),
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        {
            "qweight": ("int32", (384, 32)),
            "scales": ("fp16", (3, 256)),
            "qzeros": ("int32", (3, 32)),
        },
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
        {
            "qweight": ("int32", (48, 256)),
            "qzeros": ("int32", (3, 32)),
            "scales": ("fp16", (3, 256)),
            "g_idx": ("int32", (384,)),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _LAYOUTS)
def test_layout(name: str) -> None:
    quantization, expected = _LAYOUTS[name]
    arch = _arch(quantization)
    assert _stored(arch, _DOWN) == expected
    # Embedding, head and norms stay in the model's type.
    assert _stored(arch, "lm_head") == {"weight": ("bf16", (512, 256))}
    assert _stored(arch, "model.embed_tokens") == {"weight": ("bf16", (512, 256))}
    assert _stored(arch, "model.norm") == {"weight": ("bf16", (256,))}
    assert weight_bytes(arch) == sum(part.nbytes for _, part in stored_parts(arch))
    assert weight_bytes(arch) < weight_bytes(_arch(None))


_STORED = {
    "bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8": "F8_E4M3", "int8": "I8", "uint8": "U8",
    "int32": "I32", "int64": "I64",
}  # fmt: skip


def _write(folder: Path, parts: list[Part], quantization: dict[str, Any]) -> int:
    """A checkpoint of zeros made of ``parts``; returns the bytes of its data."""
    header: dict[str, Any] = {}
    end = 0
    for part in parts:
        place = [end, end + part.nbytes]
        header[part.name] = {
            "dtype": _STORED[part.dtype], "shape": part.shape, "data_offsets": place,
        }  # fmt: skip
        end = place[1]
    raw = json.dumps(header).encode()
    content = len(raw).to_bytes(8, "little") + raw + bytes(end)
    (folder / "model.safetensors").write_bytes(content)
    config = {**_CONFIG, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return end


@pytest.mark.parametrize("name", _LAYOUTS)
def test_a_quantized_checkpoint_is_read_from_its_header(name: str, tmp_path: Path) -> None:
    """A file of that layout gives the same architecture with the same bytes; one without its
    scales is refused.
    """
    quantization = _LAYOUTS[name][0]
    arch = _arch(quantization)
    parts = [part for _, part in stored_parts(arch)]
    data_bytes = _write(tmp_path, parts, quantization)
    found = load_arch(resolve(str(tmp_path)))
    assert weight_bytes(found) == weight_bytes(arch) == data_bytes
    assert found.quant == arch.quant
    assert not found.extras
    kept = [p for p in parts if not p.name.endswith(("scale", "scales", "scale_inv"))]
    _write(tmp_path, kept, quantization)
    with pytest.raises(CorruptFileError, match=r"scale\S* is missing"):
        load_arch(resolve(str(tmp_path)))


def test_transformers_holds_fp8_blocks_the_same_way() -> None:
    """Names and shapes against transformers' own FP8 linear layer."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.finegrained_fp8 import FP8Linear

    with torch.device("meta"):
        linear = FP8Linear(384, 256, block_size=(128, 128), activation_scheme="dynamic")
    theirs = {name: tuple(p.shape) for name, p in linear.named_parameters()}
    ours = {n: shape for n, (_, shape) in _stored(_arch(_LAYOUTS["fp8 block"][0]), _DOWN).items()}
    assert ours == theirs


def test_ignored_modules_stay() -> None:
    for entry in ("mlp.down_proj", _DOWN, "re:.*down_proj$", "model.layers.1*", "down_proj"):
        arch = _arch({**_NVFP4, "ignore": ["lm_head", entry]})
        assert _stored(arch, _DOWN) == {"weight": ("bf16", (256, 384))}, entry
    arch = _arch({**_NVFP4, "ignore": ["lm_head", "model.layers.0"]})
    assert "weight_scale_2" in _stored(arch, _DOWN)
    assert "weight_scale_2" in _stored(_arch({**_NVFP4, "ignore": []}), "lm_head")


def test_module_lists() -> None:
    listed = Modules(("lm_head", "model.layers.4.mlp.gate", "re:.*visual.*", "mtp*"))
    for name in ("lm_head", "model.layers.4.mlp.gate", "model.visual.blocks.0", "mtp.fc", "mtp"):
        assert name in listed, name
    others: tuple[object, ...] = ("model.layers.4.mlp.gate_proj", "model.layers.41.mlp.gate", 7)
    for other in others:
        assert other not in listed, other


def test_mixed_precision_by_module() -> None:
    arch = _arch(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8",
            "quantized_layers": {
                "model.layers.1.mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                "model.layers.1.self_attn.k_proj": {"quant_algo": "FP8"},
            },
        }
    )
    assert set(_stored(arch, _DOWN)) == {"weight", "weight_scale", "weight_scale_2"}
    key = _stored(arch, "model.layers.1.self_attn.k_proj")
    assert set(key) == {"weight", "weight_scale", "input_scale", "k_scale"}
    assert _stored(arch, "model.layers.0.mlp.down_proj") == {"weight": ("bf16", (256, 384))}
    assert arch.weight_format.kv_dtype == "fp8"


def test_scales_of_the_cache() -> None:
    """ModelOpt keeps them beside the projection, compressed-tensors in the attention module; an
    exporter may leave them out.
    """
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    compressed = {**_LAYOUTS["fp8 channel"][0], "kv_cache_scheme": scheme}
    attention = "model.layers.0.self_attn"
    found = _stored(_arch(compressed), attention)
    assert found["k_scale"] == found["v_scale"] == ("bf16", (1,))
    beside = _stored(_arch({**_NVFP4, "kv_cache_quant_algo": "FP8"}), f"{attention}.v_proj")
    assert beside["v_scale"] == ("fp32", ())
    assert _arch(compressed).weight_format.kv_dtype == "fp8"


def test_scales_of_the_cache_may_be_absent(tmp_path: Path) -> None:
    quantization = {**_NVFP4, "kv_cache_quant_algo": "FP8"}
    parts = [part for _, part in stored_parts(_arch(quantization))]
    kept = [part for part in parts if not part.name.endswith((".k_scale", ".input_scale"))]
    data_bytes = _write(tmp_path, kept, quantization)
    assert weight_bytes(load_arch(resolve(str(tmp_path)))) == data_bytes


def test_modelopt_may_keep_its_config_beside() -> None:
    beside = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    assert weight_format(_CONFIG, beside).name == "fp8_tensor"
    assert weight_format(_CONFIG).name == "none"


_BAD: dict[str, dict[str, Any]] = {
    "no method": {},
    "unknown method": {"quant_method": "magic"},
    "method a number": {"quant_method": 8},
    "block of three": {"quant_method": "fp8", "weight_block_size": [128, 128, 1]},
    "block of words": {"quant_method": "fp8", "weight_block_size": ["a", "b"]},
    "block zero": {"quant_method": "fp8", "weight_block_size": [0, 128]},
    "odd bits": {"quant_method": "awq", "bits": 5, "group_size": 128},
    "no bits": {"quant_method": "gptq", "group_size": 128},
    "no groups": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "unknown layout": _group("sparse-24"),
    "unknown algorithm": {"quant_method": "modelopt", "quant_algo": "W1"},
    "ignore a word": {**_NVFP4, "ignore": "lm_head"},
}


@pytest.mark.parametrize("name", _BAD)
def test_refuses(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        _arch(_BAD[name])
    assert caught.value.fix


def test_a_group_that_does_not_divide_is_refused() -> None:
    arch = _arch({"quant_method": "awq", "bits": 4, "group_size": 100})
    with pytest.raises(ModelError, match="no multiple of the group of 100"):
        weight_bytes(arch)
