"""``hullspeed launch``: another engine, behind the gate, here or as files for elsewhere."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from hullspeed.errors import UsageError
from hullspeed.units import parse_bytes

if TYPE_CHECKING:
    from hullspeed.findings import Finding
    from hullspeed.launch.check import Checked
    from hullspeed.launch.command import Command
    from hullspeed.launch.settings import Settings

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def launch(
    model: str | None = None,
    *,
    engine: str = "vllm",
    engine_version: str | None = None,
    python: str | None = None,
    device: str | None = None,
    gpu: str | None = None,
    revision: str | None = None,
    served_name: str | None = None,
    tensor_parallel: Annotated[int, Parameter(name=["--tensor-parallel", "--tp"])] = 1,
    pipeline_parallel: Annotated[int, Parameter(name=["--pipeline-parallel", "--pp"])] = 1,
    nodes: int = 1,
    replicas: int = 1,
    context: int | None = None,
    max_num_seqs: int | None = None,
    step_tokens: int | None = None,
    memory_share: float | None = None,
    kv_cache: str | None = None,
    kv_dtype: str | None = None,
    state_dtype: str | None = None,
    prefix_caching: bool | None = None,
    draft_tokens: int = 0,
    reasoning_parser: str | None = None,
    tool_parser: str | None = None,
    text_only: Annotated[bool, Parameter(negative="")] = False,
    eager: Annotated[bool, Parameter(negative="")] = False,
    continuous_batching: Annotated[bool, Parameter(negative="")] = False,
    host: str = "127.0.0.1",
    port: int = 8000,
    flags: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    emit: str | None = None,
    out: Path | None = None,
    check: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    override: Annotated[tuple[str, ...], Parameter(name="--override", negative="")] = (),
    start_timeout: float = 1800.0,
    drain: float = 30.0,
    log: Path | None = None,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Run vLLM, SGLang, TensorRT-LLM or Transformers behind the gate, or write what runs it.

    Example: ``hullspeed launch Qwen/Qwen3.6-27B-FP8 --gpu H100-SXM --max-num-seqs 256 --emit
    kubernetes``

    Without ``--emit`` and ``--check`` the engine is started here: preflight first, then its stages,
    readiness, and on Ctrl-C a drain; a crash is explained from its log. Exit codes: 0 fine, 1 a
    finding, 2 usage, 3 a broken environment or a crash.

    Parameters
    ----------
    model
        Hub name, or a path on the machine that serves.
    engine
        vllm, sglang, trtllm or transformers.
    engine_version
        Version of the engine; the newest whose flags are known unless given.
    python
        Interpreter of the engine's own environment; its programs lie beside it.
    device
        cpu or cuda; cuda unless given, transformers excepted.
    gpu
        GPU in the hardware catalogue.
    revision
        Revision of the model.
    served_name
        Name under which the API serves it.
    tensor_parallel
        GPUs that split each layer.
    pipeline_parallel
        Groups of GPUs that split the layers.
    nodes
        Machines that one copy of the model spans.
    replicas
        Independent copies.
    context
        Tokens of the longest request, prompt and output.
    max_num_seqs
        Sequences that may run at once.
    step_tokens
        Tokens of one engine step.
    memory_share
        The engine's own memory knob.
    kv_cache
        Pool per GPU, e.g. 24GiB, in place of a share (vllm).
    kv_dtype
        KV type, e.g. fp8.
    state_dtype
        Type of a hybrid model's recurrent state.
    prefix_caching
        On or off; the engine's default unless given.
    draft_tokens
        Speculative tokens per step.
    reasoning_parser
        The engine's parser for reasoning.
    tool_parser
        The engine's parser for tool calls.
    text_only
        Leave a vision tower out.
    eager
        No graphs.
    continuous_batching
        For transformers.
    host
        Address to listen on; beyond loopback the engine needs a key in its environment.
    port
        Port to listen on.
    flags
        Further flags of the engine, as one text; checked too.
    emit
        command, docker, compose, kubernetes, lws, kserve, ray, skypilot, systemd, slurm,
        prometheus or grafana.
    out
        Folder for the files; standard output unless given.
    check
        An old command line or - for a script on standard input: what is wrong, and today's form.
    override
        A code of the gate that may stand; repeat for several.
    start_timeout
        Seconds from start to ready.
    drain
        Seconds for running requests after a stop.
    log
        File that receives the engine's output.
    json
        Print JSON.
    """
    if check is not None:
        return _check(sys.stdin.read() if check == "-" else check, engine_version, as_json=json)
    if model is None:
        raise UsageError("no model given", fix="name one, or give --check COMMAND")
    from hullspeed.launch.settings import Settings

    settings = Settings(
        model=model,
        engine=engine,
        version=engine_version,
        revision=revision,
        served_name=served_name,
        gpu=gpu,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        nodes=nodes,
        replicas=replicas,
        context_tokens=context,
        max_num_seqs=max_num_seqs,
        step_tokens=step_tokens,
        memory_share=memory_share,
        kv_cache_bytes=None if kv_cache is None else parse_bytes(kv_cache),
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        prefix_caching=prefix_caching,
        draft_tokens=draft_tokens,
        reasoning_parser=reasoning_parser,
        tool_parser=tool_parser,
        text_only=text_only,
        eager=eager,
        continuous_batching=continuous_batching,
        host=host,
        port=port,
        extra=_split(flags),
    ).checked()
    if emit is not None:
        return _emit(emit, settings, out, as_json=json)
    _gate(settings, python, device, override)
    return _run(settings, python, start_timeout, drain, log)


