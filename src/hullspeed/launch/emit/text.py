"""Text: how emitted files are written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Lists indented below their key, text of several lines as a block."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """As the base class, but never without an indent."""
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that occurs twice out twice: aliases surprise readers."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(*documents: dict[str, Any], comment: str = "") -> str:
    """Documents as YAML in the order of their keys, after a comment."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    body = "---\n".join(
        yaml.dump(one, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
        for one in documents
    )
    return head + body


def as_json(document: dict[str, Any]) -> str:
    """A document as indented JSON."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def continued(words: Sequence[str], indent: str = "  ") -> str:
    """Words of a command over lines, each flag with its value on one."""
    lines: list[str] = []
    for word in words:
        fresh = word.startswith("-") or not lines or not lines[-1].split()[0].startswith("-")
        if lines and not fresh:
            lines[-1] += f" {word}"
        elif lines and not word.startswith("-") and len(lines) == 1:
            lines[0] += f" {word}"
        else:
            lines.append(word)
    return f" \\\n{indent}".join(lines)
