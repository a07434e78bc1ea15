"""Tiny random models of transformers, the independent oracle, and our view of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hullspeed.arch.mixers import FullAttention, SlidingAttention
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Layer, ModelArch, Rope
from hullspeed.models.weights import TensorWeights

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VOCAB = 211
CONTEXT_TOKENS = 512


@dataclass(frozen=True)
class Oracle:
    """A transformers model and the same model as we see it."""

    arch: ModelArch
    weights: TensorWeights
    module: Any

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """``[T, vocab]``."""
        with torch.inference_mode():
            result: torch.Tensor = self.module(torch.tensor([tokens])).logits[0]
        return result


def make_oracle(
    family: str, *, scaling: dict[str, Any] | None = None, tied: bool = False, window: int = 0
) -> Oracle:
    import transformers as hf

    head_dim = 32 if family == "qwen3" else 16
    heads, kv_heads, hidden, intermediate, n_layers = 6, 2, 96, 144, 3
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config_class = getattr(hf, names[family] + "Config")
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=n_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "default", **(scaling or {})},
        attn_implementation="eager",
        **({"sliding_window": window or None} if family == "mistral" else {}),
    )
    torch.manual_seed(7)
    module = getattr(hf, names[family] + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # Norms and biases that are not 1 and 0, so that leaving one out shows.
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
            else:
                parameter.normal_(0.0, 0.15)
    of_heads: dict[str, Any] = {
        "q_heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": head_dim,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
    }
    mixer = FullAttention(**of_heads)
    if window:
        mixer = SlidingAttention(**of_heads, window_tokens=window)
    arch = ModelArch(
        family=family,
        hidden=hidden,
        vocab=VOCAB,
        layers=(Layer(mixer, DenseMlp(intermediate=intermediate)),) * n_layers,
        tied_embeddings=tied,
        norm_eps=config.rms_norm_eps,
        rope=Rope(theta=10_000.0, scaling=tuple((scaling or {}).items())),
        max_context_tokens=CONTEXT_TOKENS,
    )
    return Oracle(arch, TensorWeights(dict(module.state_dict())), module)


@pytest.fixture(
    scope="session", params=["llama", "llama3-rope", "tied", "mistral", "window", "qwen2", "qwen3"]
)
def oracle(request: pytest.FixtureRequest) -> Oracle:
    """One of the families."""
    match request.param:
        case "llama3-rope":
            return make_oracle("llama", scaling=LLAMA3)
        case "tied":
            return make_oracle("llama", tied=True)
        case "window":
            return make_oracle("mistral", window=50)
        case family:
            return make_oracle(family)
