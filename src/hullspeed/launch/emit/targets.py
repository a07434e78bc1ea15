"""Targets: every form a launch can be written in, by name."""

from __future__ import annotations

from collections.abc import Callable

from hullspeed.errors import UsageError
from hullspeed.launch.command import build_command
from hullspeed.launch.emit import (
    cloud,
    containers,
    dashboards,
    kserve,
    kubernetes,
    leaderworkerset,
    machines,
    ray,
)
from hullspeed.launch.settings import Settings

Files = dict[str, str]

TARGETS: dict[str, Callable[[Settings], Files]] = {
    "command": lambda settings: {
        "serve.sh": build_command(settings).line + "\n",
        **build_command(settings).files,
    },
    "docker": containers.docker,
    "compose": containers.compose,
    "kubernetes": kubernetes.manifest,
    "lws": leaderworkerset.manifest,
    "kserve": kserve.manifest,
    "ray": ray.serve_config,
    "skypilot": cloud.skypilot,
    "systemd": machines.systemd,
    "slurm": machines.slurm,
    "prometheus": dashboards.rules,
    "grafana": dashboards.dashboard,
}


def emit(target: str, settings: Settings) -> Files:
    """The files of ``target``, by name; the first is the one to apply or run.

    Raises:
        UsageError: for an unknown target, settings that cannot be, or a target that cannot carry
            them.
    """
    if target not in TARGETS:
        raise UsageError("unknown target", seen=target, fix=f"use {', '.join(TARGETS)}")
    settings = settings.checked()
    if settings.nodes > 1 and target not in ("lws", "slurm", "kserve", "prometheus", "grafana"):
        raise UsageError(
            f"{target} starts one machine", seen=settings.nodes,
            fix="use --emit lws, kserve or slurm for several nodes",
        )  # fmt: skip
    return TARGETS[target](settings)
