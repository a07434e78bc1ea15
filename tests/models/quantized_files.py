"""Checkpoints in every quantized format, made without the code under test.

Packing is written out from each format's published layout, in plain numpy and torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 97,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "dtype": "float16",
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip

LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip

Encoded = tuple[dict[str, Tensor], Tensor]
"""The parts of a weight by suffix, and the weight that they stand for in float32."""


def plain_tensors(seed: int = 0) -> dict[str, Tensor]:
    """A random Llama in fp16, wide enough for clear winners."""
    torch.manual_seed(seed)
    h, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes = {"q_proj": (h, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, h),
              "gate_proj": (inner, h), "up_proj": (inner, h), "down_proj": (h, inner)}  # fmt: skip
    found = {"model.embed_tokens.weight": torch.randn(vocab, h), "model.norm.weight": torch.ones(h)}
    found["lm_head.weight"] = torch.randn(vocab, h) * 0.3
    for i in range(CONFIG["num_hidden_layers"]):
        below = f"model.layers.{i}."
        for name in LINEARS:
            shape = shapes[name.rpartition(".")[2]]
            found[f"{below}{name}.weight"] = torch.randn(shape) * 0.2
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{below}{norm}.weight"] = 1 + 0.2 * torch.randn(h)
    return {name: tensor.half() for name, tensor in found.items()}


def write_pair(
    folder: Path, quantization: dict[str, Any], encode: Callable[[Tensor], Encoded]
) -> tuple[Path, Path]:
    """A checkpoint with its linear layers encoded, and its dequantized twin in float32."""
    quantized: dict[str, Tensor] = {}
    twin: dict[str, Tensor] = {}
    for name, tensor in plain_tensors().items():
        stem = name.removesuffix(".weight")
        if stem.endswith(LINEARS):
            parts, value = encode(tensor.float())
            quantized |= {f"{stem}.{suffix}": part for suffix, part in parts.items()}
            twin[name] = value
        else:
            quantized[name] = tensor
            twin[name] = tensor.float()
    first = folder / "quantized"
    second = folder / "twin"
    write(first, CONFIG | {"quantization_config": quantization}, quantized)
    write(second, CONFIG | {"dtype": "float32"}, twin)
    return first, second


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A checkpoint in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    safetensors.torch.save_file(kept, folder / "model.safetensors")


# -- affine integers, as GPTQ and AWQ make them ---------------------------------------------------


def affine(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[out, in]``, and fp16 scales and whole zero points ``[out, n_groups]``."""
    n_groups, top = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = [], []
    codes = torch.empty(weight.shape, dtype=torch.int64)
    for g in range(n_groups):
        part = weight[:, groups == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = ((high - low) / top).half().float()
        zero = torch.clamp(torch.round(-low / scale), 0, top)
        codes[:, groups == g] = torch.clamp(
            torch.round(part / scale[:, None]) + zero[:, None], 0, top
        ).long()
        scales.append(scale)
        zeros.append(zero.long())
    return codes, torch.stack(scales, 1), torch.stack(zeros, 1)


def streams(rows: Tensor, bits: int) -> Tensor:
    """Each row of codes as a run of bits, lowest first, cut into signed 32-bit words."""
    ones = (rows.numpy()[:, :, None] >> np.arange(bits)) & 1
    flat = ones.reshape(len(rows), -1)
    padded = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32))).astype(np.uint8)
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def gptq(bits: int, group: int, *, order: bool = False, v2: bool = False) -> Any:
    """``qweight`` packs inputs down the rows; zero points are stored less one in version 1."""

    def encode(weight: Tensor) -> Encoded:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        groups = torch.arange(columns) // size
        if order:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(5))]
        codes, scales, zeros = affine(weight, bits, groups)
        stored = zeros if v2 else (zeros - 1) % 2**bits
        parts = {
            "qweight": streams(codes, bits).T,
            "qzeros": streams(stored.T, bits),
            "scales": scales.half().T,
            "g_idx": groups.int(),
        }
        value = (codes.float() - zeros[:, groups].float()) * scales[:, groups]
        return parts, value

    return encode


