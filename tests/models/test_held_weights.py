"""Bytes of weights as predicted are those of the buffers that a loaded decoder keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hullspeed.arch.gguf_arch import arch_from_gguf
from hullspeed.arch.load import load_arch
from hullspeed.arch.model import ModelArch
from hullspeed.kernels.cpu.int_linear import BlockLinear
from hullspeed.kernels.cpu.int_tile import has_vnni
from hullspeed.kernels.cpu.linear import Fp16Linear, Fp32Linear
from hullspeed.memory.held import MATRICES, NATIVE_ISA, held_bytes, held_dtype
from hullspeed.models.decoder import Decoder
from hullspeed.models.load import load_decoder
from hullspeed.models.moe import RoutedMlp
from hullspeed.models.quantize import quantize_checkpoint
from hullspeed.models.quantize_targets import target
from hullspeed.sources.files import from_folder
from support.families import write_family
from support.gguf_families import CHANGES, write_gguf_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks glibc's heap")

WIDE = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 320}


# In a process of its own: elsewhere the heap has other business. The names: glibc's malloc.h.
HEAP = """
import ctypes, json, sys, torch

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo

def taken():
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd

torch.set_num_threads(1)
pack = torch.ops.quantized.linear_prepack_fp16
for shape in json.loads(sys.argv[1]):
    weight = torch.zeros(shape)
    kept = [pack(weight, None)]  # the first call keeps something for itself
    before = taken()
    kept += [pack(weight, None) for _ in range(16)]
    print((taken() - before) / 16)
"""


def filled_bytes(outputs: int, inputs: int) -> int:
    """Of a packed fp16 weight."""
    return 2 * (-(-outputs // 32) * 32) * (-(-inputs // 512) * 512)


def parts(root: object, seen: set[int]) -> Iterator[Any]:
    """Every object of ours below ``root``, once."""
    if id(root) in seen:
        return
    seen.add(id(root))
    if isinstance(root, list | tuple):
        for item in root:
            yield from parts(item, seen)
    elif type(root).__module__.startswith("hullspeed."):
        yield root
        names = [*getattr(root, "__dict__", ()), *getattr(type(root), "__slots__", ())]
        for name in names:
            yield from parts(getattr(root, name, None), seen)


def kept_bytes(decoder: Decoder) -> int:
    """Of the matrices that the decoder keeps, each buffer once."""
    buffers: dict[int, int] = {}
    for part in parts(decoder, set()):
        match part:
            case BlockLinear():
                buffers[id(part)] = part._packed.nbytes
            case Fp16Linear():
                weight, _ = torch.ops.quantized.linear_unpack_fp16(part._packed)
                buffers[id(part)] = filled_bytes(*weight.shape)
            case Fp32Linear():
                buffers[part._weight.data_ptr()] = part._weight.nbytes
            case RoutedMlp():
                gates = [part._router, part._shared_gate]
                buffers |= {g.data_ptr(): g.nbytes for g in gates if g is not None}
    buffers[decoder._embedding.data_ptr()] = decoder._embedding.nbytes
    return sum(buffers.values())


def predicted(arch: ModelArch, weight_dtype: str) -> int:
    specs = [spec for spec in arch.tensors(extras=False) if spec.role in MATRICES]
    return sum(held_bytes(arch, spec, weight_dtype) for spec in specs)


def test_fbgemm_fills_up_blocks_of_512_inputs_by_32_outputs() -> None:
    shapes = [[576, 576], [192, 576], [576, 1536], [8192, 576], [16, 512], [17, 512], [96, 40]]
    command = [sys.executable, "-c", HEAP, json.dumps(shapes)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    for shape, measured in zip(shapes, result.stdout.split(), strict=True):
        # The rest, less than a block, is the object's and the heap's own.
        rest = float(measured) - filled_bytes(*shape)
        assert rest < 8192, shape
        assert rest >= 0 or torch.backends.cpu.get_cpu_capability() != "AVX512"  # AVX2: 16


@pytest.mark.skipif(not has_vnni(), reason="codes are computed with AVX-512 VNNI")
@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0", "Q5_0", "F32", "int4", "int8", "int4 of fp32"])
def test_experts_of_codes(stored: str, tmp_path: Path) -> None:
    changes = {**CHANGES["qwen3_moe"], **WIDE}
    module = write_family(tmp_path / "hf", "qwen3_moe", **changes)
    if stored.startswith("int"):
        if "fp32" not in stored:
            module.bfloat16().save_pretrained(tmp_path / "hf")
        files = from_folder(tmp_path / "hf", source="x")
        kind = target("int8" if stored == "int8" else "int4")
        quantize_checkpoint(files, load_arch(files), tmp_path / "q", kind)
        files = from_folder(tmp_path / "q", source="x")
        paths, arch = list(files.weights), load_arch(files)
    else:
        paths = [tmp_path / "m.gguf"]
        write_gguf_of(paths[0], "qwen3_moe", module, expert_type=stored)
        arch = arch_from_gguf(paths)
    dtype = held_dtype(arch, "native", (NATIVE_ISA,))
    assert dtype == ("fp16" if stored in ("Q5_0", "F32", "int4 of fp32") else "native")
    decoder = load_decoder(paths, arch, weight_dtype="native")
    assert kept_bytes(decoder) == predicted(arch, dtype)
    if dtype == "native":
        assert predicted(arch, dtype) < predicted(arch, "fp16") / 2


@pytest.mark.parametrize("weight_dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "mixtral", "gpt_oss", "gemma3", "qwen3_next"])
def test_matrices_of_families(family: str, weight_dtype: str, tmp_path: Path) -> None:
    """Fused experts, transposed ones, one by one; a tied head; projections of a gated delta net."""
    write_family(
        tmp_path,
        family,
        linear_num_key_heads=8,
        linear_num_value_heads=32,
        moe_intermediate_size=64,
    )
    files = from_folder(tmp_path, source="x")
    arch = load_arch(files)
    decoder = load_decoder(files.weights, arch, weight_dtype=weight_dtype)
    assert kept_bytes(decoder) == predicted(arch, weight_dtype)
