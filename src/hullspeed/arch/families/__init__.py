"""Families: one builder for each ``model_type`` of config.json."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from hullspeed.arch.families import (
    bamba,
    deepseek,
    gemma,
    gpt_oss,
    llama,
    mixtral,
    nemotron_h,
    qwen,
)
from hullspeed.arch.fields import Fields
from hullspeed.arch.model import ModelArch
from hullspeed.errors import UnsupportedModelError

Builder = Callable[[Fields], ModelArch]

BUILDERS: dict[str, Builder] = {
    "llama": llama.build_llama,
    "mistral": llama.build_mistral,
    "mistral3": llama.build_mistral3,
    "qwen2": qwen.build_qwen2,
    "qwen3": qwen.build_qwen3,
    "qwen3_moe": qwen.build_qwen3_moe,
    "qwen3_next": qwen.build_qwen3_next,
    "qwen3_5": qwen.build_qwen3_5,
    "qwen3_5_text": qwen.build_qwen3_5_text,
    "qwen3_5_moe": qwen.build_qwen3_5,
    "qwen3_5_moe_text": qwen.build_qwen3_5_text,
    "gemma2": gemma.build_gemma2,
    "gemma3": gemma.build_gemma3,
    "gemma3_text": gemma.build_gemma3_text,
    "gpt_oss": gpt_oss.build,
    "mixtral": mixtral.build,
    "nemotron_h": nemotron_h.build,
    "bamba": bamba.build,
    "deepseek_v2": deepseek.build_v2,
    "deepseek_v3": deepseek.build_v3,
}


def build(config: Fields) -> ModelArch:
    """The architecture that a config.json describes, weights taken as unquantized.

    Raises:
        UnsupportedModelError: for a ``model_type`` without a builder, and for a field that is
            missing, of another type or out of bounds.
    """
    model_type = config.text("model_type")
    builder = BUILDERS.get(model_type)
    if builder is None:
        near = difflib.get_close_matches(model_type, BUILDERS, n=3)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise UnsupportedModelError(
            "an architecture that is not known here",
            seen=model_type,
            fix=f"{hint}known: {', '.join(sorted(BUILDERS))}",
        )
    return builder(config)
