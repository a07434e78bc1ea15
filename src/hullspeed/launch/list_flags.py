"""Run by an engine's own interpreter: list the flags of its server's parser as one JSON line.

Facts only: names, arity, choices. Used to extend and to check the tables under ``flags/``.
"""

import argparse
import json
import sys
from importlib import import_module
from typing import Any


def parser_of(engine: str) -> argparse.ArgumentParser:
    """The parser that the engine's ``serve`` builds."""
    if engine == "sglang":
        parser = argparse.ArgumentParser()
        import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
        return parser
    flexible = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    for place in ("common", "launchers", "openai"):
        try:
            module = import_module(f"vllm.entrypoints.{place}.cli_args")
        except ModuleNotFoundError:
            continue
        made: argparse.ArgumentParser = module.make_arg_parser(flexible())
        return made
    raise SystemExit("vllm has no cli_args module where it was known to be")


def kind_of(action: argparse.Action) -> str:
    """The kind, in the words of the tables."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    if action.nargs == 0:
        return "switch"
    if action.nargs in ("+", "*"):
        return "list"
    if action.nargs == "?":
        return "optional"
    known = {int: "int", float: "float", json.loads: "json"}
    return known.get(action.type, "value")


def listed(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Long name to names, kind and choices."""
    rows = {}
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if not names or names[0] == "--help":
            continue
        choices = [str(getattr(one, "value", one)) for one in action.choices or ()]
        rows[names[0]] = {"names": names, "kind": kind_of(action), "choices": choices}
    return rows


if __name__ == "__main__":
    sys.stdout.write(json.dumps(listed(parser_of(sys.argv[1]))) + "\n")
