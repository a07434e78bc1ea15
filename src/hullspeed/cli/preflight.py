"""``hullspeed preflight``: is the stack from driver to model whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter


def preflight(
    model: str,
    *,
    engine: str = "hullspeed",
    device: str | None = None,
    gpu: str | None = None,
    python: str | None = None,
    tensor_parallel: Annotated[int, Parameter(name=["--tensor-parallel", "--tp"])] = 1,
    pipeline_parallel: Annotated[int, Parameter(name=["--pipeline-parallel", "--pp"])] = 1,
    context: int | None = None,
    max_num_seqs: int | None = None,
    kv_dtype: str = "auto",
    draft_tokens: int = 0,
    threads: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    lock: Path = Path("hullspeed.lock"),
    locked: bool = False,
    write_lock: bool = False,
    override: Annotated[tuple[str, ...], Parameter(name="--override")] = (),
    stack: Path | None = None,
    write_stack: Path | None = None,
    json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Check the whole stack before anything is loaded; exit 0 only if it is safe to load.

    Example: ``hullspeed preflight Qwen/Qwen3.6-27B-FP8 --engine vllm --python ~/vllm/bin/python``

    Parameters
    ----------
    model
        Source as ``hullspeed pull`` takes it.
    engine
        hullspeed, vllm, sglang, trtllm or transformers.
    device
        cpu or cuda; follows from the engine unless given.
    gpu
        The GPU that the plan was made for.
    python
        Interpreter of the engine's own environment.
    tensor_parallel
        GPUs that split each layer.
    pipeline_parallel
        Groups of GPUs that split the layers.
    context
        Tokens of the longest request, prompt and output.
    max_num_seqs
        Sequences that may run at once.
    kv_dtype
        KV type as the engine takes it.
    draft_tokens
        Speculative tokens per step.
    threads
        Compute threads of a CPU run.
    host
        Address to listen on.
    port
        Port to listen on.
    lock
        The lock file.
    locked
        Fail on any drift from the lock file.
    write_lock
        Write the lock file if the gate is open.
    override
        A code that may stand; repeat for several.
    stack
        Judge a stack recorded in a TOML or JSON file instead of this machine.
    write_stack
        Record what was looked at as JSON, to be judged elsewhere with --stack.
    json
        Print JSON.
    """
    from hullspeed.preflight.ask import Ask
    from hullspeed.preflight.report import Request, judge

    ask = Ask(
        model=model,
        engine=engine,
        device=device,
        gpu=gpu,
        python=python,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        context_tokens=context,
        max_num_seqs=max_num_seqs,
        kv_dtype=kv_dtype,
        draft_tokens=draft_tokens,
        threads=threads,
        host=host,
        port=port,
    ).checked()
    request = Request(
        ask=ask,
        lock=lock,
        locked=locked,
        write_lock=write_lock,
        overrides=override,
        stack=stack,
        write_stack=write_stack,
    )
    return _print(judge(request), as_json=json)


def _print(judged: Any, *, as_json: bool) -> int:
    import sys

    import orjson

    if as_json:
        sys.stdout.write(orjson.dumps(judged.data, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in judged.lines)
    for note in judged.notes:
        sys.stderr.write(f"{note}\n")
    return int(judged.exit_code)
