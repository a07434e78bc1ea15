"""Probes of the machine, on made-up /proc and /sys trees and on real sockets."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest

from hullspeed.preflight import machine


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cpu_flags_and_model(tmp_path: Path) -> None:
    info = (
        "processor : 0\nmodel name : EPYC\nflags : avx avx2\n\nprocessor : 1\nmodel name : other\n"
    )
    cpu = machine.look_at_cpu(tree(tmp_path, {"proc/cpuinfo": info}))
    assert cpu.model == "EPYC"
    assert cpu.flags == {"avx", "avx2"}
    assert cpu.quota_cores is None
    assert cpu.affinity_cores == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "0::/pod/app\n",
                "sys/fs/cgroup/pod/app/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "max 100000\n",
                "sys/fs/cgroup/cpu.max": "300000 100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "0::/pod/app\n",
                "sys/fs/cgroup/pod/app/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/cpu.max": "max 100000\n",
            },
            2.0,
        ),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    cpu = machine.look_at_cpu(tree(tmp_path, files))
    assert cpu.quota_cores == quota
    assert 1 <= cpu.usable_cores <= cpu.affinity_cores


def test_memory_limit(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "1048576\n", "sys/fs/cgroup/memory.current": "4096\n"}
    seen = machine.look_at_memory(tree(tmp_path, files))
    assert (seen.limit_bytes, seen.limit_used_bytes) == (1048576, 4096)
    assert seen.total_bytes == psutil.virtual_memory().total
    assert machine.look_at_memory(tree(tmp_path / "none", {})).limit_bytes is None


def test_a_port_in_use_is_seen_and_a_free_one_is_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert machine.look_at_system("127.0.0.1", port).port_error == "address in use"
    assert machine.look_at_system("127.0.0.1", port).port_error == ""


def test_an_unknown_host_is_said() -> None:
    assert "unknown host" in machine.look_at_system("no.such.host.invalid", 8000).port_error


def test_offline_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert machine.look_at_system("127.0.0.1", 65000).offline
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert not machine.look_at_system("127.0.0.1", 65000).offline


def test_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    disk = machine.look_at_disk(str(tmp_path / "a" / "b"))
    assert disk.path == str(tmp_path / "a" / "b")
    assert disk.free_bytes > 0
    assert disk.writable
    assert not (tmp_path / "a").exists()
