"""From files to an architecture: checkpoints that transformers wrote, GGUF files, and misfits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from hullspeed.arch import catalogue
from hullspeed.arch.gguf import GgufFile
from hullspeed.arch.gguf_arch import arch_from_metadata
from hullspeed.arch.gguf_names import gguf_names
from hullspeed.arch.load import load_arch
from hullspeed.arch.quant import weight_breakdown, weight_bytes
from hullspeed.errors import CorruptFileError, UnsupportedModelError
from hullspeed.sources import ModelFiles, resolve

_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 256,
    "eos_token_id": 2,
}  # fmt: skip
_GDN: dict[str, Any] = {
    **_TEXT, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip

_SAVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_TEXT, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _TEXT),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _TEXT),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _GDN),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_TEXT, "sliding_window": 16}),
}


def _save(name: str, root: Path) -> None:
    config_class, model_class, settings = _SAVED[name]
    config = getattr(transformers, config_class)(**settings, pad_token_id=0)
    model = getattr(transformers, model_class)(config).to(torch.bfloat16)
    model.save_pretrained(root)


@pytest.mark.parametrize("name", _SAVED)
def test_a_checkpoint_that_transformers_saved(name: str, tmp_path: Path) -> None:
    _save(name, tmp_path)
    arch = load_arch(resolve(str(tmp_path)))
    data_bytes = 0
    for path in resolve(str(tmp_path)).weights:
        header = int.from_bytes(path.read_bytes()[:8], "little")
        data_bytes += path.stat().st_size - 8 - header
    assert weight_bytes(arch) == data_bytes
    assert arch.dtype == "bf16"
    assert arch.eos_token_ids == (2,)
    assert not arch.extras


def test_end_ids_come_from_every_file(tmp_path: Path) -> None:
    _save("qwen3", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7, 9999999]}')
    tokens = {"eos_token": "<end>", "added_tokens_decoder": {"5": {"content": "<end>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    assert load_arch(resolve(str(tmp_path))).eos_token_ids == (2, 7, 5)


def _edit(root: Path, **changes: object) -> None:
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "change",
    [{"intermediate_size": 80}, {"num_hidden_layers": 5}, {"vocab_size": 130}, {"head_dim": 32}],
    ids=str,
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    _save("qwen3", tmp_path)
    _edit(tmp_path, **change, layer_types=None)
    with pytest.raises(CorruptFileError, match=r"do not fit config\.json"):
        load_arch(resolve(str(tmp_path)))


def test_no_byte_is_lost(tmp_path: Path) -> None:
    """What the architecture does not name is counted as an extra of its own."""
    _save("qwen3", tmp_path)
    save_file({"probe.weight": np.zeros((3, 5), np.float32)}, tmp_path / "more.safetensors")
    arch = load_arch(resolve(str(tmp_path)))
    assert weight_breakdown(arch)["unlisted"] == 60
    assert weight_bytes(arch) - weight_bytes(arch, extras=False) == 60


def test_an_unknown_quantization_is_sized_from_its_headers(tmp_path: Path) -> None:
    """Only headers know what is inside; without them it is refused."""
    _save("qwen2", tmp_path)
    plain = load_arch(resolve(str(tmp_path)))
    tensors: dict[str, Any] = {}
    for spec in plain.tensors():
        if spec.name.endswith("_proj.weight"):
            module = spec.name.removesuffix(".weight")
            tensors[f"{module}.codes"] = np.zeros((spec.elements // 4,), np.uint8)
            tensors[f"{module}.codebook"] = np.zeros((16,), np.float32)
        else:
            tensors[spec.name] = np.zeros(spec.shape, np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    _edit(tmp_path, quantization_config={"quant_method": "novel"})
    arch = load_arch(resolve(str(tmp_path)))
    assert arch.quant == "novel"
    assert weight_bytes(arch) == sum(array.nbytes for array in tensors.values())
    assert not arch.extras
    assert arch.param_count() == plain.param_count()
    tensors["model.norm.weight"] = np.zeros(65, np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptFileError, match=r"model\.norm\.weight has shape"):
        load_arch(resolve(str(tmp_path)))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="method that is not known"):
        load_arch(resolve(str(tmp_path), need_weights=False))


def test_weights_without_a_config(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"without a config\.json"):
        load_arch(resolve(str(tmp_path)))


def test_smollm2(smollm2_files: ModelFiles) -> None:
    """The real file: exact, and its header with 49,152 tokens in under a tenth of a second."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        file = GgufFile(smollm2_files.weights[0])
        times.append(time.perf_counter() - started)
    assert min(times) < 0.1
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49_152  # type: ignore[arg-type]
    arch = load_arch(smollm2_files)
    known = catalogue.load("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert arch.param_count() == known.param_count() == 134_515_008
    assert arch.layers == known.layers
    assert arch.eos_token_ids == (2,)
    assert arch.tied_embeddings
    assert weight_bytes(arch) == sum(tensor.nbytes for tensor in file.tensors.values())


def _written(
    path: Path, name: str, keys: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    writer = reference.GGUFWriter(path, name)
    for key, value in keys.items():
        if isinstance(value, float):
            writer.add_float32(f"{name}.{key}", value)
        else:
            writer.add_uint32(f"{name}.{key}", value)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(4)
    for tensor, shape in shapes.items():
        writer.add_tensor(tensor, np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_KEYS: dict[str, Any] = {
    "block_count": 4, "context_length": 256, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
    "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10_000.0,
}  # fmt: skip
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
_SSM = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4,
    "ssm.inner_size": 64, "full_attention_interval": 4, "rope.dimension_count": 4,
}  # fmt: skip
_GGUF: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _KEYS),
    "qwen2": ("qwen2", _KEYS),
    "qwen3": ("qwen3", _KEYS),
    "qwen3moe": ("qwen3_moe", _KEYS | _EXPERTS),
    "gemma3": ("gemma3", _KEYS | {"attention.sliding_window": 16}),
    "gpt-oss": ("gpt_oss", _KEYS | _EXPERTS | {"attention.sliding_window": 16}),
    "qwen3next": (
        "qwen3_next",
        _KEYS | _EXPERTS | _SSM | {"expert_shared_feed_forward_length": 40},
    ),
    "qwen35": ("qwen3_5", _KEYS | _SSM),
    "qwen35moe": (
        "qwen3_5_moe",
        _KEYS | _EXPERTS | _SSM | {"expert_shared_feed_forward_length": 40},
    ),
}


