"""Ray Serve LLM: a Serve configuration of ``ray.serve.llm:build_openai_app``.

Fields: https://docs.ray.io/en/master/serve/llm/user-guides/configuration.html
"""

from __future__ import annotations

from typing import Any

from hullspeed.errors import UsageError
from hullspeed.launch.command import build_command
from hullspeed.launch.emit.accelerators import accelerator
from hullspeed.launch.emit.text import as_yaml
from hullspeed.launch.settings import Settings


def serve_config(settings: Settings) -> dict[str, str]:
    """A file for ``serve deploy`` or a RayService."""
    if settings.engine != "vllm":
        raise UsageError(
            "Ray Serve LLM runs vllm", seen=settings.engine,
            fix="use --engine vllm, or --emit kubernetes",
        )  # fmt: skip
    build_command(settings)  # refuses what vLLM would refuse
    model: dict[str, Any] = {
        "model_loading_config": {
            "model_id": settings.served_name or settings.model,
            "model_source": settings.model,
        },
        "deployment_config": {
            "autoscaling_config": {"min_replicas": 1, "max_replicas": settings.replicas},
            "max_ongoing_requests": 2 * (settings.max_num_seqs or 256),
        },
        "engine_kwargs": _engine_kwargs(settings),
    }
    if settings.gpu is not None:
        model["accelerator_type"] = accelerator(settings.gpu, "ray")
    document = {
        "applications": [
            {
                "name": settings.slug,
                "route_prefix": "/",
                "import_path": "ray.serve.llm:build_openai_app",
                "args": {"llm_configs": [model]},
            }
        ]
    }
    comment = f"Written by hullspeed launch for vLLM {settings.engine_version}: serve deploy FILE"
    return {"ray-serve.yaml": as_yaml(document, comment=comment)}


def _engine_kwargs(settings: Settings) -> dict[str, Any]:
    """EngineArgs of vLLM, named as its fields."""
    given: dict[str, Any] = {
        "revision": settings.revision,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "max_model_len": settings.context_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.step_tokens,
        "gpu_memory_utilization": settings.memory_share,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "kv_cache_dtype": settings.kv_dtype,
        "mamba_ssm_cache_dtype": settings.state_dtype,
        "enable_prefix_caching": settings.prefix_caching,
        "reasoning_parser": settings.reasoning_parser,
        "tool_call_parser": settings.tool_parser,
        "enable_auto_tool_choice": True if settings.tool_parser else None,
        "language_model_only": settings.text_only or None,
        "enforce_eager": settings.eager or None,
    }
    if settings.draft_tokens:
        given["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": settings.draft_tokens,
        }
    return {name: value for name, value in given.items() if value is not None}
