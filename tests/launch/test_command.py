"""Commands: every setting in the engine's own words, nothing that its parser would refuse."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from hullspeed.errors import UsageError
from hullspeed.launch.command import build_command
from hullspeed.launch.flagtable import FlagTable
from hullspeed.launch.settings import Settings

BASE = Settings(model="Qwen/Qwen3.6-27B-FP8")
FULL: dict[str, Any] = {
    "revision": "abc", "served_name": "qwen", "tensor_parallel": 2, "pipeline_parallel": 2,
    "context_tokens": 32768, "max_num_seqs": 64, "step_tokens": 2048, "memory_share": 0.9,
    "kv_dtype": "fp8", "state_dtype": "bfloat16", "prefix_caching": False, "draft_tokens": 3,
    "reasoning_parser": "qwen3", "tool_parser": "qwen3_coder", "eager": True,
}  # fmt: skip


@pytest.mark.parametrize("version", FlagTable("vllm").checked)
def test_vllm_takes_the_whole_at_every_version(version: str) -> None:
    state = "float16" if version < "0.22" else "bfloat16"
    full = {**FULL, "state_dtype": state}
    command = build_command(BASE.with_(version=version, text_only=True, **full))
    assert command.argv[:3] == ("vllm", "serve", "Qwen/Qwen3.6-27B-FP8")
    assert command.image == f"vllm/vllm-openai:v{version}"
    assert command.image_argv == command.argv[2:]
    assert shlex.split(command.line) == list(command.argv)


def test_a_value_that_a_version_does_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match="bfloat16"):
        build_command(BASE.with_(version="0.21.0", state_dtype="bfloat16"))
    with pytest.raises(UsageError, match="known from"):
        build_command(BASE.with_(version="0.11.0"))


def test_sglang_has_its_own_words() -> None:
    line = build_command(BASE.with_(engine="sglang", **{**FULL, "eager": False})).line
    for words in (
        "sglang serve --model-path Qwen/Qwen3.6-27B-FP8", "--tp-size 2", "--pp-size 2",
        "--context-length 32768", "--max-running-requests 64", "--chunked-prefill-size 2048",
        "--mem-fraction-static 0.9", "--kv-cache-dtype fp8_e4m3", "--mamba-ssm-dtype bfloat16",
        "--disable-radix-cache", "--speculative-num-draft-tokens 4", "--enable-metrics",
    ):  # fmt: skip
        assert words in line


def test_trtllm_has_a_file() -> None:
    command = build_command(Settings(
        model="Qwen/Qwen3-32B", engine="trtllm", context_tokens=16384, max_num_seqs=64,
        memory_share=0.85, kv_dtype="fp8",
    ))  # fmt: skip
    assert command.argv[:2] == ("trtllm-serve", "Qwen/Qwen3-32B")
    config = yaml.safe_load(command.files["serve.yaml"])
    assert config["kv_cache_config"] == {
        "free_gpu_memory_fraction": 0.85, "enable_block_reuse": True, "dtype": "fp8",
    }  # fmt: skip
    assert (config["max_seq_len"], config["max_batch_size"]) == (16384, 64)


def test_transformers_serves_one_gpu() -> None:
    command = build_command(
        Settings(model="Qwen/Qwen3-0.6B", engine="transformers", continuous_batching=True)
    )
    assert command.argv[:3] == ("transformers", "serve", "Qwen/Qwen3-0.6B")
    assert "--continuous-batching" in command.argv


def test_further_flags_are_checked_too() -> None:
    command = build_command(BASE.with_(extra=("--enable-sleep-mode",)))
    assert command.argv[-1] == "--enable-sleep-mode"
    with pytest.raises(UsageError, match="swap-space"):
        build_command(BASE.with_(extra=("--swap-space", "4")))


def test_loopback_unless_told_otherwise() -> None:
    argv = build_command(BASE).argv
    assert argv[argv.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "llama.cpp"},
        {"model": ""},
        {"model": "--trust-remote-code"},
        {"gpu": "H1000"},
        {"tensor_parallel": 0},
        {"context_tokens": -5},
        {"draft_tokens": -1},
        {"memory_share": 1.5},
        {"port": 0},
        {"nodes": 3, "tensor_parallel": 2},
        {"max_num_seqs": 512, "step_tokens": 256},
        {"memory_share": 0.9, "kv_cache_bytes": 1 << 30},
        {"engine": "transformers", "tensor_parallel": 2},
        {"engine": "transformers", "kv_dtype": "fp8"},
        {"engine": "sglang", "kv_cache_bytes": 1 << 30},
        {"engine": "trtllm", "served_name": "x"},
        {"state_dtype": "int4"},
        {"extra": ("--trust-remote-code",)},
    ],
)
def test_what_cannot_be_is_a_usage_error(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        build_command(BASE.with_(**changes))


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("Qwen/Qwen3.6-27B-FP8", "qwen3-6-27b-fp8"),
        ("/models/My Model_v2/", "my-model-v2"),
        ("x/" + "a" * 80, "a" * 50),
        ("___", "model"),
    ],
)
def test_slugs_are_names_for_kubernetes(model: str, slug: str) -> None:
    assert Settings(model=model).slug == slug
