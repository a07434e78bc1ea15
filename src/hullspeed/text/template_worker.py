"""The child process that renders a chat template: run as a script, by path, isolated.

It imports the standard library and jinja2 and nothing of hullspeed, has no environment, no files
to write and little memory, and its parent kills it when it takes too long. Frames on standard
input and output: 4-byte little-endian length, then JSON. The first frame configures, each later
one renders.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_LENGTH = struct.Struct("<I")


class _GenerationTag(Extension):
    """``{% generation %}``: marks assistant text for training; here its body and no more."""

    tags = {"generation"}  # noqa: RUF012 # jinja2's own way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateNamespace(Namespace):
    """``namespace()`` without underscore attributes, which reach for Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a field may be called self
        self, *rest = args
        fields = dict(*rest, **kwargs)
        for name in fields:
            _public(name)
        Namespace.__init__(self, fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes and with readable characters: what templates are written for."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def make_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers' ``apply_chat_template`` sets it up; templates rely on each part."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        namespace=_TemplateNamespace,
    )
    return environment


def render(template: jinja2.Template, values: Mapping[str, Any], max_chars: int) -> dict[str, str]:
    """The text, or what went wrong: ``{"text": ...}`` or ``{"error": ..., "kind": ...}``."""
    parts: list[str] = []
    n_chars = 0
    try:
        for part in template.generate(values):
            n_chars += len(part)
            if n_chars > max_chars:
                return {"error": f"more than {max_chars} characters", "kind": "limit"}
            parts.append(part)
    except jinja2.exceptions.SecurityError as error:
        return {"error": str(error), "kind": "security"}
    except jinja2.exceptions.TemplateError as error:
        return {"error": str(error), "kind": "template"}
    except MemoryError:
        return {"error": "more memory than it may use", "kind": "limit"}
    # The boundary of one request: a template is a program and can fail in any way.
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"[:500], "kind": "template"}
    return {"text": "".join(parts)}


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message, or ``None`` when the parent is gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    message: dict[str, Any] = json.loads(stream.read(_LENGTH.unpack(head)[0]))
    return message


def write_frame(stream: BinaryIO, message: Mapping[str, Any]) -> None:
    """Send one message."""
    body = json.dumps(message).encode()
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def _limit(memory_bytes: int) -> None:
    try:
        import resource  # noqa: PLC0415 # not on every platform
    except ImportError:
        return
    for name, limit in (("RLIMIT_AS", memory_bytes), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0)):
        try:
            resource.setrlimit(getattr(resource, name), (limit, limit))
        except (AttributeError, ValueError, OSError):
            continue  # macOS refuses RLIMIT_AS; the time and output limits still hold


def main() -> None:
    """Serve render requests until standard input closes."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    config = read_frame(requests)
    if config is None:
        return
    _limit(config["memory_bytes"])
    compile_template: Callable[[str], jinja2.Template] = make_environment().from_string
    try:
        template = compile_template(config["template"])
    except (jinja2.exceptions.TemplateError, MemoryError, RecursionError) as error:
        write_frame(answers, {"error": str(error) or type(error).__name__, "kind": "syntax"})
        return
    write_frame(answers, {"text": ""})
    while (message := read_frame(requests)) is not None:
        write_frame(answers, render(template, message["values"], config["max_chars"]))


if __name__ == "__main__":
    main()