def _gguf_shapes(name: str, keys: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that llama.cpp keeps for a model, from its own lists and the sizes above."""
    arch = next(a for a, n in reference.MODEL_ARCH_NAMES.items() if n == name)
    h, ff, e = 64, 96, keys.get("expert_count", 0)
    q, kv, ef, es = 64, 32, 24, keys.get("expert_shared_feed_forward_length", 0)
    gate = 2 if name in ("qwen3next", "qwen35", "qwen35moe") else 1
    kinds = reference.MODEL_TENSOR
    attention = {
        kinds.ATTN_Q: (gate * q, h),
        kinds.ATTN_K: (kv, h),
        kinds.ATTN_V: (kv, h),
        kinds.ATTN_OUT: (h, q),
        kinds.ATTN_Q_NORM: (16,),
        kinds.ATTN_K_NORM: (16,),
    }
    linear = {
        kinds.ATTN_QKV: (128, h),
        kinds.ATTN_GATE: (64, h),
        kinds.SSM_CONV1D: (128, 4),
        kinds.SSM_A: (4,),
        kinds.SSM_DT: (4,),
        kinds.SSM_NORM: (16,),
        kinds.SSM_OUT: (h, 64),
        kinds.SSM_BETA: (4, h),
        kinds.SSM_ALPHA: (4, h),
        kinds.SSM_BETA_ALPHA: (8, h),
    }
    both = {
        kinds.ATTN_NORM: (h,),
        kinds.FFN_NORM: (h,),
        kinds.FFN_PRE_NORM: (h,),
        kinds.ATTN_POST_NORM: (h,),
        kinds.FFN_POST_NORM: (h,),
        kinds.FFN_GATE: (ff, h),
        kinds.FFN_UP: (ff, h),
        kinds.FFN_DOWN: (h, ff),
        kinds.FFN_GATE_INP: (e, h),
        kinds.FFN_GATE_EXP: (e, ef, h),
        kinds.FFN_UP_EXP: (e, ef, h),
        kinds.FFN_DOWN_EXP: (e, h, ef),
        kinds.FFN_GATE_INP_SHEXP: (h,),
        kinds.FFN_GATE_SHEXP: (es, h),
        kinds.FFN_UP_SHEXP: (es, h),
        kinds.FFN_DOWN_SHEXP: (h, es),
    }
    listed = set(reference.MODEL_TENSORS[arch])
    dense = {kinds.FFN_GATE, kinds.FFN_UP, kinds.FFN_DOWN}
    routed = {kinds.FFN_GATE_INP, kinds.FFN_GATE_EXP, kinds.FFN_UP_EXP, kinds.FFN_DOWN_EXP}
    listed -= dense if e else routed
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (128, h),
        "output_norm.weight": (h,),
        "output.weight": (128, h),
    }
    for i in range(4):
        recurrent = gate == 2 and (i + 1) % 4
        for tensor, shape in (both | (linear if recurrent else attention)).items():
            if tensor not in listed:
                continue
            stem = reference.TENSOR_NAMES[tensor].format(bid=i)
            suffix = (
                ".bias" if tensor is kinds.SSM_DT else "" if tensor is kinds.SSM_A else ".weight"
            )
            shapes[stem + suffix] = shape
            if name == "qwen2" and tensor in (kinds.ATTN_Q, kinds.ATTN_K, kinds.ATTN_V):
                shapes[f"{stem}.bias"] = shape[:1]
        if name == "gpt-oss":
            shapes |= {
                f"blk.{i}.attn_sinks.weight": (4,),
                f"blk.{i}.attn_q.bias": (q,),
                f"blk.{i}.attn_k.bias": (kv,),
                f"blk.{i}.attn_v.bias": (kv,),
                f"blk.{i}.attn_output.bias": (h,),
                f"blk.{i}.ffn_gate_inp.bias": (e,),
                f"blk.{i}.ffn_gate_exps.bias": (e, ef),
                f"blk.{i}.ffn_up_exps.bias": (e, ef),
                f"blk.{i}.ffn_down_exps.bias": (e, h),
            }
    return shapes


@pytest.mark.parametrize("name", _GGUF)
def test_gguf_metadata_alone(name: str, tmp_path: Path) -> None:
    family, keys = _GGUF[name]
    path = tmp_path / "m.gguf"
    shapes = _gguf_shapes(name, keys)
    _written(path, name, keys, shapes)
    arch = load_arch(resolve(str(path)))
    assert arch.family == family
    assert not arch.extras, [t.name for t in arch.extras[0].tensors][:5]
    assert arch.eos_token_ids == (3, 4)
    assert arch.quant == "gguf"
    elements = sum(int(np.prod(shape)) for shape in shapes.values())
    assert arch.param_count() == elements
    assert weight_bytes(arch) == 2 * elements


def test_gguf_in_shards(tmp_path: Path) -> None:
    shapes = _gguf_shapes("qwen3", _KEYS)
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    names = sorted(shapes)
    _written(first, "qwen3", _KEYS, {n: shapes[n] for n in names[:20]})
    _written(second, "qwen3", _KEYS, {n: shapes[n] for n in names[20:]})
    elements = sum(int(np.prod(shape)) for shape in shapes.values())
    assert load_arch(resolve(str(tmp_path))).param_count() == elements
    _written(second, "qwen3", _KEYS, {n: shapes[n] for n in names[19:]})
    with pytest.raises(CorruptFileError, match="two shards hold the same tensor"):
        load_arch(resolve(str(tmp_path)))


def test_gguf_misfits(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shapes = _gguf_shapes("qwen3", _KEYS)
    _written(path, "qwen3", _KEYS | {"feed_forward_length": 80}, shapes)
    with pytest.raises(CorruptFileError, match="do not fit the GGUF metadata in 12 places"):
        load_arch(resolve(str(path)))
    _written(path, "qwen3", _KEYS, {n: s for n, s in shapes.items() if "blk.2.attn_q" not in n})
    with pytest.raises(CorruptFileError, match=r"blk\.2\.attn_q"):
        load_arch(resolve(str(path)))
    missing = {k: v for k, v in _KEYS.items() if k != "block_count"}
    _written(path, "qwen3", missing, shapes)
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers"):
        load_arch(resolve(str(path)))
    _written(path, "mystery", _KEYS, shapes)
    with pytest.raises(UnsupportedModelError, match="architecture that is not known"):
        load_arch(resolve(str(path)))
    with pytest.raises(UnsupportedModelError, match=r"general\.architecture"):
        arch_from_metadata({}, {})
    with pytest.raises(CorruptFileError, match=r"token_embd\.weight"):
        arch_from_metadata({"general.architecture": "llama"}, {})


def test_gguf_names_are_the_references() -> None:
    """Each name against gguf's own tensor map."""
    for model_arch, name in reference.MODEL_ARCH_NAMES.items():
        if name not in ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen35"):
            continue
        table = reference.get_tensor_name_map(model_arch, 2)
        for stem in (
            "model.embed_tokens", "model.norm", "lm_head", "model.layers.1.input_layernorm",
            "model.layers.1.post_attention_layernorm", "model.layers.1.self_attn.q_proj",
            "model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.k_norm",
            "model.layers.1.mlp.down_proj", "model.layers.1.linear_attn.in_proj_a",
            "model.layers.1.linear_attn.in_proj_b", "model.layers.1.linear_attn.out_proj",
            "model.layers.1.pre_feedforward_layernorm",
        ):  # fmt: skip
            theirs = table.get_name(f"{stem}.weight", try_suffixes=(".weight",))
            if theirs is not None:
                assert gguf_names(f"{stem}.weight", name) == (theirs,), (name, stem)
    with pytest.raises(KeyError):
        gguf_names("model.layers.0.mystery.weight", "llama")
