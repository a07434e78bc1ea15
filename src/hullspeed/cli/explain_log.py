"""``hullspeed explain-log``: what a start-up log means, and what it leaves out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from hullspeed.arch.model import ModelArch


def explain_log(
    file: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    model: str | None = None,
    tp: int | None = None,
    verbose: Annotated[bool, Parameter(name=["--verbose", "-v"], negative="")] = False,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Explain a start-up log of vLLM or SGLang, from a file or - for standard input.

    Example: ``docker logs vllm 2>&1 | hullspeed explain-log -``

    Says what each line means, whether the numbers agree, which settings reproduce them (KV dtype,
    state dtype, draft depth, prefix caching, tensor parallelism), how many requests really run at
    once, what would serve more, and why a start failed. Exit codes: 0 it started, 1 the log ends in
    an error, 2 usage.

    Parameters
    ----------
    file
        The log, or - for standard input.
    model
        Shapes of the model: a catalogue name or a folder with config.json. Needed when the log's
        name is not known.
    tp
        Tensor parallelism, when the log does not state it.
    verbose
        Every line and every combination that fits.
    json
        Print JSON.
    """
    from hullspeed.errors import UsageError
    from hullspeed.plan.explain_log import explain_log as explain

    if tp is not None and tp < 1:
        raise UsageError("tensor parallelism is at least 1", seen=tp)
    explanation = explain(_read(file), arch=_arch(model), tp=tp)
    if json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(explanation)) + b"\n")
        sys.stdout.buffer.flush()
    else:
        from hullspeed.plan.explain_log.render import lines_of

        for line in lines_of(explanation, verbose=verbose):
            sys.stdout.write(line + "\n")
    return 0 if explanation.started else 1


def _read(file: str) -> str:
    from hullspeed.errors import UsageError

    if file == "-":
        return sys.stdin.buffer.read().decode(errors="replace")
    path = Path(file).expanduser()
    if not path.is_file():
        raise UsageError("no such log file", seen=file, fix="give a file, or - for standard input")
    return path.read_bytes().decode(errors="replace")


def _arch(model: str | None) -> ModelArch | None:
    from hullspeed.arch import catalogue
    from hullspeed.arch.load import load_arch
    from hullspeed.plan.explain_log.models import find_arch
    from hullspeed.sources.files import from_path

    if model is None:
        return None
    if Path(model).expanduser().exists():
        files = from_path(Path(model).expanduser(), source=model, need_weights=False)
        return load_arch(files)
    named = find_arch(model)
    return named.arch if named else catalogue.load(model)
