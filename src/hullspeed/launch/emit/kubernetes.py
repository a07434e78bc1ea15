"""Kubernetes: Deployment, Service and PodMonitor."""

from __future__ import annotations

from typing import Any

from hullspeed.launch.emit.containers import in_container
from hullspeed.launch.emit.pods import config_map, labels, pod_spec, secret_name
from hullspeed.launch.emit.text import as_yaml
from hullspeed.launch.settings import Settings


def manifest(settings: Settings) -> dict[str, str]:
    """One file with everything but the Secret and the cache's claim, which it names."""
    command = in_container(settings)
    documents = [
        *config_map(command),
        _deployment(settings, pod_spec(command)),
        service(settings, labels(settings)),
        pod_monitor(settings),
    ]
    return {"kubernetes.yaml": as_yaml(*documents, comment=needs(settings))}


def needs(settings: Settings) -> str:
    """What must exist before the file is applied."""
    return (
        "Written by hullspeed launch. Before applying it:\n"
        f"  kubectl create secret generic {secret_name(settings)}"
        " --from-literal=api-key=... --from-literal=hf-token=...\n"
        f"  a PersistentVolumeClaim {settings.slug}-cache that can hold the model"
    )


def _deployment(settings: Settings, spec: dict[str, Any]) -> dict[str, Any]:
    # A GPU held by the old pod cannot be given to the new one: with one replica, stop first.
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    strategy = rolling if settings.replicas > 1 else {"type": "Recreate"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": settings.slug, "labels": labels(settings)},
        "spec": {
            "replicas": settings.replicas,
            "strategy": strategy,
            "selector": {"matchLabels": labels(settings)},
            "template": {"metadata": {"labels": labels(settings)}, "spec": spec},
        },
    }


def service(settings: Settings, selector: dict[str, str]) -> dict[str, Any]:
    """One address inside the cluster."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": settings.slug, "labels": labels(settings)},
        "spec": {
            "selector": selector,
            "ports": [{"name": "http", "port": settings.port, "targetPort": "http"}],
        },
    }


def pod_monitor(settings: Settings) -> dict[str, Any]:
    """Prometheus reads every pod's own metrics."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": settings.slug, "labels": labels(settings)},
        "spec": {
            "selector": {"matchLabels": labels(settings)},
            "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
        },
    }