def _split(flags: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(flags))
    except ValueError as error:
        raise UsageError(
            f"cannot read --flags: {error}", seen=flags, fix="close the quotes"
        ) from error


def _check(text: str, version: str | None, *, as_json: bool) -> int:
    from hullspeed.findings import Severity
    from hullspeed.launch.check import check_text, walk

    checked = check_text(text, version)
    if as_json:
        _print_json([_as_data(one) for one in checked])
    else:
        for one in checked:
            sys.stdout.writelines(f"{line}\n" for line in _as_lines(one))
    wrong = any(finding.severity is Severity.ERROR for finding in walk(checked))
    return 1 if wrong else 0


def _as_lines(checked: Checked) -> list[str]:
    lines = [f"{checked.engine} {checked.version}"]
    for finding in checked.findings:
        mark = "✗" if finding.severity == "error" else "!"
        lines += [f"  {mark} {finding.code} {finding.what}", f"      why: {finding.why}"]
        lines.append(f"      fix: {finding.fix}")
    lines += ["  ✓ nothing wrong or obsolete"] if not checked.findings else []
    return [*lines, "", "today:", checked.today.rstrip(), ""]


def _as_data(checked: Checked) -> dict[str, object]:
    import msgspec

    return {
        "engine": checked.engine,
        "version": checked.version,
        "findings": [msgspec.to_builtins(finding) for finding in checked.findings],
        "today": checked.today,
    }


def _emit(target: str, settings: Settings, out: Path | None, *, as_json: bool) -> int:
    from hullspeed.launch.emit import emit

    files = emit(target, settings)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (out / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write: {error.strerror}", seen=str(out)) from error
        sys.stderr.writelines(f"wrote {out / name}\n" for name in files)
    elif as_json:
        _print_json(files)
    else:
        for number, (name, text) in enumerate(files.items()):
            if number:
                sys.stdout.write(f"\n# ---- {name}\n")
            sys.stdout.write(text)
    return 0


def _gate(
    settings: Settings, python: str | None, device: str | None, overrides: Sequence[str]
) -> None:
    """Preflight of this machine for these settings.

    Raises:
        HullspeedError: while an error stands that is not overridden.
    """
    from hullspeed.preflight import Ask, MachineProbes, gate
    from hullspeed.preflight.chain import links
    from hullspeed.preflight.show import as_lines
    from hullspeed.preflight.sizing import sized

    ask = Ask(
        model=settings.model,
        engine=settings.engine,
        device=device or ("cuda" if settings.engine != "transformers" else None),
        gpu=settings.gpu,
        python=python,
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        context_tokens=settings.context_tokens,
        max_num_seqs=settings.max_num_seqs,
        memory_share=settings.memory_share,
        kv_dtype=settings.kv_dtype or "auto",
        draft_tokens=settings.draft_tokens,
        prefix_caching=settings.prefix_caching,
        continuous_batching=settings.continuous_batching,
        host=settings.host,
        port=settings.port,
    ).checked()
    stack = MachineProbes().stack(ask)
    chain = links(sized(ask, stack), stack)
    sys.stderr.writelines(f"{line}\n" for line in as_lines(chain, overrides))
    findings = [finding for link in chain for finding in link.findings]
    for finding in gate(findings, overrides):
        sys.stderr.write(f"overridden: {finding.code} {finding.what}\n")


def _run(
    settings: Settings, python: str | None, start_timeout_s: float, drain_s: float, log: Path | None
) -> int:
    import dataclasses

    from hullspeed.launch.command import build_command
    from hullspeed.launch.supervise import Supervisor, launch_of

    command = build_command(settings)
    launched = dataclasses.replace(
        launch_of(command, log_path=log),
        argv=_with_key(command, python),
        start_timeout_s=start_timeout_s,
        drain_s=drain_s,
    )
    sys.stderr.write(f"$ {command.line}\n")
    supervisor = Supervisor(
        launched,
        on_stage=lambda stage: _say(f"· {stage}"),
        explain=lambda text: explained(settings.engine, text),
    )
    ended = supervisor.run()
    cut = "" if ended.drained else ", requests cut"
    _say(f"ended with exit code {ended.exit_code}{cut}")
    return 0 if ended.stopped or ended.exit_code == 0 else 3


def _with_key(command: Command, python: str | None) -> tuple[str, ...]:
    """The program of the engine's environment, with its key where it takes one as a flag.

    Raises:
        UsageError: for an address beyond loopback without a key.
    """
    import os

    settings = command.settings
    key = os.environ.get(command.key_env, "") if command.key_env else ""
    if settings.host not in _LOOPBACK and not key:
        raise UsageError(
            "an address beyond loopback needs an API key", seen=settings.host,
            fix=f"set {command.key_env}" if command.key_env else "listen on 127.0.0.1",
        )  # fmt: skip
    program = command.argv[0]
    if python is not None:
        program = str(Path(python).parent / program)
    return (program, *command.argv[1:], *(command.key_flags(key) if key else []))


def explained(engine: str, text: str) -> Sequence[Finding]:
    """What a crash's log means, for the engines whose logs are understood."""
    from hullspeed.findings import Severity
    from hullspeed.plan.explain_log import explain_log

    if engine not in ("vllm", "sglang"):
        return ()
    try:
        findings = explain_log(text).findings
    except UsageError:  # it ended before it printed a line of its own
        return ()
    return [finding for finding in findings if finding.severity is Severity.ERROR]


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _print_json(data: object) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode() + "\n")
