"""Machines: a systemd unit and a SLURM job."""

from __future__ import annotations

from hullspeed.launch.check import quoted
from hullspeed.launch.command import build_command
from hullspeed.launch.emit.containers import comments
from hullspeed.launch.emit.leaderworkerset import node_line, refuse_single_node_engine
from hullspeed.launch.emit.text import continued
from hullspeed.launch.settings import Settings

_DRAIN_S = 120


def systemd(settings: Settings) -> dict[str, str]:
    """A unit that runs the gate first, reads keys from a root-only file and drains on stop."""
    command = build_command(settings)
    home = f"/opt/{settings.engine}"
    program = quoted(f"{home}/bin/{command.argv[0]}")
    words = [program, *(_unit_word(word) for word in command.argv[1:])]
    words += command.key_flags("${SGLANG_API_KEY}")
    gate = (
        f"/usr/bin/env hullspeed preflight {_unit_word(settings.model)} --engine {settings.engine}"
        f" --python {home}/bin/python --tensor-parallel {settings.tensor_parallel}"
        f" --port {settings.port}"
    )
    environment = "".join(f"Environment={name}={value}\n" for name, value in command.env.items())
    unit = f"""\
{comments(command)}[Unit]
Description={settings.engine} serving {settings.model}
Wants=network-online.target
After=network-online.target nvidia-persistenced.service

[Service]
Type=exec
User={settings.engine}
WorkingDirectory=/etc/{settings.slug}
EnvironmentFile=/etc/{settings.slug}/keys.env
{environment}ExecStartPre={gate}
ExecStart={continued(words)}
Restart=on-failure
RestartSec=10
RestartPreventExitStatus=2 3
TimeoutStartSec=infinity
TimeoutStopSec={_DRAIN_S}
KillMode=mixed
LimitNOFILE=65536
LimitMEMLOCK=infinity
NoNewPrivileges=true
ProtectSystem=full
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""
    return {f"{settings.slug}.service": unit, **command.files}


def _unit_word(word: str) -> str:
    """``word`` as systemd reads it: its own quoting, and % and $ doubled."""
    escaped = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if any(mark in escaped for mark in " \t\"';"):
        return '"' + escaped.replace('"', '\\"') + '"'
    return escaped


def slurm(settings: Settings) -> dict[str, str]:
    """A batch job; several nodes are joined through the first one's address."""
    command = build_command(settings.with_(host="0.0.0.0"))  # noqa: S104 - behind a key
    if settings.nodes > 1:
        refuse_single_node_engine(settings)
        line = node_line(command, '"$SLURM_PROCID"', '"$head"', headless=False)
        headless = node_line(command, '"$SLURM_PROCID"', '"$head"', headless=True)
        start = _joined(line, headless)
    else:
        words = [*map(quoted, command.argv), *command.key_flags('"$SGLANG_API_KEY"')]
        start = f"srun {continued(words)}\n"
    key = f': "${{{command.key_env}:?set an API key}}"\n' if command.key_env else ""
    env = "".join(f"export {name}={quoted(value)}\n" for name, value in command.env.items())
    script = f"""\
#!/bin/bash
{comments(command)}#SBATCH --job-name={settings.slug}
#SBATCH --nodes={settings.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={settings.gpus_per_node}
#SBATCH --cpus-per-task={8 * settings.gpus_per_node}
#SBATCH --exclusive
#SBATCH --signal=B:TERM@{_DRAIN_S}
#SBATCH --output=%x-%j.log
set -euo pipefail
{key}{env}head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export head
echo "serving on http://$head:{settings.port}"
{start}"""
    return {"slurm.sh": script, **command.files}


def _joined(line: str, headless: str) -> str:
    return (
        "# the first task serves HTTP, the others join it\n"
        "srun bash -c '\n"
        'if [ "$SLURM_PROCID" -eq 0 ]; then\n'
        f"  exec {_inside_quotes(line)}\n"
        "else\n"
        f"  exec {_inside_quotes(headless)}\n"
        "fi'\n"
    )


def _inside_quotes(line: str) -> str:
    return line.replace("'", "'\\''")
