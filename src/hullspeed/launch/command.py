"""Command: the exact command and environment that start an engine, checked before they are given.

Sources: the flag tables beside this module, and the engines' own model recipes for parsers and
speculative settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from hullspeed.errors import UsageError
from hullspeed.findings import Severity
from hullspeed.launch.check import check_command, quoted
from hullspeed.launch.oldcommand import OldCommand
from hullspeed.launch.settings import Settings
from hullspeed.launch.versions import image_name

CONFIG_NAME = "serve.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How an engine is started.

    Attributes:
        argv: The program and its arguments.
        env: Variables to set.
        key_env: Variable that holds the API key; empty for an engine that checks none.
        image: The official container image of that version.
        image_argv: What to give the image, after its entry point.
        files: Configuration files by name, which ``argv`` mentions.
        ready_path: Answers 200 once requests can be served.
        live_path: Answers 200 while the process is sound.
    """

    settings: Settings
    argv: tuple[str, ...]
    image: str
    image_argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    key_env: str = ""
    files: dict[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    live_path: str = "/health"

    @property
    def line(self) -> str:
        """For a shell: assignments, then the words, quoted where they must be."""
        words = [f"{name}={quoted(value)}" for name, value in self.env.items()]
        return " ".join([*words, *map(quoted, self.argv)])

    def key_flags(self, reference: str) -> list[str]:
        """Flags that hand over the key for an engine that does not read it from its environment;
        ``reference`` is how the file at hand names the variable.
        """
        return ["--api-key", reference] if self.settings.engine == "sglang" else []


def build_command(settings: Settings) -> Command:
    """The command for ``settings``.

    Raises:
        UsageError: for settings that cannot be, or a flag that this version does not take.
    """
    settings = settings.checked()
    command = _BUILDERS[settings.engine](settings)
    refuse_unknown_flags(command)
    return command


def refuse_unknown_flags(command: Command) -> None:
    """Refuse to give a command that the engine's own parser would refuse.

    Raises:
        UsageError: naming the first fault and its fix.
    """
    settings = command.settings
    entry = 1 if settings.engine == "trtllm" else 2
    old = OldCommand(
        engine=settings.engine, entry=command.argv[:entry], arguments=command.argv[entry:]
    )
    checked = check_command(old, settings.engine_version)
    for finding in checked.findings:
        if finding.severity is Severity.ERROR and finding.code != "LC007":
            raise UsageError(finding.what, fix=finding.fix)


def _vllm(settings: Settings) -> Command:
    words = [settings.model, *_pairs({
        "--revision": settings.revision,
        "--served-model-name": settings.served_name,
        "--host": settings.host,
        "--port": settings.port,
        "--tensor-parallel-size": _above_one(settings.tensor_parallel),
        "--pipeline-parallel-size": _above_one(settings.pipeline_parallel),
        "--max-model-len": settings.context_tokens,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.step_tokens,
        "--gpu-memory-utilization": settings.memory_share,
        "--kv-cache-memory-bytes": settings.kv_cache_bytes,
        "--kv-cache-dtype": settings.kv_dtype,
        "--mamba-ssm-cache-dtype": settings.state_dtype,
        "--reasoning-parser": settings.reasoning_parser,
        "--tool-call-parser": settings.tool_parser,
    })]  # fmt: skip
    if settings.tool_parser:
        words.append("--enable-auto-tool-choice")
    if settings.prefix_caching is not None:
        words.append(f"--{'' if settings.prefix_caching else 'no-'}enable-prefix-caching")
    if settings.draft_tokens:
        speculative = {"method": "mtp", "num_speculative_tokens": settings.draft_tokens}
        words += ["--speculative-config", json.dumps(speculative, separators=(",", ":"))]
    words += ["--language-model-only"] if settings.text_only else []
    words += ["--enforce-eager"] if settings.eager else []
    words += settings.extra
    return Command(
        settings=settings,
        argv=("vllm", "serve", *words),
        image=image_name("vllm", settings.engine_version),
        image_argv=tuple(words),
        key_env="VLLM_API_KEY",
    )


def _sglang(settings: Settings) -> Command:
    kv_dtype = {"fp8": "fp8_e4m3"}.get(settings.kv_dtype or "", settings.kv_dtype)
    words = ["sglang", "serve", "--model-path", settings.model, *_pairs({
        "--revision": settings.revision,
        "--served-model-name": settings.served_name,
        "--host": settings.host,
        "--port": settings.port,
        "--tp-size": _above_one(settings.tensor_parallel),
        "--pp-size": _above_one(settings.pipeline_parallel),
        "--context-length": settings.context_tokens,
        "--max-running-requests": settings.max_num_seqs,
        "--chunked-prefill-size": settings.step_tokens,
        "--mem-fraction-static": settings.memory_share,
        "--kv-cache-dtype": kv_dtype,
        "--mamba-ssm-dtype": settings.state_dtype,
        "--reasoning-parser": settings.reasoning_parser,
        "--tool-call-parser": settings.tool_parser,
    })]  # fmt: skip
    _refuse(settings, kv_cache_bytes="sglang sizes its pools by --mem-fraction-static")
    _refuse(settings, text_only="sglang has no switch for it")
    words += ["--disable-radix-cache"] if settings.prefix_caching is False else []
    if settings.draft_tokens:
        words += [
            "--speculative-algorithm", "EAGLE",
            "--speculative-num-steps", str(settings.draft_tokens),
            "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", str(settings.draft_tokens + 1),
        ]  # fmt: skip
    words += ["--disable-cuda-graph"] if settings.eager else []
    words += ["--enable-metrics", *settings.extra]
    return Command(
        settings=settings,
        argv=tuple(words),
        image=image_name("sglang", settings.engine_version),
        image_argv=tuple(words),
        key_env="SGLANG_API_KEY",
    )


def _trtllm(settings: Settings) -> Command:
    for name, reason in (
        ("kv_cache_bytes", "trtllm takes a share of what is free after loading"),
        ("text_only", "trtllm-serve has no switch for it"),
        ("served_name", "trtllm-serve names the model by its path"),
        ("draft_tokens", "give speculative_config in a file of your own with --config"),
    ):
        _refuse(settings, **{name: reason})
    words = ["trtllm-serve", settings.model, *_pairs({
        "--revision": settings.revision,
        "--host": settings.host,
        "--port": settings.port,
        "--tp_size": _above_one(settings.tensor_parallel),
        "--pp_size": _above_one(settings.pipeline_parallel),
        "--config": CONFIG_NAME,
        "--reasoning_parser": settings.reasoning_parser,
        "--tool_parser": settings.tool_parser,
    }), *settings.extra]  # fmt: skip
    return Command(
        settings=settings,
        argv=tuple(words),
        image=image_name("trtllm", settings.engine_version),
        image_argv=tuple(words),
        files={CONFIG_NAME: yaml.safe_dump(_trtllm_config(settings), sort_keys=True)},
    )


def _trtllm_config(settings: Settings) -> dict[str, Any]:
    """The settings that live in the configuration file of the PyTorch backend."""
    cache: dict[str, Any] = {
        "free_gpu_memory_fraction": settings.memory_share or 0.9,
        "enable_block_reuse": settings.prefix_caching is not False,
    }
    if settings.kv_dtype:
        cache["dtype"] = settings.kv_dtype
    config: dict[str, Any] = {"kv_cache_config": cache, "enable_chunked_prefill": True}
    limits = {
        "max_batch_size": settings.max_num_seqs,
        "max_num_tokens": settings.step_tokens,
        "max_seq_len": settings.context_tokens,
    }
    config |= {name: value for name, value in limits.items() if value is not None}
    if settings.state_dtype:
        cache["mamba_ssm_cache_dtype"] = settings.state_dtype
    if settings.eager:
        config["cuda_graph_config"] = None
    return config


def _transformers(settings: Settings) -> Command:
    for name in ("kv_cache_bytes", "kv_dtype", "state_dtype", "draft_tokens", "reasoning_parser",
                 "tool_parser", "text_only", "served_name", "revision", "context_tokens",
                 "max_num_seqs"):  # fmt: skip
        _refuse(settings, **{name: "transformers serve has no such setting"})
    words = ["transformers", "serve", settings.model, *_pairs({
        "--host": settings.host,
        "--port": settings.port,
        "--cb-max-batch-tokens": settings.step_tokens,
        "--cb-max-memory-percent": settings.memory_share,
    })]  # fmt: skip
    words += ["--continuous-batching"] if settings.continuous_batching else []
    return Command(
        settings=settings,
        argv=(*words, *settings.extra),
        image=image_name("transformers", settings.engine_version),
        image_argv=(*words, *settings.extra),
    )


_BUILDERS: dict[str, Callable[[Settings], Command]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "transformers": _transformers,
}


def _pairs(values: dict[str, object]) -> list[str]:
    """Flags with their values, those that are ``None`` left out."""
    given = {flag: value for flag, value in values.items() if value is not None}
    return [word for flag, value in given.items() for word in (flag, str(value))]


def _above_one(value: int) -> int | None:
    return value if value > 1 else None


def _refuse(settings: Settings, **reasons: str) -> None:
    for name, reason in reasons.items():
        value = getattr(settings, name)
        if value:
            label = name.replace("_", " ")
            raise UsageError(
                f"{settings.engine} does not take {label}: {reason}", seen=value,
                fix=f"leave {label} out",
            )  # fmt: skip
