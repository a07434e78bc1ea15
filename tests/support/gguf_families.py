"""Tiny GGUF files of every architecture, as llama.cpp's converter lays them out.

Written from the converter's source with the ``gguf`` package: names by hand, so that the table of
names under test is not its own witness. Files that the converter itself made of the
four Qwen checkpoints gave the same logits; those of Gemma 3 and gpt-oss were not made with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

Named = Iterator[tuple[str, torch.Tensor]]

ARCHITECTURES = {
    "qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next", "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe", "mixtral": "llama", "gemma3": "gemma3", "gpt_oss": "gpt-oss",
}  # fmt: skip
"""Of llama.cpp, by our family."""

CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": []},
    "gemma3": {"query_pre_attn_scalar": 32},
    "gpt_oss": {"swiglu_limit": 7.0},
}
"""Particulars that GGUF has no key for, as llama.cpp fixes them."""

_ATTENTION = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "linear_attn.conv1d": "ssm_conv1d",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_TENSORS = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
            "self_attn.sinks": "attn_sinks.weight"}  # fmt: skip
_OUTER = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight",
          "model.norm.weight": "output_norm.weight"}  # fmt: skip


def write_gguf_of(path: Path, family: str, module: Any, *, expert_type: str = "F32") -> None:
    """The module of :func:`support.families.write_family` as a GGUF file in float32; experts in
    ``expert_type``.
    """
    config = module.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    _write_keys(writer, family, config)
    kind = gguf.GGMLQuantizationType[expert_type]
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for stored, values in _converted(family, config, name, tensor):
            data = np.ascontiguousarray(values.numpy())
            if "_exps.weight" in stored and expert_type != "F32":
                writer.add_tensor(stored, gguf.quants.quantize(data, kind), raw_dtype=kind)
            else:
                writer.add_tensor(stored, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_keys(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    below = ARCHITECTURES[family]
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{below}.rope.scaling.type", full["rope_type"])
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_float32(f"{below}.rope.scaling.yarn_beta_fast", full["beta_fast"])
        writer.add_float32(f"{below}.rope.scaling.yarn_beta_slow", full["beta_slow"])
    if family in ("gemma3", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma3":
        local = rope["sliding_attention"]["rope_theta"]
        writer.add_float32(f"{below}.rope.freq_base_swa", local)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        width = getattr(config, "moe_intermediate_size", config.intermediate_size)
        writer.add_expert_feed_forward_length(width)
        if shared := getattr(config, "shared_expert_intermediate_size", 0):
            writer.add_expert_shared_feed_forward_length(shared)
    if hasattr(config, "linear_num_key_heads"):
        v_heads = config.linear_num_value_heads
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(v_heads)
        writer.add_ssm_inner_size(v_heads * config.linear_value_head_dim)
        recurrent = [kind == "linear_attention" for kind in config.layer_types]
        writer.add_array(f"{below}.attention.recurrent_layers", recurrent)
        writer.add_uint32(f"{below}.full_attention_interval", 4)
        writer.add_rope_dimension_count(int(config.head_dim * full["partial_rotary_factor"]))


def _converted(family: str, config: Any, name: str, tensor: torch.Tensor) -> Named:
    tensor = tensor.detach().float()
    if family.startswith(("gemma", "qwen3_next", "qwen3_5")) and (
        name.endswith("norm.weight") and "linear_attn" not in name
    ):
        tensor = tensor + 1
    if name in _OUTER:
        yield _OUTER[name], tensor
        return
    _, _, layer, inner = name.split(".", 3)
    block = f"blk.{layer}."
    if family in ("qwen3_5", "qwen3_5_moe") and inner.startswith("linear_attn."):
        tensor = _tiled(config, inner, tensor)
    if family == "mixtral" and inner.startswith(("self_attn.q_", "self_attn.k_")):
        heads = tensor.reshape(-1, 2, config.head_dim // 2, tensor.shape[1])
        tensor = heads.transpose(1, 2).reshape(tensor.shape)  # permute() of the converter
    if inner == "linear_attn.A_log":
        tensor = -tensor.exp()
    if "conv1d" in inner:
        tensor = tensor.squeeze()
    if inner.startswith("mlp.experts."):
        yield from ((block + n, t) for n, t in _experts(family, inner, tensor))
    elif inner == "linear_attn.in_proj_qkvz.weight":
        yield from ((block + n, t) for n, t in _sorted_rows(config, tensor))
    elif inner in _TENSORS:
        yield block + _TENSORS[inner], tensor
    else:
        stem, _, kind = inner.rpartition(".")
        second = "ffn_norm" if family in ("qwen3_moe", "mixtral") else "post_attention_norm"
        stored = second if stem == "post_attention_layernorm" else _ATTENTION[stem]
        yield f"{block}{stored}.{kind}", tensor


def _experts(family: str, inner: str, tensor: torch.Tensor) -> Named:
    last = inner.removeprefix("mlp.experts.")
    kind = "bias" if last.endswith("_bias") else "weight"
    if family == "gpt_oss":  # [experts, in, out], gate and up row by row in turn
        rows = tensor if kind == "bias" else tensor.transpose(1, 2)
        gate, up = rows[:, 0::2], rows[:, 1::2]
    else:
        rows = tensor
        gate, up = rows.chunk(2, dim=1)
    if last.startswith("down_proj"):
        yield f"ffn_down_exps.{kind}", rows
    else:
        yield f"ffn_gate_exps.{kind}", gate
        yield f"ffn_up_exps.{kind}", up


def _sorted_rows(config: Any, tensor: torch.Tensor) -> Named:
    """Queries, keys and values of all heads, and z, from rows that go by key head."""
    heads, k_dim = config.linear_num_key_heads, config.linear_key_head_dim
    v_dim = config.linear_num_value_heads // heads * config.linear_value_head_dim
    by_head = tensor.reshape(heads, -1, tensor.shape[1])
    q, k, v, z = torch.split(by_head, [k_dim, k_dim, v_dim, v_dim], dim=1)
    yield "attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    yield "attn_gate.weight", z.flatten(0, 1)


def _tiled(config: Any, inner: str, tensor: torch.Tensor) -> torch.Tensor:
    """Value heads in the order 0 of every key head, 1 of every key head, ..."""
    k_heads, v_heads = config.linear_num_key_heads, config.linear_num_value_heads
    v_dim, keys = config.linear_value_head_dim, 2 * k_heads * config.linear_key_head_dim
    order = [
        k * (v_heads // k_heads) + i for i in range(v_heads // k_heads) for k in range(k_heads)
    ]
    wide = [head * v_dim + row for head in order for row in range(v_dim)]
    last = inner.removeprefix("linear_attn.")
    if last in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat([tensor[:keys], tensor[keys:][wide]])
    if last == "in_proj_z.weight":
        return tensor[wide]
    if last == "out_proj.weight":
        return tensor[:, wide]
    return tensor if last == "norm.weight" else tensor[order]
