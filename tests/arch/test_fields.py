"""Malformed configurations: one clear ModelError each, whatever is in the file."""

from __future__ import annotations

import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hullspeed.arch import catalogue
from hullspeed.arch.fields import parse_json, read_json
from hullspeed.arch.load import arch_from_config
from hullspeed.errors import CorruptFileError, ModelError, SourceError, UnsupportedModelError

_MODELS = (
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3.6-27B-FP8", "Qwen/Qwen3.6-35B-A3B", "google/gemma-3-27b-it",
    "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-Next-80B-A3B-Instruct", "google/gemma-2-27b-it",
)  # fmt: skip

# What the sizes come from; each must be refused by name when it is missing.
_REQUIRED = {
    "Qwen/Qwen3-0.6B": (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
        "rms_norm_eps", "rope_theta", "torch_dtype", "tie_word_embeddings",
    ),
    "Qwen/Qwen3.6-27B": (
        "hidden_size", "full_attention_interval", "linear_num_key_heads",
        "linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim", "head_dim",
    ),
    "openai/gpt-oss-20b": ("layer_types", "sliding_window", "num_local_experts"),
    "deepseek-ai/DeepSeek-V3": ("kv_lora_rank", "qk_rope_head_dim", "first_k_dense_replace"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("hybrid_override_pattern", "ssm_state_size"),
}  # fmt: skip


def _config(name: str) -> dict[str, Any]:
    config = catalogue.lookup(name)
    assert config is not None
    return copy.deepcopy(config)


def _text(config: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = config.get("text_config", config)
    return inner


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in _REQUIRED.items() for field in fields]
)
def test_a_missing_field_is_refused_by_name(name: str, field: str) -> None:
    config = _config(name)
    del _text(config)[field]
    with pytest.raises(UnsupportedModelError, match=field):
        arch_from_config(config)


_BAD: list[tuple[str, object]] = [
    ("num_hidden_layers", 10**6),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 2.5),
    ("num_hidden_layers", "28"),
    ("num_hidden_layers", True),
    ("hidden_size", -1024),
    ("hidden_size", 10**30),
    ("vocab_size", math.nan),
    ("head_dim", math.inf),
    ("head_dim", [128]),
    ("intermediate_size", {}),
    ("num_key_value_heads", 7),
    ("max_position_embeddings", 10**12),
    ("rms_norm_eps", math.nan),
    ("rms_norm_eps", 0),
    ("rope_theta", -math.inf),
    ("rope_theta", "1e6"),
    ("rope_scaling", 4),
    ("torch_dtype", "int4"),
    ("torch_dtype", 16),
    ("tie_word_embeddings", "yes"),
    ("eos_token_id", "x"),
    ("eos_token_id", [1, -5]),
    ("model_type", "qwen9"),
    ("model_type", ["qwen3"]),
    ("model_type", None),
    ("attention_bias", 3),
]


@pytest.mark.parametrize(("field", "value"), _BAD, ids=lambda v: str(v)[:24])
def test_a_wrong_value_is_refused_by_name(field: str, value: object) -> None:
    config = {**_config("Qwen/Qwen3-0.6B"), field: value}
    started = time.perf_counter()
    with pytest.raises(UnsupportedModelError) as caught:
        arch_from_config(config)
    assert time.perf_counter() - started < 0.5
    assert field in str(caught.value) or field == "model_type"
    assert caught.value.exit_code == 2
    assert caught.value.fix


@pytest.mark.parametrize(
    ("name", "field", "value", "match"),
    [
        ("openai/gpt-oss-20b", "layer_types", ["full_attention"], "one for each layer"),
        ("openai/gpt-oss-20b", "layer_types", ["mystery"] * 24, "layer_types"),
        ("Qwen/Qwen3-30B-A3B", "num_experts", 10**9, "num_experts"),
        ("Qwen/Qwen3-30B-A3B", "num_experts_per_tok", 1000, "at most the 128 experts"),
        (
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "hybrid_override_pattern",
            "M" * 10**6,
            "layers_block_type",
        ),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "hybrid_override_pattern", "MX", "M"),
        ("deepseek-ai/DeepSeek-V3", "num_nextn_predict_layers", 10**6, "num_nextn"),
    ],
)
def test_contradictions(name: str, field: str, value: object, match: str) -> None:
    config = _config(name)
    config[field] = value
    with pytest.raises(UnsupportedModelError, match=match):
        arch_from_config(config)


def test_an_unread_field_may_hold_anything() -> None:
    """Real configs have ``Infinity`` in fields that say nothing about size."""
    config = _config("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    raw = json.dumps({**config, "time_step_limit": [0.0, math.inf]}).encode()
    assert arch_from_config(parse_json(raw, "config.json")).hidden == 2688


def test_a_nested_config_without_its_text_is_refused() -> None:
    """Field case P10: never zero layers."""
    config = _config("Qwen/Qwen3.6-27B")
    del config["text_config"]
    with pytest.raises(UnsupportedModelError, match="text_config"):
        arch_from_config(config)
    with pytest.raises(UnsupportedModelError, match="text_config"):
        arch_from_config({**config, "text_config": [1]})


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 10**6, b'{"a":' * 10**5]
)
def test_what_is_no_json_object(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(CorruptFileError, match=r"config\.json"):
        read_json(path)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        read_json(tmp_path / "none.json")
    (tmp_path / "big.json").write_bytes(b" " * (16 * 1024**2 + 1))
    with pytest.raises(CorruptFileError, match="16 MiB"):
        read_json(tmp_path / "big.json")


_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.integers(-3, 300)
    | st.floats()
    | st.text(max_size=6)
    | st.lists(st.integers(-2, 9) | st.text(max_size=3), max_size=4)
    | st.dictionaries(st.text(max_size=4), st.integers(), max_size=2)
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_field_may_be_anything(data: st.DataObject) -> None:
    """Some fields replaced or removed: an architecture, or a ModelError; nothing else, and soon."""
    config = _config(data.draw(st.sampled_from(_MODELS)))
    places = [config] + [v for v in config.values() if isinstance(v, dict)]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(places))
        field = data.draw(st.sampled_from(sorted(place)))
        if data.draw(st.booleans()):
            place.pop(field)
        else:
            place[field] = data.draw(_VALUES)
        if not place:
            return
    try:
        arch = arch_from_config(config)
    except ModelError as error:
        assert error.what
        return
    assert 0 < len(arch.layers) <= 2_000
    assert arch.hidden > 0
