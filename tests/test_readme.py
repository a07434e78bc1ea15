"""What the README shows is run: its Python, its commands and its links."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hullspeed.cli.main import COMMANDS
from hullspeed.sources.files import ModelFiles

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run(smollm2_files: ModelFiles) -> None:
    blocks = [body for language, body in BLOCKS if language == "python"]
    assert blocks
    for body in blocks:
        done = subprocess.run(
            [sys.executable, "-c", body], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def commands() -> list[list[str]]:
    """Every ``hullspeed`` command line in the README, without pipes and comments."""
    found = []
    for _, body in BLOCKS:
        for line in body.splitlines():
            text = line.removeprefix("$ ").partition(" # ")[0].rpartition("| ")[2].strip()
            if text.startswith("hullspeed ") and "..." not in text and "hullspeed up:" not in text:
                found.append(shlex.split(text)[1:])
    return found


def test_every_command_shown_exists() -> None:
    assert len(commands()) >= 8
    assert {command[0] for command in commands()} <= COMMANDS.keys()


@pytest.mark.parametrize("command", [c for c in commands() if c[0] in ("plan", "launch")])
def test_planning_commands_run(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hullspeed", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert "error:" not in done.stderr
    assert done.stdout or any(tmp_path.iterdir())


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_page_is_linked() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in README, page.name


@pytest.mark.parametrize("script", ["setup", "up", "test", "test-deep", "check", "lock"])
def test_scripts_are_portable_and_executable(script: str) -> None:
    path = ROOT / "scripts" / script
    assert path.stat().st_mode & 0o111
    assert path.read_text().startswith("#!/bin/sh\n")
    done = subprocess.run(["sh", "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
