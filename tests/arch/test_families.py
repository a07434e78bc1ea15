"""Every family against transformers: each parameter's name and shape, on the meta device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from hullspeed.arch.families import BUILDERS, build
from hullspeed.arch.fields import Fields
from hullspeed.arch.model import ModelArch

_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
_GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "partial_rotary_factor": 0.25,
}  # fmt: skip
_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
_SHARED = {**_MOE, "shared_expert_intermediate_size": 40}
_QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    "num_position_embeddings": 16,
}  # fmt: skip
_GEMMA = {
    **_TEXT, "sliding_window": 16, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
_GEMMA3 = {
    **_GEMMA, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "patch_size": 14, "image_size": 56, "num_channels": 3, "vision_use_head": False,
}  # fmt: skip
_PIXTRAL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "head_dim": 16, "patch_size": 14, "image_size": 56, "num_channels": 3,
}  # fmt: skip
_MAMBA = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24,
    "conv_kernel": 4, "use_conv_bias": True, "mamba_proj_bias": False, "attention_bias": False,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "n_shared_experts": 1,
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
}  # fmt: skip
_BAMBA = {
    "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_d_head": 16, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "attn_layer_indices": [1, 3], "head_dim": 16,
}  # fmt: skip
_MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip

_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _TEXT),
    "llama with biases, tied": (
        "llama",
        {**_TEXT, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {**_TEXT, "sliding_window": 16}),
    "mistral3": (
        "mistral3",
        {
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**_PIXTRAL, "model_type": "pixtral"},
            "spatial_merge_size": 2,
            "multimodal_projector_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2": ("qwen2", {**_TEXT, "head_dim": 16}),
    "qwen3": ("qwen3", _TEXT),
    "qwen3_moe": ("qwen3_moe", {**_TEXT, **_MOE, "mlp_only_layers": [1]}),
    "qwen3_next": ("qwen3_next", {**_TEXT, **_GDN, **_SHARED, "mtp_num_hidden_layers": 0}),
    "qwen3_5_text": ("qwen3_5_text", {**_TEXT, **_GDN}),
    "qwen3_5": (
        "qwen3_5",
        {
            "text_config": {**_TEXT, **_GDN, "model_type": "qwen3_5_text"},
            "vision_config": _QWEN_VISION,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**_TEXT, **_GDN, **_SHARED}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3_text": ("gemma3_text", _GEMMA3),
    "gemma3": (
        "gemma3",
        {
            "text_config": {**_GEMMA3, "model_type": "gemma3_text"},
            "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model"},
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_TEXT,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "mixtral": (
        "mixtral",
        {**_TEXT, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron_h": ("nemotron_h", {**_TEXT, **_MAMBA}),
    "bamba": ("bamba", {**_TEXT, **_BAMBA}),
    "deepseek_v3": ("deepseek_v3", {**_TEXT, **_MLA}),
    "deepseek_v2": ("deepseek_v2", {**_TEXT, **_MLA, "q_lora_rank": None}),
}

_CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "mistral3": "Mistral3", "qwen2": "Qwen2",
    "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5",
    "qwen3_5_text": "Qwen3_5Text", "qwen3_5_moe_text": "Qwen3_5MoeText", "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text", "gemma3": "Gemma3", "gpt_oss": "GptOss", "mixtral": "Mixtral",
    "nemotron_h": "NemotronH", "bamba": "Bamba", "deepseek_v3": "DeepseekV3",
    "deepseek_v2": "DeepseekV2",
}  # fmt: skip
_NESTED = ("mistral3", "qwen3_5", "gemma3")

# From a checkpoint's names to those of the module in transformers 5.
_RENAMED: list[tuple[str, str]] = [
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head", "lm_head"),
    (r"^backbone\.", "model."),
    (r"^vision_tower\.vision_model\.", "model.vision_tower."),
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
    (r"\.block_sparse_moe\.", ".mlp."),
]
_ONE_EXPERT = re.compile(r"^(?P<stem>.+\.experts)\.(?P<n>\d+)\.(?P<name>\w+)\.weight$")


def _module_names(arch: ModelArch) -> dict[str, tuple[int, ...]]:
    """Our tensors as transformers holds them: renamed, experts stacked, gate and up joined."""
    found: dict[str, tuple[int, ...]] = {}
    for spec in arch.tensors():
        name = spec.name
        for old, new in _RENAMED:
            name = re.sub(old, new, name)
        match = _ONE_EXPERT.match(name)
        if match is None:
            found[name] = spec.shape
            continue
        gated = any(word in name for word in ("gate_proj", "w1", "w3")) or (
            "up_proj" in name and f"{match['stem']}.0.gate_proj.weight" in _own_names(arch)
        )
        if match["name"] in ("down_proj", "w2"):
            target, rows = "down_proj", spec.shape[0]
        elif gated:
            target, rows = "gate_up_proj", 2 * spec.shape[0]
        else:
            target, rows = "up_proj", spec.shape[0]
        experts = int(match["n"]) + 1
        found[f"{match['stem']}.{target}"] = (experts, rows, spec.shape[1])
    return found


def _own_names(arch: ModelArch) -> set[str]:
    return {spec.name for spec in arch.tensors()}


def _their_names(model_type: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    stem = _CLASSES[model_type]
    theirs = dict(config)
    if model_type == "nemotron_h":
        theirs.pop("num_hidden_layers")
    config_class: Callable[..., Any] = getattr(transformers, f"{stem}Config")
    kind = "ForConditionalGeneration" if model_type in _NESTED else "ForCausalLM"
    model_class = getattr(transformers, stem.removesuffix("Text") + kind)
    with torch.device("meta"):
        model = model_class(config_class(**theirs))
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    # The selection bias is a buffer there and a weight in the checkpoint.
    buffers = {n: tuple(b.shape) for n, b in model.named_buffers() if "score_correction" in n}
    return found | buffers


@pytest.mark.parametrize("case", _CASES)
def test_every_parameter_is_transformers_own(case: str) -> None:
    model_type, config = _CASES[case]
    arch = build(Fields({"model_type": model_type, **config}))
    ours, theirs = _module_names(arch), _their_names(model_type, config)
    if model_type == "deepseek_v2":  # the module has no selection bias
        assert not any("score_correction" in name for name in ours)
    assert ours == theirs
    assert arch.param_count() == sum(spec.elements for spec in arch.tensors())


def test_every_family_is_compared() -> None:
    compared = {model_type for model_type, _ in _CASES.values()}
    # qwen3_5_moe nests what qwen3_5_moe_text and the tower of qwen3_5 have been compared for.
    assert compared | {"qwen3_5_moe"} == set(BUILDERS)


def test_a_quantized_qwen3_5_moe_lists_its_experts() -> None:
    """Official FP8 and NVFP4 checkpoints keep one tensor per expert."""
    config = {"model_type": "qwen3_5_moe_text", **_TEXT, **_GDN, **_SHARED}
    names = _own_names(build(Fields({**config, "quantization_config": {"quant_method": "fp8"}})))
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names
    assert "model.layers.0.mlp.experts.down_proj" not in names


def test_gemma3_sees_everything_in_every_sixth_layer() -> None:
    config = {k: v for k, v in _GEMMA3.items() if k != "layer_types"}
    config |= {"model_type": "gemma3_text", "num_hidden_layers": 62, "sliding_window_pattern": 6}
    kinds = [layer.mixer.kind for layer in build(Fields(config)).layers]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == list(range(5, 62, 6))
