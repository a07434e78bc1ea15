"""Tiny random checkpoints of every family, written by transformers as a user's would come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 211
CONTEXT_TOKENS = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_theta": 10_000.0, "rope_type": "default", "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", {**_HYBRID, **_SHARED, "decoder_sparse_step": 1}),
    "qwen3_5": ("Qwen3_5", _HYBRID),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_HYBRID, **_SHARED}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "mixtral": (
        "Mixtral",
        {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral": ("Mistral", {"num_hidden_layers": 2, "sliding_window": 40}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "sliding_window": 40,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_theta": 1e6, "rope_type": "linear", "factor": 8.0,
                },
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 40,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_theta": 150_000.0, "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 128,
            },
        },
    ),
}  # fmt: skip
"""Prefix of the class names in transformers, and what differs from the common config."""

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def write_family(folder: Path, family: str, *, seed: int = 3, **changes: Any) -> Any:
    """A random model of ``family`` in ``folder``; returns transformers' module."""
    import transformers as hf

    prefix, particulars = FAMILIES[family]
    infix = "Text" if family in ("qwen3_5", "qwen3_5_moe", "gemma3") else ""
    config = getattr(hf, f"{prefix}{infix}Config")(
        **{**_COMMON, **particulars, **changes}, attn_implementation="eager"
    )
    torch.manual_seed(seed)
    module = getattr(hf, f"{prefix}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            fill(name, parameter)
    module.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return module


def fill(name: str, parameter: torch.Tensor) -> None:
    """Wide weights: clear winners. Norms and biases that are not 1 and 0, so that leaving one out
    shows; states that neither vanish nor grow.
    """
    last = name.rpartition(".")[2]
    if last == "A_log":
        parameter.uniform_(-3.0, 0.5)
    elif last == "dt_bias":
        parameter.uniform_(-2.0, 1.0)
    elif "norm" in name:
        parameter.normal_(1.0 if "linear_attn" in name else 0.0, 0.25)
    elif parameter.dim() == 1 or last.endswith("_bias"):
        parameter.normal_(0.0, 0.3)
    elif "conv1d" in name:
        parameter.normal_(0.0, 0.5)
    else:
        parameter.normal_(0.0, 0.15)
