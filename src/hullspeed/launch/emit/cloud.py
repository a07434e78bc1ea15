"""SkyPilot: a service on rented machines."""

from __future__ import annotations

from typing import Any

from hullspeed.errors import UsageError
from hullspeed.launch.check import quoted
from hullspeed.launch.emit.accelerators import accelerator
from hullspeed.launch.emit.containers import in_container, notes
from hullspeed.launch.emit.text import as_yaml, continued
from hullspeed.launch.settings import Settings


def skypilot(settings: Settings) -> dict[str, str]:
    """A task with a ``service`` section: ``sky serve up skypilot.yaml``.

    Raises:
        UsageError: without a GPU, since one is to be rented.
    """
    if settings.gpu is None:
        raise UsageError(
            "SkyPilot must be told which GPU to rent", fix="add --gpu, e.g. --gpu H100"
        )
    command = in_container(settings)
    words = [*map(quoted, command.argv), *command.key_flags('"$SGLANG_API_KEY"')]
    document: dict[str, Any] = {
        "name": settings.slug,
        "service": {
            "readiness_probe": {"path": command.ready_path, "initial_delay_seconds": 1800},
            "replicas": settings.replicas,
        },
        "resources": {
            "accelerators": {accelerator(settings.gpu, "skypilot"): settings.gpus},
            "image_id": f"docker:{command.image}",
            "ports": [settings.port],
            "disk_size": 512,
        },
        "envs": {"HF_TOKEN": "", **command.env},
        "run": continued(words) + "\n",
    }
    if command.files:
        mounts = {f"~/sky_workdir/{name}": f"./{name}" for name in command.files}
        document["file_mounts"] = mounts
    if command.key_env:
        document["secrets"] = {command.key_env: ""}
    return {"skypilot.yaml": as_yaml(document, comment=notes(command)), **command.files}
