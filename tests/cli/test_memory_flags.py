"""The flags of the memory of sequences, of ``serve`` and ``up`` alike: good values reach the
engine's configuration, bad ones are one line and exit code 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from hullspeed.cli import serve as serve_command
from hullspeed.cli.main import run
from hullspeed.errors import UsageError
from hullspeed.runtime.config import CacheName, EngineConfig, KvDtype, StateStore
from hullspeed.up import pipeline
from hullspeed.up.served import _flags

COMMANDS = ("serve", "up")
GOOD = [
    *(("--kv-dtype", name, "kv_dtype", name) for name in get_args(KvDtype)),
    *(("--state-store", name, "state_store", name) for name in get_args(StateStore)),
    *(("--cache", name, "cache", name) for name in get_args(CacheName)),
    ("--state-share", "0.25", "state_share", 0.25),
]
BAD = [
    ("--kv-dtype", "int4"),
    ("--kv-dtype", ""),
    ("--state-store", "fp8"),
    ("--cache", "radix"),
    *(("--state-share", value) for value in ("0", "1", "-0.1", "nan", "inf", "much")),
]


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EngineConfig]:
    """What the commands would run; nothing is."""
    monkeypatch.chdir(tmp_path)
    seen: list[EngineConfig] = []

    def serving(config: EngineConfig, *_: object, **__: object) -> int:
        seen.append(config)
        return 0

    def running(spec: pipeline.UpSpec, *_: object) -> Any:
        seen.append(spec.engine)
        raise UsageError("seen enough")

    monkeypatch.setattr(serve_command, "_run", serving)
    monkeypatch.setattr(pipeline, "run", running)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return seen


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("flag", "value", "field", "wanted"), GOOD)
def test_good_values_reach_the_engine(
    configs: list[EngineConfig], command: str, flag: str, value: str, field: str, wanted: object
) -> None:
    run([command, "a-model", flag, value])
    (config,) = configs
    changed: dict[str, Any] = {field: wanted}
    assert config == EngineConfig(model="a-model", **changed)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("flag", "value"), BAD)
def test_bad_values_are_one_line_and_exit_2(
    configs: list[EngineConfig],
    capsys: pytest.CaptureFixture[str],
    command: str,
    flag: str,
    value: str,
) -> None:
    assert run([command, "a-model", f"{flag}={value}"]) == 2
    said = capsys.readouterr()
    assert configs == []
    assert said.out == ""
    assert said.err.startswith("error:")
    assert len(said.err.splitlines()) == 1
    assert flag.strip("-").replace("-", "_") in said.err.replace("-", "_")


def test_up_gives_its_server_the_same_engine(configs: list[EngineConfig]) -> None:
    """``up`` serves in a process of its own, over ``serve``'s flags."""
    chosen = ["--kv-dtype", "fp8", "--state-share", "0.3", "--state-store", "int8"]
    run(["up", "a-model", *chosen, "--cache", "align", "--kv-budget", "1GiB", "--threads", "1"])
    (ours,) = configs
    run(["serve", "a-model", *_flags(ours)])
    assert configs[1] == ours


def test_no_flags_is_the_engines_own_defaults(configs: list[EngineConfig]) -> None:
    for command in COMMANDS:
        run([command, "a-model"])
    assert configs == [EngineConfig(model="a-model")] * 2
