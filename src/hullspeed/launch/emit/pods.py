"""Pods: the container that Kubernetes, LeaderWorkerSet and KServe share."""

from __future__ import annotations

from typing import Any

from hullspeed.launch.command import Command
from hullspeed.launch.settings import Settings

_PROBE_S = 10
_START_S = 30 * 60  # pulling and loading a large model from a slow store


def secret_name(settings: Settings) -> str:
    """Name of the Secret with the keys ``api-key`` and ``hf-token``."""
    return f"{settings.slug}-keys"


def labels(settings: Settings) -> dict[str, str]:
    """Labels by which services and monitors find the pods."""
    return {"app.kubernetes.io/name": settings.slug, "app.kubernetes.io/component": "engine"}


def container(command: Command, *, argv: list[str] | None = None) -> dict[str, Any]:
    """The engine's container with its three probes.

    Start-up may take half an hour; after it readiness takes the pod out of the service within
    30 s, and liveness restarts it only after a minute of silence.
    """
    settings = command.settings
    gpus = str(settings.gpus_per_node)
    given: dict[str, Any] = {"args": list(command.image_argv)}
    if settings.engine != "vllm":  # the vLLM image starts vllm serve by itself
        key = command.key_flags("$(SGLANG_API_KEY)")
        given = {"command": [command.argv[0]], "args": [*command.argv[1:], *key]}
    if argv is not None:
        given = {"command": argv[:2], "args": argv[2:]}
    return {
        "name": "engine",
        "image": command.image,
        **given,
        "ports": [{"name": "http", "containerPort": settings.port}],
        "env": environment(command),
        "resources": {"requests": {"nvidia.com/gpu": gpus}, "limits": {"nvidia.com/gpu": gpus}},
        "startupProbe": _probe(command.ready_path, failures=_START_S // _PROBE_S),
        "readinessProbe": _probe(command.ready_path, failures=3),
        "livenessProbe": _probe(command.live_path, failures=6),
        "volumeMounts": [
            {"name": "cache", "mountPath": "/root/.cache/huggingface"},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a mount in the container
            *({"name": "config", "mountPath": "/workspace"} for _ in command.files),
        ],
        **({"workingDir": "/workspace"} if command.files else {}),
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def environment(command: Command) -> list[dict[str, Any]]:
    """Variables; keys come from the Secret."""
    name = secret_name(command.settings)
    entries = [_from_secret("HF_TOKEN", name, "hf-token", optional=True)]
    if command.key_env:
        entries.append(_from_secret(command.key_env, name, "api-key", optional=False))
    return entries + [{"name": key, "value": value} for key, value in command.env.items()]


def volumes(command: Command) -> list[dict[str, Any]]:
    """The model cache (a claim that must exist), shared memory, and configuration files."""
    settings = command.settings
    claim = {"claimName": f"{settings.slug}-cache"}
    shared = {"medium": "Memory", "sizeLimit": f"{max(8, 2 * settings.gpus_per_node)}Gi"}
    config = [{"name": "config", "configMap": {"name": f"{settings.slug}-config"}}]
    return [
        {"name": "cache", "persistentVolumeClaim": claim},
        {"name": "shm", "emptyDir": shared},
        *(config if command.files else []),
    ]


def pod_spec(command: Command, *, argv: list[str] | None = None) -> dict[str, Any]:
    """One pod: two minutes to finish running requests before it is killed."""
    return {
        "terminationGracePeriodSeconds": 120,
        "containers": [container(command, argv=argv)],
        "volumes": volumes(command),
    }


def config_map(command: Command) -> list[dict[str, Any]]:
    """The configuration files as a ConfigMap; none for engines without files."""
    if not command.files:
        return []
    name = f"{command.settings.slug}-config"
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": command.files}
    ]


def _probe(path: str, *, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": _PROBE_S,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _from_secret(variable: str, name: str, key: str, *, optional: bool) -> dict[str, Any]:
    reference = {"name": name, "key": key, "optional": optional}
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}
