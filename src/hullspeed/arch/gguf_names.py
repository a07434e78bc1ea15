"""Names of weights in a GGUF file, from their names in a Hugging Face checkpoint.

Source: ``gguf-py/gguf/tensor_mapping.py`` and ``constants.py`` of llama.cpp; a test compares the
table with that package.
"""

from __future__ import annotations

import re
from collections.abc import Container

_OUTER = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

# below a layer; a tuple names tensors that together hold the weight
_LAYER: dict[str, str | tuple[str, ...]] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_qkvz": ("attn_qkv.weight", "attn_gate.weight"),
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}

# Architectures whose second norm llama.cpp calls by its own name.
_POST_ATTENTION = {
    name: {"post_attention_layernorm": "post_attention_norm"}
    for name in ("gpt-oss", "qwen3next", "qwen35", "qwen35moe", "gemma3")
}
_POST_ATTENTION["gemma3"] |= {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

# Other converters kept these in one tensor: Qwen3-Next's projection untouched, gate over up.
_ALTERNATIVES: dict[tuple[str, ...], str] = {
    ("ffn_gate_exps.weight", "ffn_up_exps.weight"): "ffn_gate_up_exps.weight",
    ("ffn_gate_exps.weight",): "ffn_gate_up_exps.weight",
    ("ffn_up_exps.weight",): "ffn_gate_up_exps.weight",
    ("attn_qkv.weight", "attn_gate.weight"): "ssm_in.weight",
}

_IN_LAYER = re.compile(r"^layers\.(?P<layer>\d+)\.(?P<name>.+)$")
_ONE_EXPERT = re.compile(r"\bmlp\.experts\.(\d+)\.")


def gguf_names(name: str, architecture: str, prefix: str = "model.") -> tuple[str, ...]:
    """The GGUF tensors that together hold a weight, e.g. ``("blk.0.attn_q.weight",)``.

    Args:
        name: Full name in the checkpoint.
        architecture: ``general.architecture`` of the file.
        prefix: The decoder's prefix in the checkpoint.

    Raises:
        KeyError: for a weight that GGUF does not name.
    """
    below = name.removeprefix(prefix)
    if below in _OUTER:
        return (_OUTER[below],)
    match = _IN_LAYER.match(below)
    if match is None:
        raise KeyError(name)
    inner = _ONE_EXPERT.sub("mlp.experts.", match["name"])
    table = _LAYER | _POST_ATTENTION.get(architecture, {})
    for suffix in ("", ".weight", ".bias"):
        stem = inner.removesuffix(suffix) if suffix else inner
        if stem in table and (not suffix or inner.endswith(suffix)):
            found = table[stem]
            names = (found,) if isinstance(found, str) else found
            full = (n if "." in n or n == "ssm_a" else f"{n}{suffix or '.weight'}" for n in names)
            return tuple(f"blk.{match['layer']}.{n}" for n in full)
    raise KeyError(name)


def expert_of(name: str) -> int | None:
    """The expert whose weight it is: all experts of a layer are in one GGUF tensor."""
    found = _ONE_EXPERT.search(name)
    return int(found[1]) if found else None


def stored_names(
    name: str, architecture: str, prefix: str, tensors: Container[str]
) -> tuple[str, ...]:
    """:func:`gguf_names`, or the one tensor among ``tensors`` that is there in their place.

    Raises:
        KeyError: for a weight that GGUF does not name.
    """
    names = gguf_names(name, architecture, prefix)
    if names[0] in tensors:
        return names
    block, _, _ = names[0].rpartition(names[0].split(".", 2)[-1])
    other = _ALTERNATIVES.get(tuple(n.removeprefix(block) for n in names))
    return (block + other,) if other and block + other in tensors else names
