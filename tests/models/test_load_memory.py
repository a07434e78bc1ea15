"""A load takes what it keeps and the weight at hand, whatever the file's format."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from hullspeed.arch.load import arch_from_config, load_arch
from hullspeed.arch.tensors import Role
from hullspeed.models.quantize import quantize_checkpoint
from hullspeed.models.quantize_targets import target
from hullspeed.sources.files import from_folder

from .quantized_files import CONFIG, Encoded, awq, fp8_block, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Inputs of a multiple of 512, to which FBGEMM fills up rows.
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
         "vocab_size": 8192, "tie_word_embeddings": True}  # fmt: skip

LOAD = """
import sys
from hullspeed.arch.load import load_arch
from hullspeed.kernels.load import load_kernels
from hullspeed.memory.ours import held_weights
from hullspeed.models.load import load_decoder
from hullspeed.models.quantize_targets import target
from hullspeed.sources.files import from_folder
import torch

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def load(folder):
    files = from_folder(folder, source="x")
    shares = []
    decoder = load_decoder(
        files.weights, load_arch(files), weight_dtype="fp16", progress=shares.append
    )
    assert shares[-1] == 1.0 and shares == sorted(shares) and len(shares) >= 5
    return decoder

from pathlib import Path
arch = load(Path(sys.argv[1])).arch  # libraries and kernels are there from here on
import gc, ctypes
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
anonymous, files = status("RssAnon"), status("RssFile")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from now
decoder = load(Path(sys.argv[2]))
resident = status("RssAnon")
# The system may have taken pages of libraries meanwhile; they were there at the peak.
above = status("VmHWM") - resident - max(files, status("RssFile"))
print(above, resident - anonymous, held_weights(decoder.arch).decoder)
"""


MOE = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 16,
       "num_experts_per_tok": 2, "num_hidden_layers": 6, "num_attention_heads": 8,
       "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2048,
       "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}  # fmt: skip
SECTIONS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Encoded]]] = {
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8_block,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, awq(128)),
}
# What small tensors may leave in the heap until it is trimmed: 2^20 numbers in float32.
SMALL_TENSORS_BYTES = 4 * 2**20
LAYERS = {"experts": 6, "fused": 6}
FUSED: dict[str, Any] = {"model_type": "gpt_oss", "num_local_experts": 16, "intermediate_size": 512,
         "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 12,
         "attention_bias": True, "hidden_act": "silu"}  # fmt: skip


def config_of(kind: str, layers: int) -> dict[str, Any]:
    match kind:
        case "experts":
            config = CONFIG | MOE | {"model_type": "qwen3_moe"}
        case "fused":
            config = CONFIG | MOE | FUSED
            config["layer_types"] = FUSED["layer_types"][:layers]
        case _:
            config = CONFIG | SIZES
    return config | {"num_hidden_layers": layers}


def write_model(folder: Path, kind: str, layers: int) -> int:
    """A checkpoint of ``kind``; weights of one shape are equal. Returns the bytes in float32 of
    the largest tensor.
    """
    config = config_of(kind, layers)
    specs = list(arch_from_config(config).tensors())
    generator = torch.Generator().manual_seed(1)
    plain: dict[tuple[int, ...], Tensor] = {}
    for spec in specs:
        if spec.shape not in plain:
            plain[spec.shape] = torch.randn(spec.shape, generator=generator).half()
    tensors = {spec.name: plain[spec.shape] for spec in specs}
    if kind == "gguf":
        write_gguf(folder, config, tensors)
    elif kind in SECTIONS:
        section, encode = SECTIONS[kind]
        shapes = {spec.shape for spec in specs if spec.role is Role.LINEAR}
        coded = {shape: encode(plain[shape].float())[0] for shape in shapes}
        for spec in specs:
            if spec.role is Role.LINEAR:
                del tensors[spec.name]
                stem = spec.name.removesuffix(".weight")
                tensors |= {f"{stem}.{part}": t for part, t in coded[spec.shape].items()}
        write(folder, config | {"quantization_config": section}, tensors)
    elif kind == "int4":
        write(folder.with_name("plain"), config, tensors)
        files = from_folder(folder.with_name("plain"), source="x")
        quantize_checkpoint(files, load_arch(files), folder, target("int4"))
    else:
        write(folder, config, tensors)
    return 4 * max(spec.elements for spec in specs)


def write_gguf(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Matrices of the layers in Q8_0, by the gguf package."""
    folder.mkdir()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_rope_freq_base(config["rope_theta"])
    kind = gguf.GGMLQuantizationType.Q8_0
    coded: dict[int, Any] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        stored = f"{names.get_name(stem)}.{last}"
        if tensor.ndim == 1:
            writer.add_tensor(stored, tensor.float().numpy())
            continue
        if id(tensor) not in coded:
            coded[id(tensor)] = gguf.quants.quantize(tensor.float().numpy(), kind)
        writer.add_tensor(stored, coded[id(tensor)], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "kind",
    [
        "plain", "fp8", "gguf", "experts", "fused",
        *(pytest.param(kind, marks=pytest.mark.deep) for kind in ("int4", "awq")),
    ],
)  # fmt: skip
def test_peak_memory_of_a_load(kind: str, tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    write_model(small, kind, 2)
    largest = write_model(large, kind, LAYERS.get(kind, SIZES["num_hidden_layers"]))
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(small), str(large)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    above, grown, held = json.loads("[" + result.stdout.replace(" ", ",") + "]")
    assert largest * 4 < held  # else the bound would say nothing
    most = largest + SMALL_TENSORS_BYTES
    assert above < most, (above / 2**20, largest / 2**20)
    assert grown + above < held + most, (grown / 2**20, held / 2**20)
