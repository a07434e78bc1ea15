"""KServe: an LLMInferenceService, with its own router and scheduler in front of vLLM."""

from __future__ import annotations

from typing import Any

from hullspeed.errors import UsageError
from hullspeed.launch.emit.containers import in_container
from hullspeed.launch.emit.kubernetes import needs
from hullspeed.launch.emit.leaderworkerset import joining_flags
from hullspeed.launch.emit.pods import pod_spec
from hullspeed.launch.emit.text import as_yaml
from hullspeed.launch.settings import Settings


def manifest(settings: Settings) -> dict[str, str]:
    """LLMInferenceService ``serving.kserve.io/v1alpha1``; several nodes through its worker spec."""
    if settings.engine != "vllm":
        raise UsageError(
            "KServe's LLMInferenceService runs vllm", seen=settings.engine,
            fix="use --engine vllm, or --emit kubernetes",
        )  # fmt: skip
    if not settings.served_name and settings.model.startswith("/"):
        raise UsageError(
            "KServe fetches the model from the hub or a store", seen=settings.model,
            fix="name a hub model",
        )  # fmt: skip
    command = in_container(settings)
    spec: dict[str, Any] = {
        "model": {"uri": f"hf://{settings.model}", "name": settings.served_name or settings.model},
        "replicas": settings.replicas,
        "router": {"route": {}, "gateway": {}, "scheduler": {}},
    }
    if settings.gpus > 1:
        spec["parallelism"] = {
            "tensor": settings.tensor_parallel,
            "pipeline": settings.pipeline_parallel,
        }
    spec["template"] = _main(pod_spec(command))
    if settings.nodes > 1:
        spec["worker"] = _joined(settings, _main(pod_spec(command)))
    document = {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "LLMInferenceService",
        "metadata": {"name": settings.slug},
        "spec": spec,
    }
    return {"llminferenceservice.yaml": as_yaml(document, comment=needs(settings))}


def _main(spec: dict[str, Any]) -> dict[str, Any]:
    """KServe merges its own template into the container named ``main``."""
    (engine,) = spec["containers"]
    return {**spec, "containers": [{**engine, "name": "main"}]}


def _joined(settings: Settings, spec: dict[str, Any]) -> dict[str, Any]:
    (main,) = spec["containers"]
    flags = joining_flags(settings, "$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)")
    kept = {key: value for key, value in main.items() if not key.endswith("Probe")}
    return {**spec, "containers": [{**kept, "args": [*main["args"], *flags, "--headless"]}]}
