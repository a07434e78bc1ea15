"""The command as a whole: lines, JSON, lock, overrides, exit codes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import orjson
import pytest

from hullspeed.cli.main import run
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.report import Request, judge

STACK = """
[python]
version = "3.11.7"
executable = "/env/bin/python"
torch = { version = "2.13.0+cpu", fp16_linear = true }
[python.packages]
hullspeed = "0.1.0"
numba = "1"
tokenizers = "1"
jinja2 = "3"
starlette = "1"
uvicorn = "1"
prometheus-client = "1"
[cpu]
flags = ["avx2"]
[system]
nofile = 65536
[model]
family = "llama"
files = [{ name = "m.gguf", size_bytes = 5 }]
"""


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    path = tmp_path / "stack.toml"
    path.write_text(STACK)
    return path


def test_a_sound_stack_opens_the_gate(stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", "m.gguf", "--stack", str(stack)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [
        "python", "cpu", "memory", "torch", "engine", "model", "system",
    ]  # fmt: skip
    assert all(line.startswith("✓") for line in lines[:-1])
    assert lines[-1] == "gate open: safe to load (0 warnings)"


def test_a_broken_one_closes_it_with_3(stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack.write_text(STACK.replace('numba = "1"\n', ""))
    assert run(["preflight", "m.gguf", "--stack", str(stack)]) == 3
    out = capsys.readouterr().out
    assert "✗ engine" in out
    assert "✗ PF008" in out
    assert "fix: pip install" in out
    assert out.endswith("gate closed: 1 error, 0 warnings\n")


def test_json_holds_the_chain(stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        ["preflight", "m.gguf", "--stack", str(stack), "--threads", "99", "--json"],
    )
    data = json.loads(capsys.readouterr().out)
    assert code == data["exit_code"] == 1
    assert not data["ok"]
    (finding,) = [f for link in data["chain"] for f in link["findings"]]
    assert finding["code"] == "PF013"
    assert finding["evidence"] == {"threads": "99", "usable": "1"}


def test_an_override_is_said(stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["preflight", "m.gguf", "--stack", str(stack), "--threads", "99"]
    assert run([*arguments, "--override", "PF013"]) == 0
    assert "(overridden)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--override", "PF000"],
        ["--locked", "--write-lock"],
        ["--engine", "nothing"],
        ["--tp", "0"],
        ["--port", "70000"],
        ["--context", "-1"],
        ["--stack", "/no/such/stack.toml"],
        ["--no-such-flag"],
    ],
)
def test_a_wrong_command_line_exits_2(
    stack: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if "--stack" in arguments else [*arguments, "--stack", str(stack)]
    assert run(["preflight", "m.gguf", *given]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error:") == 1


def test_an_unknown_model_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", "./no/such/model"]) == 2
    assert "not a model's name" in capsys.readouterr().err


def test_a_lock_is_written_only_through_an_open_gate(stack: Path, tmp_path: Path) -> None:
    lock = tmp_path / "hullspeed.lock"
    ask = Ask(model="m.gguf", threads=99)
    closed = judge(Request(ask=ask, lock=lock, write_lock=True, stack=stack))
    assert closed.exit_code == 1
    assert not lock.exists()
    ask = Ask(model="m.gguf")
    assert judge(Request(ask=ask, lock=lock, write_lock=True, stack=stack)).exit_code == 0
    assert judge(Request(ask=ask, lock=lock, locked=True, stack=stack)).exit_code == 0
    stack.write_text(STACK.replace('jinja2 = "3"', 'jinja2 = "4"'))
    drifted = judge(Request(ask=ask, lock=lock, locked=True, stack=stack))
    assert drifted.exit_code == 3
    assert "jinja2 is 4, locked 3" in "\n".join(drifted.lines)


def test_a_recorded_stack_is_judged_as_this_machine_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "stack.json"
    arguments = ["preflight", "never/pulled", "--port", "18433", "--json"]
    here = run([*arguments, "--write-stack", str(record)])
    seen = json.loads(capsys.readouterr().out)
    assert run([*arguments, "--stack", str(record)]) == here
    assert json.loads(capsys.readouterr().out) == seen


def test_no_lock_is_exit_1(stack: Path, tmp_path: Path) -> None:
    ask = Ask(model="m.gguf")
    judged = judge(Request(ask=ask, lock=tmp_path / "none", locked=True, stack=stack))
    assert judged.exit_code == 1
    assert "PF070" in judged.lines[-3]


def test_this_machine_with_a_truncated_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "cut.gguf"
    model.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 5, 5))
    assert run(["preflight", str(model), "--port", "18431", "--json"]) == 1
    data = orjson.loads(capsys.readouterr().out)
    codes = {f["code"] for link in data["chain"] for f in link["findings"]}
    assert "PF019" in codes
