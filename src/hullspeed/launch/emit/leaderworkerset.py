"""LeaderWorkerSet: one copy of a model over several machines.

vLLM joins its nodes with ``--nnodes``, ``--node-rank`` and ``--master-addr``; SGLang with
``--nnodes``, ``--node-rank`` and ``--dist-init-addr``. LeaderWorkerSet gives each pod
``LWS_LEADER_ADDRESS`` and ``LWS_WORKER_INDEX``.
"""

from __future__ import annotations

from typing import Any

from hullspeed.errors import UsageError
from hullspeed.launch.check import quoted
from hullspeed.launch.command import Command
from hullspeed.launch.emit.containers import in_container
from hullspeed.launch.emit.kubernetes import needs, pod_monitor, service
from hullspeed.launch.emit.pods import labels, pod_spec
from hullspeed.launch.emit.text import as_yaml
from hullspeed.launch.settings import Settings

RENDEZVOUS_PORT = 29500
_LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}


def manifest(settings: Settings) -> dict[str, str]:
    """LeaderWorkerSet with a Service on the leaders."""
    refuse_single_node_engine(settings)
    command = in_container(settings)
    leader, worker = (_shell(command, leader=is_leader) for is_leader in (True, False))
    documents = [
        _worker_set(settings, pod_spec(command, argv=leader), _worker_spec(command, worker)),
        service(settings, {**labels(settings), **_LEADER}),
        pod_monitor(settings),
    ]
    return {"leaderworkerset.yaml": as_yaml(*documents, comment=needs(settings))}


def refuse_single_node_engine(settings: Settings) -> None:
    """Refuse an engine that joins nodes in a way not written here.

    Raises:
        UsageError: for trtllm (MPI) and transformers (one GPU).
    """
    if settings.engine not in ("vllm", "sglang"):
        raise UsageError(
            "nodes are joined for vllm and sglang only", seen=settings.engine,
            fix="use one of them, or one node",
        )  # fmt: skip


def joining_flags(settings: Settings, rank: str, address: str) -> list[str]:
    """Flags with which one node joins the others; ``rank`` and ``address`` are shell words."""
    flags = ["--nnodes", str(settings.nodes), "--node-rank", rank]
    if settings.engine == "vllm":
        return [*flags, "--master-addr", address, "--master-port", str(RENDEZVOUS_PORT)]
    return [*flags, "--dist-init-addr", f"{address}:{RENDEZVOUS_PORT}"]


def node_line(command: Command, rank: str, address: str, *, headless: bool) -> str:
    """The engine's command on one node, for a shell that fills in rank and address."""
    words = [quoted(word) for word in command.argv]
    words += command.key_flags('"$SGLANG_API_KEY"')
    words += joining_flags(command.settings, rank, address)
    if headless and command.settings.engine == "vllm":
        words.append("--headless")
    return " ".join(words)


def _shell(command: Command, *, leader: bool) -> list[str]:
    line = node_line(command, '"$LWS_WORKER_INDEX"', '"$LWS_LEADER_ADDRESS"', headless=not leader)
    return ["/bin/sh", "-c", f"exec {line}"]


def _worker_spec(command: Command, argv: list[str]) -> dict[str, Any]:
    """A worker serves no HTTP: it has no probes and no port."""
    spec = pod_spec(command, argv=argv)
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "ports"):
        spec["containers"][0].pop(name)
    return spec


def _worker_set(
    settings: Settings, leader: dict[str, Any], worker: dict[str, Any]
) -> dict[str, Any]:
    template = {"metadata": {"labels": labels(settings)}}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": settings.slug, "labels": labels(settings)},
        "spec": {
            "replicas": settings.replicas,
            "leaderWorkerTemplate": {
                "size": settings.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {**template, "spec": leader},
                "workerTemplate": {**template, "spec": worker},
            },
        },
    }
