"""Every command line in the documentation is one that the command takes: names, options, values."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from hullspeed.cli.main import COMMANDS, build_app
from hullspeed.errors import HullspeedError

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


def commands(page: Path) -> list[list[str]]:
    """Command lines of code blocks, continued lines joined, without prompts, comments, pipes."""
    found = []
    for body in re.findall(r"```\w*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in body.replace("\\\n", " ").splitlines():
            text = line.strip().removeprefix("$ ").rpartition("| ")[2]
            if not text.startswith("hullspeed ") or "..." in text:
                continue
            words = shlex.split(text, comments=True)[1:]
            if words and words[0] in COMMANDS and not words[0].endswith(":"):
                cut = next((i for i, w in enumerate(words) if w in (">", "&", "<", "2>&1")), None)
                found.append(words[:cut])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_shown_is_taken(page: Path) -> None:
    for words in commands(page):
        name = words[0]
        app = build_app(name)
        try:
            app.parse_args(words, exit_on_error=False, print_error=False)
        except (CycloptsError, HullspeedError) as error:
            pytest.fail(f"{page.name}: hullspeed {shlex.join(words)}: {error}")


def test_the_pages_show_commands() -> None:
    shown = {words[0] for page in PAGES for words in commands(page)}
    assert shown >= {"plan", "simulate", "launch", "serve", "verify", "bench", "quantize", "pull"}
