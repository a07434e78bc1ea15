"""Checkpoints on disk, sound and broken, and the memory a launch of them takes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from hullspeed.arch.load import arch_from_config
from hullspeed.errors import SourceError
from hullspeed.memory.allocators import plan_memory
from hullspeed.memory.budget import EngineSettings, GpuMemory, WeightBytes
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.chain import check
from hullspeed.preflight.checkpoint import look_at_model
from hullspeed.preflight.sizing import sized
from hullspeed.preflight.stack import Gpu, Model, Nvidia, Python, Stack
from hullspeed.units import GIB

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def safetensors(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header, offset = {}, 0
    for name, shape in tensors.items():
        n_bytes = 2
        for size in shape:
            n_bytes *= size
        header[name] = {
            "dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + n_bytes],
        }  # fmt: skip
        offset += n_bytes
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


def llama_tensors() -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, 16), "model.norm.weight": (16,),
    }  # fmt: skip
    for i in range(2):
        prefix = f"model.layers.{i}."
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": (16, 16),
            f"{prefix}self_attn.k_proj.weight": (8, 16),
            f"{prefix}self_attn.v_proj.weight": (8, 16),
            f"{prefix}self_attn.o_proj.weight": (16, 16),
            f"{prefix}mlp.gate_proj.weight": (32, 16),
            f"{prefix}mlp.up_proj.weight": (32, 16),
            f"{prefix}mlp.down_proj.weight": (16, 32),
            f"{prefix}input_layernorm.weight": (16,),
            f"{prefix}post_attention_layernorm.weight": (16,),
        }
    return tensors


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    safetensors(tmp_path / "model.safetensors", llama_tensors())
    return tmp_path


def test_a_sound_checkpoint(llama: Path) -> None:
    model = look_at_model(str(llama))
    assert (model.found, model.error, model.unsupported) == (True, "", "")
    assert (model.family, model.quant, model.layers) == ("llama", "none", 2)
    assert model.heads == {"query": 4, "key_value": 2}
    assert not model.hybrid
    assert {file.name for file in model.files} == {"config.json", "model.safetensors"}


def test_a_file_cut_short_is_an_error(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    model = look_at_model(str(llama))
    assert model.error
    assert model.files


def test_an_unknown_architecture_is_unsupported(llama: Path) -> None:
    config = {**LLAMA, "architectures": ["FrobnetForCausalLM"], "model_type": "frobnet"}
    (llama / "config.json").write_text(json.dumps(config))
    assert "frobnet" in look_at_model(str(llama)).unsupported.lower()


def test_missing_shards_are_named(llama: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert look_at_model(str(llama)).missing_files == ("model-1.safetensors",)


@pytest.mark.parametrize("source", ["pypi:never-pulled-model", "no/such-model-here"])
def test_what_is_not_here_is_not_fetched(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HULLSPEED_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert not look_at_model(source).found


@pytest.mark.parametrize("source", ["./nowhere", "a b", "x" * 300, "../../etc/passwd-none"])
def test_what_cannot_be_a_model_is_refused(source: str) -> None:
    with pytest.raises(SourceError, match="not a model's name"):
        look_at_model(source)


def test_cpu_need_is_filled_in_unless_given(llama: Path) -> None:
    stack = Stack(python=Python(version="3.11.0"), model=look_at_model(str(llama)))
    need = sized(Ask(model=str(llama)), stack).need_bytes
    assert need is not None
    longer = sized(Ask(model=str(llama), context_tokens=100_000), stack).need_bytes
    kv = 2 * 2 * 2 * 4 * 4  # K and V, two layers, two heads of four values, fp32
    assert longer is not None
    assert longer - need == kv * (100_000 - 128)
    assert sized(Ask(model=str(llama), need_bytes=5), stack).need_bytes == 5


def gpu_stack(model: Model | None = None) -> Stack:
    gpu = Gpu(
        index=0, name="NVIDIA H100 80GB HBM3", compute_capability="9.0",
        total_bytes=85_000_000_000, free_bytes=85_000_000_000,
    )  # fmt: skip
    return Stack(
        python=Python(version="3.12.0", packages={"vllm": "0.33.0"}),
        nvidia=Nvidia(driver="580.95.05", driver_cuda="13.0", gpus=(gpu,)),
        model=model or Model(),
    )


def test_gpu_pool_is_filled_in(llama: Path) -> None:
    stack = gpu_stack(look_at_model(str(llama)))
    ask = sized(Ask(model=str(llama), engine="vllm", context_tokens=128), stack)
    assert ask.pool_tokens == 128
    assert ask.weight_bytes_per_gpu


HYBRID_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 5120,
    "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
    "max_position_embeddings": 262144, "full_attention_interval": 4, "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "attn_output_gate": True,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "mamba_ssm_dtype": "float32", "eos_token_id": 248044,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip


def test_a_boot_that_dies_at_the_first_long_prompt_is_foretold() -> None:
    """27B hybrid with 14.3 GiB of weights on an RTX 5090, share 0.93, chunks of 8,192."""
    arch = arch_from_config(HYBRID_27B)
    plan = plan_memory(
        arch,
        GpuMemory(name="RTX 5090", total_bytes=int(31.4 * GIB), compute_capability=(12, 0)),
        EngineSettings(version="0.33.0", memory_fraction=0.99, max_num_batched_tokens=8192,
                       max_model_len=8192, max_num_seqs=16),
        WeightBytes(decoder=int(16 * GIB)),
    )  # fmt: skip
    codes = {finding.code for finding in (*plan.stack.findings, *plan.pool.findings)}
    assert {"MEM005", "MEM008"} & codes
    ask, stack = Ask(model="m", engine="vllm", plan_findings=plan.stack.findings), gpu_stack()
    found = {finding.code for finding in check(ask, stack)}
    assert found & {"PF067", "PF068"}


def test_an_unreadable_model_leaves_the_ask_alone(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    stack = Stack(python=Python(version="3.11.0"), model=look_at_model(str(tmp_path / "none")))
    ask = Ask(model=str(tmp_path / "none"))
    assert sized(ask, stack) == ask
