"""GGUF metadata to a ``ModelArch``.

The keys are turned into the config.json of the same model, so that one builder per family
serves both. Key names: ``gguf-py/gguf/constants.py`` of llama.cpp. Bytes are those of the
tensor table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hullspeed.arch import families
from hullspeed.arch.families.common import union
from hullspeed.arch.fields import Fields
from hullspeed.arch.gguf import GgufFile, GgufTensor
from hullspeed.arch.gguf_names import stored_names
from hullspeed.arch.mlps import GATED, MoeMlp
from hullspeed.arch.model import Extra, ModelArch
from hullspeed.arch.quant import WeightFormat
from hullspeed.arch.tensors import Role, TensorSpec
from hullspeed.errors import CorruptFileError, UnsupportedModelError

# Token ids that end a turn, whatever the chat template calls them.
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SHOWN = 3

# config.json field: GGUF key below the architecture's name
_COMMON = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "intermediate_size": "feed_forward_length",
}
_MOE = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_MIXTRAL = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_GDN = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_YARN = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
_SLIDING = {"sliding_window": "attention.sliding_window"}

# What converters make of every family's experts.
_EXPERTS_OF_GGUF: dict[str, Any] = {
    "fused_experts": False, "transposed": False, "module": "mlp", "names": GATED,
}  # fmt: skip

# GGUF architecture: model_type, keys
_ARCHITECTURES: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("llama", _COMMON),
    "qwen2": ("qwen2", _COMMON),
    "qwen3": ("qwen3", _COMMON),
    "qwen3moe": ("qwen3_moe", _COMMON | _MOE),
    "gemma3": ("gemma3_text", _COMMON | _SLIDING),
    "gpt-oss": ("gpt_oss", _COMMON | _SLIDING | _MOE),
    "qwen3next": ("qwen3_next", _COMMON | _MOE | _GDN),
    "qwen35": ("qwen3_5_text", _COMMON | _GDN),
    "qwen35moe": ("qwen3_5_moe_text", _COMMON | _MOE | _GDN),
}


def arch_from_gguf(paths: Sequence[Path]) -> ModelArch:
    """The architecture of a GGUF model, in one file or several.

    Raises:
        CorruptFileError: if a file is cut short or contradicts itself or the metadata.
        UnsupportedModelError: if the architecture or a key of it is not known here.
        SourceError: if a file cannot be opened.
    """
    files = [GgufFile(path) for path in paths]
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        if twice := tensors.keys() & file.tensors.keys():
            raise CorruptFileError(
                "two shards hold the same tensor", seen=min(twice), fix="fetch the model again"
            )
        tensors |= file.tensors
    return arch_from_metadata(files[0].metadata, tensors)


def arch_from_metadata(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> ModelArch:
    """The architecture from a GGUF header.

    Raises:
        CorruptFileError: if the tensors do not fit the metadata.
        UnsupportedModelError: if the architecture or a key of it is not known here.
    """
    source = Fields(metadata, "the GGUF metadata")
    name = source.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            "a GGUF architecture that is not known here",
            seen=name,
            fix=f"known: {', '.join(_ARCHITECTURES)}",
        )
    config = _config(source, name, tensors)
    arch = families.build(Fields(config, "the GGUF metadata"))
    # Whatever the checkpoint did, each expert's matrices lie as they are multiplied.
    layers = (
        replace(layer, mlp=replace(layer.mlp, **_EXPERTS_OF_GGUF))
        if isinstance(layer.mlp, MoeMlp)
        else layer
        for layer in arch.layers
    )
    return _checked(replace(arch, layers=tuple(layers)), name, tensors)


def _config(source: Fields, name: str, tensors: Mapping[str, GgufTensor]) -> dict[str, object]:
    """The config.json that the metadata amounts to."""
    model_type, keys = _ARCHITECTURES[name]
    if name == "llama" and source.natural_or(0, "llama.expert_count", zero=True):
        model_type, keys = "mixtral", _COMMON | _MIXTRAL  # by the same converter, llama's layout
        if "blk.0.ffn_gate.0.weight" in tensors:
            raise UnsupportedModelError(
                "a GGUF file with a tensor for each expert, as converters wrote until April 2024",
                seen="blk.0.ffn_gate.0.weight",
                fix="convert the model again, or fetch a newer conversion",
            )
    config: dict[str, object] = {"model_type": model_type, "torch_dtype": "float16"}
    for field, key in keys.items():
        value = source.values.get(f"{name}.{key}")
        if value is not None:
            config[field] = _plain(value)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptFileError(
            "the GGUF file has no matrix token_embd.weight", fix="fetch the file again"
        )
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["bos_token_id"] = source.values.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = list(
        union(*(source.naturals(f"tokenizer.ggml.{key}") for key in _EOS_KEYS))
    )
    _head_dim(config, source, name)
    _scaling(config, source, name)
    if special := _SPECIALS.get(name):
        special(config, source)
    return config


def _plain(value: object) -> object:
    """A numpy array of per-layer values as one value if all are equal, else as a list."""
    if not isinstance(value, np.ndarray):
        return value
    listed: list[object] = value.tolist()
    return listed[0] if listed and all(item == listed[0] for item in listed) else listed


def _head_dim(config: dict[str, object], source: Fields, name: str) -> None:
    """Without ``attention.key_length`` a head is embedding / heads wide (gguf.md)."""
    if "head_dim" not in config:
        width = source.natural(f"{name}.embedding_length")
        heads = source.natural(f"{name}.attention.head_count")
        if width % heads:
            source.wrong(f"{name}.embedding_length", f"a multiple of the {heads} heads")
        config["head_dim"] = width // heads
    values = source.natural_or(0, f"{name}.attention.value_length")
    if values and values != config["head_dim"]:
        source.wrong(f"{name}.attention.value_length", f"as wide as keys ({config['head_dim']})")
    rotary = source.natural_or(0, f"{name}.rope.dimension_count")
    if rotary and rotary != config["head_dim"]:
        config["partial_rotary_factor"] = rotary / int(str(config["head_dim"]))


def _scaling(config: dict[str, object], source: Fields, name: str) -> None:
    below = f"{name}.rope.scaling."
    kind = source.text(f"{below}type", absent="none")
    if kind in ("none", ""):
        return
    scaling: dict[str, object] = {"rope_type": kind, "factor": source.number(f"{below}factor")}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = source.natural(
            f"{below}original_context_length"
        )
    for field, key in _YARN.items():
        if source.has(below + key):
            scaling[field] = source.number(below + key)
    config["rope_scaling"] = scaling


def _gemma3(config: dict[str, object], source: Fields) -> None:
    """llama.cpp fixes the pattern of five to one and, unless a key states it, the local theta."""
    config |= {
        "sliding_window_pattern": 6,
        "rope_local_base_freq": source.number_or(10_000.0, "gemma3.rope.freq_base_swa"),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["head_dim"],
    }
    if config.get("num_hidden_layers") == 62:  # the 27B scales by hidden / heads
        config["query_pre_attn_scalar"] = source.natural(
            "gemma3.embedding_length"
        ) // source.natural("gemma3.attention.head_count")


def _gpt_oss(config: dict[str, object], source: Fields) -> None:
    """Even layers slide; llama.cpp fixes the pattern in code."""
    count = source.natural("gpt-oss.block_count")
    config |= {
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(count)],
        "attention_bias": True,
        "num_local_experts": config.pop("num_experts", None),
        "intermediate_size": config.pop("moe_intermediate_size", None),
    }
    if isinstance(scaling := config.get("rope_scaling"), dict):
        scaling["truncate"] = False  # in every gpt-oss config.json; no key holds it


def _gated_delta_net(config: dict[str, object], source: Fields) -> None:
    name = source.text("general.architecture")
    inner = source.natural(f"{name}.ssm.inner_size")
    v_heads = source.natural(f"{name}.ssm.time_step_rank")
    if inner % v_heads:
        source.wrong(f"{name}.ssm.inner_size", f"a multiple of the {v_heads} value heads")
    config["linear_value_head_dim"] = inner // v_heads
    drafted = source.natural_or(0, f"{name}.nextn_predict_layers", zero=True)
    count = source.natural(f"{name}.block_count") - drafted  # llama.cpp counts them as blocks
    config["num_hidden_layers"] = count
    recurrent = source.values.get(f"{name}.attention.recurrent_layers")
    if isinstance(recurrent, np.ndarray) and len(recurrent) >= count:
        config["layer_types"] = [
            "linear_attention" if flag else "full_attention" for flag in recurrent[:count].tolist()
        ]


_SPECIALS: dict[str, Callable[[dict[str, object], Fields], None]] = {
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "qwen3next": _gated_delta_net,
    "qwen35": _gated_delta_net,
    "qwen35moe": _gated_delta_net,
}


def _checked(arch: ModelArch, name: str, tensors: Mapping[str, GgufTensor]) -> ModelArch:
    """The architecture with the bytes of the tensor table, if every weight is in it."""
    groups: dict[tuple[str, ...], list[TensorSpec]] = {}
    for spec in arch.tensors(extras=False):
        groups.setdefault(stored_names(spec.name, name, arch.prefix, tensors), []).append(spec)
    sizes: dict[str, int] = {}
    types: dict[str, str] = {}
    problems: list[str] = []
    for names, specs in groups.items():
        if problem := _problem(names, specs, tensors):
            problems.append(problem)
            continue
        # Experts are stored together, each as large as the next.
        nbytes = sum(tensors[n].nbytes for n in names)
        sizes |= {spec.name: nbytes // len(specs) for spec in specs}
        types |= {spec.name: tensors[names[0]].type.name for spec in specs}
    if problems:
        raise CorruptFileError(
            f"the tensors do not fit the GGUF metadata in {len(problems)} places",
            seen="; ".join(problems[:_SHOWN]),
            fix="convert or fetch the file again",
        )
    used = {n for names in groups for n in names}
    rest: dict[str, list[TensorSpec]] = {}
    for tensor in tensors.values():
        if tensor.name not in used:
            spec = TensorSpec(tensor.name, tensor.shape, Role.VECTOR)
            rest.setdefault(_extra_of(tensor.name, len(arch.layers)), []).append(spec)
            sizes[tensor.name] = tensor.nbytes
    extras = tuple(Extra(name=what, tensors=tuple(specs)) for what, specs in rest.items())
    stored = WeightFormat(name="gguf", stored_bytes=sizes, stored_types=types)
    return replace(arch, quant="gguf", weight_format=stored, extras=extras)


def _extra_of(name: str, n_layers: int) -> str:
    """What a tensor beside the decoder is: llama.cpp appends MTP layers as further blocks."""
    block = name.removeprefix("blk.").partition(".")[0]
    if name.startswith("blk.") and block.isdecimal() and int(block) >= n_layers:
        return "mtp"
    return "rope" if name.startswith("rope_") else "unlisted"


def _problem(
    names: tuple[str, ...], specs: list[TensorSpec], tensors: Mapping[str, GgufTensor]
) -> str | None:
    """What is wrong with the tensors that hold some weights; matrices must fit exactly."""
    if missing := [n for n in names if n not in tensors]:
        return f"{missing[0]} is missing"
    found, spec = tensors[names[0]], specs[0]
    alone = len(names) == len(specs) == 1 and len(spec.shape) == 2
    elements = sum(math.prod(tensors[n].shape) for n in names)
    same = found.shape in (spec.shape, spec.shape[1:] if spec.shape[0] == 1 else spec.shape)
    if elements != sum(s.elements for s in specs) or (alone and not same):
        return f"{names[0]} has shape {found.shape}, expected {spec.shape} x {len(specs)}"
    return None
