"""Logs in the engines' own words with the numbers of public reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Log = Callable[..., str]


def _vllm(
    model: str,
    *,
    version: str | None = "0.27.1",
    config: str = "",
    args: str = "",
    gib: float | None = None,
    tokens: str | None = None,
    length: str | None = None,
    concurrency: str | None = None,
    more: str = "",
) -> str:
    lines = []
    if args:
        lines.append(
            f"(APIServer pid=1) INFO 08-14 14:06:01 [utils.py:233] non-default args: {args}"
        )
    if version:
        lines.append(
            "(EngineCore pid=9) INFO 08-14 14:06:11 [core.py:109] Initializing a V1 LLM engine "
            f"(v{version}) with config: model='{model}', {config}"
        )
    lines.append(
        "(Worker pid=11) INFO 08-14 14:06:40 [gpu_model_runner.py:4879] Model loading took "
        "14.28 GiB memory and 20.695716 seconds"
    )
    if gib is not None:
        lines.append(
            "(Worker pid=11) INFO 08-14 14:07:22 [gpu_worker.py:563] Available KV cache memory: "
            f"{gib} GiB"
        )
    if tokens:
        lines.append(
            "(EngineCore pid=9) INFO 08-14 14:07:22 [kv_cache_utils.py:2146] GPU KV cache size: "
            f"{tokens} tokens"
        )
    if concurrency:
        lines.append(
            "(EngineCore pid=9) INFO 08-14 14:07:22 [kv_cache_utils.py:2147] Maximum concurrency "
            f"for {length} tokens per request: {concurrency}x"
        )
    return "\n".join([*lines, more]) + "\n"


@pytest.fixture
def vllm_log() -> Log:
    """A vLLM start-up log from its numbers."""
    return _vllm