def awq(group: int) -> Any:
    """``qweight`` packs outputs across; eight of them in the order 0 2 4 6 1 3 5 7."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(matrix: Tensor) -> Tensor:
        shuffled = matrix.reshape(len(matrix), -1, 8)[:, :, order].reshape(len(matrix), -1)
        return streams(shuffled, 4)

    def encode(weight: Tensor) -> Encoded:
        groups = torch.arange(weight.shape[1]) // group
        codes, scales, zeros = affine(weight, 4, groups)
        parts = {
            "qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.half().T,
        }  # fmt: skip
        return parts, (codes.float() - zeros[:, groups].float()) * scales[:, groups]

    return encode


def packed_ordered(group: int) -> Any:
    """compressed-tensors' ``pack-quantized`` with ``actorder: group``, which its own code no longer
    writes: inputs in their own order, each with the number of its group.
    """

    def encode(weight: Tensor) -> Encoded:
        columns = weight.shape[1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(5))
        groups = (torch.arange(columns) // group)[order]
        codes, scales, zeros = affine(weight, 4, groups)
        parts = {
            "weight_packed": streams(codes, 4),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
            "weight_zero_point": streams(zeros.T, 4).T,
            "weight_g_idx": groups.int(),
        }
        return parts, (codes.float() - zeros[:, groups].float()) * scales[:, groups]

    return encode


def packed_ordered_section(group: int) -> dict[str, Any]:
    weights = {"type": "int", "num_bits": 4, "group_size": group, "strategy": "group",
               "symmetric": False, "actorder": "group"}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip


# -- FP8 ------------------------------------------------------------------------------------------


def fp8_block(weight: Tensor) -> Encoded:
    """128 x 128 blocks; transformers' own fp16 scales multiply."""
    rows, columns = weight.shape
    grid = torch.empty(-(-rows // 128), -(-columns // 128))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    value = torch.empty(weight.shape)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale = (weight[at].abs().max() / 400).half().float()
            codes[at] = (weight[at] / scale).to(torch.float8_e4m3fn)
            value[at] = codes[at].float() * scale
            grid[i, j] = scale
    return {"weight": codes, "weight_scale_inv": grid.half()}, value


def fp8_tensor(weight: Tensor) -> Encoded:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    return parts, codes.float() * scale


def modelopt_nvfp4(weight: Tensor) -> Encoded:
    """Groups of 16 with e4m3 scales under one factor for the matrix; the low nibble is first."""
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    factor = weight.abs().max() / (6 * 448)
    rows, columns = weight.shape
    grouped = weight.reshape(rows, -1, 16)
    local = (grouped.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
    scaled = grouped / (local.float() * factor)[..., None]
    index = (scaled.abs()[..., None] - levels).abs().argmin(-1)
    codes = (index + 8 * (scaled < 0)).reshape(rows, columns).to(torch.uint8)
    sign = torch.where(scaled < 0, -1.0, 1.0)
    value = (levels[index] * sign * (local.float() * factor)[..., None]).reshape(rows, columns)
    parts = {
        "weight": codes[:, 0::2] | (codes[:, 1::2] << 4),
        "weight_scale": local,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(1.0),
    }
    return parts, value


# -- compressed-tensors, by its own compressors ---------------------------------------------------


def compressed(layout: str, *, inputs: Any = None, **weights: Any) -> Any:
    """The config section, and an encoder that compresses and decompresses with their code."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def encode(weight: Tensor) -> Encoded:
        rows, columns = weight.shape
        tall, wide = {
            "tensor": (rows, columns), "channel": (1, columns), "group": (1, args.group_size),
            "tensor_group": (1, args.group_size), "block": args.block_structure,
        }[args.model_dump(mode="json")["strategy"]]  # fmt: skip
        grid = weight.reshape(rows // tall, tall, columns // wide, wide).transpose(1, 2).flatten(2)
        state: dict[str, Tensor] = {}
        if layout == "nvfp4-pack-quantized":
            state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        scale, zero = calculate_qparams(
            grid.amin(-1), grid.amax(-1), args, global_scale=state.get("weight_global_scale")
        )
        state["weight_scale"] = scale if "fp4" in layout else scale.half().float()
        if args.strategy == "tensor":
            state["weight_scale"], zero = state["weight_scale"].reshape(1), zero.reshape(1)
        if not args.symmetric:
            state["weight_zero_point"] = zero.to(torch.int8)
        parts = compressor.compress({"weight": weight, **state}, scheme)
        value = compressor.decompress(dict(parts), scheme)["weight"].float()
        if layout == "nvfp4-pack-quantized":
            # Their decompressor computes in bf16; the same steps in float32.
            codes = unpack_fp4_from_uint8(parts["weight_packed"], rows, columns, torch.float32)
            value = dequantize(
                codes,
                parts["weight_scale"].float(),
                args=args,
                global_scale=state["weight_global_scale"],
                dtype=torch.float32,
            )
        if "fp4" not in layout:
            parts["weight_scale"] = parts["weight_scale"].half()
        return parts, value

    section = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    return section, encode


def all_formats() -> dict[str, Any]:
    """Config section and encoder of every format, by name; made when asked for."""
    awq_section = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}

    def gptq_of(bits: int, group: int, **more: bool) -> Any:
        layout = "gptq_v2" if more.get("v2") else "gptq"
        section = {"quant_method": "gptq", "bits": bits, "group_size": group,
                   "desc_act": more.get("order", False), "checkpoint_format": layout}  # fmt: skip
        return lambda: (section, gptq(bits, group, **more))

    def ct(layout: str, **more: Any) -> Any:
        return lambda: compressed(layout, **more)

    integers: dict[str, Any] = {"type": "int", "num_bits": 8}
    floats: dict[str, Any] = {"type": "float", "num_bits": 8}
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return {
        "gptq 4": gptq_of(4, 64),
        "gptq 4 row": gptq_of(4, -1),
        "gptq 4 ordered": gptq_of(4, 32, order=True),
        "gptq 4 v2": gptq_of(4, 64, v2=True),
        "gptq 3": gptq_of(3, 64),
        "gptq 2": gptq_of(2, 32),
        "gptq 8": gptq_of(8, 64),
        "awq": lambda: (awq_section, awq(64)),
        "fp8 block": lambda: ({**fp8, "weight_block_size": [128, 128]}, fp8_block),
        "fp8 tensor": lambda: ({**fp8, "activation_scheme": "static"}, fp8_tensor),
        "modelopt fp8": lambda: (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, fp8_tensor,
        ),
        "modelopt nvfp4": lambda: (nvfp4, modelopt_nvfp4),
        "ct int8 channel": ct("int-quantized", **integers, strategy="channel", inputs=token),
        "ct int8 tensor": ct("int-quantized", **integers, strategy="tensor", inputs=token),
        "ct int8 asymmetric": ct(
            "int-quantized", **integers, strategy="channel", symmetric=False, inputs=token
        ),
        "ct fp8 channel": ct("float-quantized", **floats, strategy="channel"),
        "ct fp8 tensor": ct("float-quantized", **floats, strategy="tensor"),
        "ct fp8 block": ct(
            "float-quantized", **floats, strategy="block", block_structure=[64, 128]
        ),
        "ct int4 group": ct("pack-quantized", type="int", num_bits=4, group_size=32),
        "ct int4 channel": ct("pack-quantized", type="int", num_bits=4, strategy="channel"),
        "ct int4 asymmetric": ct(
            "pack-quantized", type="int", num_bits=4, group_size=64, symmetric=False
        ),
        "ct int4 ordered": lambda: (packed_ordered_section(32), packed_ordered(32)),
        "ct int8 packed": ct("pack-quantized", **integers, strategy="channel"),
        "ct int2": ct("pack-quantized", type="int", num_bits=2, group_size=32),
        "ct nvfp4": ct(
            "nvfp4-pack-quantized", type="float", num_bits=4, group_size=16,
            strategy="tensor_group",
        ),
        "ct mxfp4": ct("mxfp4-pack-quantized", type="float", num_bits=4, group_size=32),
    }  # fmt: skip


# -- GGUF and mixtures of experts ------------------------------------------------------------------


def write_gguf_pair(folder: Path, kind: str) -> tuple[Path, Path, Any]:
    """A GGUF with ``kind`` linear layers, its float32 twin, both by the gguf package, and the
    architecture that config.json would give.
    """
    import gguf

    from hullspeed.arch.load import arch_from_config

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG["num_hidden_layers"])
    type_ = gguf.GGMLQuantizationType[kind]
    paths = folder / f"{kind}.gguf", folder / "twin.gguf"
    writers = [gguf.GGUFWriter(path, "llama") for path in paths]
    for name, tensor in plain_tensors().items():
        stem, _, last = name.rpartition(".")
        stored = f"{names.get_name(stem)}.{last}"
        data = tensor.float().numpy()
        if stem.endswith(LINEARS):
            blocks = gguf.quants.quantize(data, type_)
            writers[0].add_tensor(stored, blocks, raw_dtype=type_)
            data = gguf.quants.dequantize(blocks, type_)
        else:
            writers[0].add_tensor(stored, data)
        writers[1].add_tensor(stored, data)
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return *paths, arch_from_config(CONFIG | {"dtype": "float32"})
