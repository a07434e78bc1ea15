"""The lock reads back as written, and every drift from it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.errors import UsageError
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.lock import drift, lock_of, read_lock, write_lock
from hullspeed.preflight.stack import Cpu, Gpu, Model, ModelFile, Nvidia, Python, Stack, Torch

GPU = Gpu(index=0, name="NVIDIA H100", compute_capability="9.0", total_bytes=80 << 30, free_bytes=1)
ASK = Ask(model="org/name", engine="vllm")
STACK = Stack(
    python=Python(
        version="3.12.1",
        packages={"vllm": "0.33.0", "torch": "2.14.0", "ruamel.yaml": "0.19"},
        torch=Torch(version="2.14.0+cu130", cuda="13.0"),
    ),
    cpu=Cpu(model='a "quoted" \\ processor', affinity_cores=8),
    nvidia=Nvidia(driver="580.65.06", gpus=(GPU,)),
    model=Model(
        revision="abc",
        files=(
            ModelFile(name="a.safetensors", size_bytes=10, sha256="11"),
            ModelFile(name="config.json", size_bytes=2, sha256="22"),
        ),
    ),
)


def changed(stack: Any, path: str, value: Any) -> Any:
    name, _, rest = path.partition(".")
    inner = changed(getattr(stack, name), rest, value) if rest else value
    return msgspec.structs.replace(stack, **{name: inner})


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "hullspeed.lock"
    write_lock(path, lock_of(ASK, STACK))
    return path


def test_a_lock_reads_back_as_written(lock: Path) -> None:
    assert read_lock(lock) == lock_of(ASK, STACK)
    assert list(drift(lock, ASK, STACK)) == []


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=4), st.text(max_size=20))
def test_any_text_survives(
    tmp_path_factory: pytest.TempPathFactory, packages: dict[str, str], name: str
) -> None:
    stack = Stack(python=Python(version="3.11.0", packages=packages), cpu=Cpu(model=name))
    path = tmp_path_factory.mktemp("lock") / "hullspeed.lock"
    write_lock(path, lock_of(ASK, stack))
    assert read_lock(path) == lock_of(ASK, stack)


@pytest.mark.parametrize(
    ("path", "value", "code", "named"),
    [
        ("python.version", "3.12.2", "PF071", "Python"),
        ("python.torch", Torch(version="2.13.0+cu130", cuda="13.0"), "PF071", "torch"),
        ("python.packages", {"vllm": "0.32.0", "torch": "2.14.0"}, "PF071", "vllm"),
        ("cpu.model", "another", "PF072", "processor"),
        ("cpu.affinity_cores", 4, "PF072", "usable cores"),
        ("nvidia.driver", "570.26", "PF072", "driver"),
        ("nvidia.gpus", (msgspec.structs.replace(GPU, name="NVIDIA H200"),), "PF072", "GPUs"),
        ("model.revision", "def", "PF073", "revision"),
        ("model.files", STACK.model.files[:1], "PF073", "config.json"),
    ],
)
def test_a_drift_is_named(lock: Path, path: str, value: object, code: str, named: str) -> None:
    findings = list(drift(lock, ASK, changed(STACK, path, value)))
    assert findings
    assert {finding.code for finding in findings} == {code}
    assert named in [finding.evidence["name"] for finding in findings]


@pytest.mark.parametrize(
    ("file", "named"),
    [
        (ModelFile(name="a.safetensors", size_bytes=11, sha256="11"), "size of a.safetensors"),
        (ModelFile(name="a.safetensors", size_bytes=10, sha256="99"), "SHA-256 of a.safetensors"),
    ],
)
def test_a_changed_file_is_named(lock: Path, file: ModelFile, named: str) -> None:
    findings = list(drift(lock, ASK, changed(STACK, "model.files", (file, STACK.model.files[1]))))
    assert [(finding.code, finding.evidence["name"]) for finding in findings] == [("PF073", named)]


def test_another_engine_and_another_model_are_named(lock: Path) -> None:
    other = Ask(model="org/other", engine="sglang")
    assert {f.code for f in drift(lock, other, STACK)} == {"PF071", "PF073"}


def test_a_missing_lock_is_a_finding(tmp_path: Path) -> None:
    findings = list(drift(tmp_path / "none.lock", ASK, STACK))
    assert [finding.code for finding in findings] == ["PF070"]


@pytest.mark.parametrize("text", ["not toml [", "version = 1", 'version = "1"'])
def test_a_file_that_is_no_lock_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hullspeed.lock"
    path.write_text(text)
    with pytest.raises(UsageError, match="not a lock file"):
        read_lock(path)


def test_a_lock_of_another_format_is_refused(lock: Path) -> None:
    lock.write_text(lock.read_text().replace("version = 1", "version = 2", 1))
    with pytest.raises(UsageError, match="another format"):
        read_lock(lock)


def test_a_folder_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        write_lock(tmp_path / "none" / "hullspeed.lock", lock_of(ASK, STACK))
