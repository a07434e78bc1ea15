from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hullspeed.cli import main
from hullspeed.errors import BrokenStackError, UsageError

ROOT = Path(__file__).parent.parent.parent


def test_every_command_has_a_module_an_example_and_a_page() -> None:
    for name in main.COMMANDS:
        module = name.replace("-", "_")
        function = getattr(importlib.import_module(f"hullspeed.cli.{module}"), module)
        assert f"hullspeed {name}" in function.__doc__, f"{name}: no example"
        assert "exit" in function.__doc__.lower(), f"{name}: no exit codes"
        assert (ROOT / "docs" / f"{name}.md").is_file(), f"{name}: no page"


def test_every_module_is_a_command() -> None:
    helpers = {"__init__", "kv_check", "main", "watcher", "pages", "sweeps", "workloads"}
    modules = {path.stem for path in (ROOT / "src/hullspeed/cli").glob("*.py")} - helpers
    assert modules == {name.replace("-", "_") for name in main.COMMANDS}


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from hullspeed.cli.main import run; "
        f"code = run({arguments!r}); "
        "sys.exit(code or any(m in sys.modules for m in ('torch', 'numba', 'starlette')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    ["preflight.gate", "plan.plan", "plan.explain_log", "launch.command", "bench", "verify",
     "twin.closed_loop", "report.planned", "sources.resolve", "arch.load", "runtime.process",
     "server.lifecycle"],
)  # fmt: skip
def test_the_base_install_needs_no_torch(module: str) -> None:
    code = (
        f"import sys; import hullspeed.{module}; "
        "sys.exit(bool({'torch', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "torch or numba was imported"


def test_a_commands_own_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "--help"]) == 0
    assert "Example" in capsys.readouterr().out


def test_usage_errors_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plna"]) == 2
    assert "plan" in capsys.readouterr().err
    assert main.run(["plan", "--nope", "1"]) == 2
    assert main.run(["pull", "no/such/place/at/all"]) == 2
    message = capsys.readouterr().err
    assert message.count("error:") == 2
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("wrong", seen=[1], fix="do this"), 2),
        (BrokenStackError("broken"), 3),
        (ModuleNotFoundError("no torch", name="torch"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(main, "build_app", lambda _: failing)
    assert main.run(["plan"]) == code
    assert capsys.readouterr().err


def test_options_come_from_the_environment_and_the_file(tmp_path: Path) -> None:
    (tmp_path / "hullspeed.toml").write_text('[serve]\nmodel = "from-file"\nport = 1234\n')
    done = subprocess.run(
        [sys.executable, "-m", "hullspeed", "serve", "--print-config"],
        cwd=tmp_path,
        env={**os.environ, "HULLSPEED_SERVE_THREADS": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 'model = "from-file"' in done.stdout
    assert "port = 1234" in done.stdout
    assert "threads = 3" in done.stdout


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m hullspeed plan --list-gpus | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
