"""Containers: docker run and Compose."""

from __future__ import annotations

from typing import Any

from hullspeed.launch.check import quoted
from hullspeed.launch.command import Command, build_command
from hullspeed.launch.emit.text import as_yaml, continued
from hullspeed.launch.settings import Settings

_CACHE = "/root/.cache/huggingface"
COMMENT = "Written by hullspeed launch. Start it only through a passing gate: hullspeed preflight."


def in_container(settings: Settings) -> Command:
    """The command inside a container, where it must listen beyond loopback to be published."""
    return build_command(settings.with_(host="0.0.0.0"))  # noqa: S104


def notes(command: Command) -> str:
    """What the reader of an emitted file must know."""
    if command.key_env:
        return f"{COMMENT}\nIt needs an API key in {command.key_env}."
    return (
        f"{COMMENT}\n{command.settings.engine} checks no API key: keep it behind a proxy that does."
    )


def comments(command: Command) -> str:
    """The notes as comment lines of a script."""
    return "".join(f"# {line}\n" for line in notes(command).splitlines())


def docker(settings: Settings) -> dict[str, str]:
    """``docker run``: published on loopback only, the key taken from the caller's environment."""
    command = in_container(settings)
    publish = f"{settings.host}:{settings.port}:{settings.port}"
    words = ["docker", "run", "--rm", "--gpus", _gpus(settings), "--ipc", "host", "-p", publish]
    words += ["-v", f"~/.cache/huggingface:{_CACHE}", "-e", "HF_TOKEN"]
    words += ["-e", command.key_env] if command.key_env else []
    for name, value in command.env.items():
        words += ["-e", f"{name}={value}"]
    for name in command.files:
        words += ["-v", f"./{name}:/workspace/{name}:ro", "-w", "/workspace"]
    engine = [
        command.image,
        *map(quoted, command.image_argv),
        *command.key_flags('"$SGLANG_API_KEY"'),
    ]
    run = f"{continued([quoted(word) for word in words])} \\\n  {continued(engine)}"
    script = f"#!/bin/sh\n{comments(command)}exec {run}\n"
    return {"docker-run.sh": script, **command.files}


def compose(settings: Settings) -> dict[str, str]:
    """A Compose file with one service, its GPUs reserved and its health checked."""
    command = in_container(settings)
    service: dict[str, Any] = {
        "image": command.image,
        "command": [*command.image_argv, *command.key_flags("${SGLANG_API_KEY:?}")],
        "restart": "unless-stopped",
        "ipc": "host",
        "ports": [f"{settings.host}:{settings.port}:{settings.port}"],
        "volumes": [f"~/.cache/huggingface:{_CACHE}"],
        "environment": _environment(command),
        "healthcheck": _healthcheck(command),
        "stop_grace_period": "2m",
        "ulimits": {"memlock": -1, "nofile": {"soft": 65536, "hard": 65536}},
        "deploy": {"resources": {"reservations": {"devices": [_device(settings)]}}},
    }
    if command.files:
        service["working_dir"] = "/workspace"
        service["volumes"] += [f"./{name}:/workspace/{name}:ro" for name in command.files]
    document = {"name": settings.slug, "services": {settings.engine: service}}
    return {"compose.yaml": as_yaml(document, comment=notes(command)), **command.files}


def _gpus(settings: Settings) -> str:
    return "all" if settings.gpus == 1 else str(settings.gpus)


def _device(settings: Settings) -> dict[str, Any]:
    return {"driver": "nvidia", "count": settings.gpus, "capabilities": ["gpu"]}


def _environment(command: Command) -> dict[str, str | None]:
    """``None`` passes the variable of the caller on."""
    environment: dict[str, str | None] = {"HF_TOKEN": None}
    if command.key_env:
        environment[command.key_env] = None
    return {**environment, **command.env}


def _healthcheck(command: Command) -> dict[str, Any]:
    url = f"http://127.0.0.1:{command.settings.port}{command.ready_path}"
    probe = f"import urllib.request as u; u.urlopen('{url}', timeout=5)"
    return {
        "test": ["CMD", "python3", "-c", probe],
        "interval": "10s",
        "timeout": "6s",
        "retries": 3,
        "start_period": "30m",
    }
