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

_CONCURRENCIES = (1, 4, 16)


def calibrate(
    model: str | None = None,
    *,
    threads: int | None = None,
    weight_dtype: Literal["native", "fp16", "fp32"] = "native",
    endpoint: str | None = None,
    log: Path | None = None,
    bench: Path | None = None,
    gpu: str | None = None,
    engine: Literal["vllm", "sglang", "trtllm"] = "vllm",
    tp: int = 1,
    isl: int = 1024,
    osl: int = 128,
    api_key: str | None = None,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
) -> int:
    """Time the embedded engine's kernels on this machine and keep the result for plan and up.

    Example: ``hullspeed calibrate``

    With --endpoint, --log or --bench it learns instead what a served model does on its GPU, from a
    few minutes of load on a running endpoint, from the statistics lines of an engine's log, or from
    a benchmark's JSON: ``hullspeed calibrate Qwen/Qwen3-32B --gpu h200 --bench result.json``.

    Takes some seconds; keep the machine quiet meanwhile. Exit codes: 0 kept, 1 kept, but other
    processes disturbed it, 2 usage or model.

    Parameters
    ----------
    model
        Time its shapes; those of SmolLM2-135M unless given. With --gpu: the model that is served.
    threads
        Compute threads; all cores of this process unless given.
    weight_dtype
        How the engine holds weights.
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
        served = _Served(model or "", gpu or "", engine, tp)
        observed, origin = _observe(endpoint, log, bench, (isl, osl), api_key, quiet=quiet)
        return _calibrate_served(served, observed, origin, json=json)
    import msgspec

    from hullspeed.hardware.ceilings import save_ceilings
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
    path = save_ceilings(ceilings, machine)
    if json:
        data = msgspec.json.encode(ceilings)
        sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")
    else:
        sys.stdout.write("\n".join(_lines(ceilings, weight_dtype, path)) + "\n")
    return 0 if ceilings.quiet else 1


class _Served(NamedTuple):
    """What serves: model, GPU, engine and number of GPUs."""

    model: str
    gpu: str
    engine: str
    tp: int


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
    return _load(str(endpoint), lengths, api_key, quiet=quiet), str(endpoint)


def _load(
    url: str, lengths: tuple[int, int], api_key: str | None, *, quiet: bool
) -> list[Observed]:
    """Load the endpoint with a few requests at a time, more at a time, and many at a time."""
    from hullspeed.bench import BenchSpec, run, run_sync
    from hullspeed.perf.observed import ObservedLoad

    spec = BenchSpec(
        url=url, model=None, isl_tokens=lengths[0], osl_tokens=lengths[1],
        concurrency=_CONCURRENCIES, api_key=api_key,
    )  # fmt: skip

    def progress(line: str) -> None:
        if not quiet:
            sys.stderr.write(line + "\n")

    result = run_sync(run(spec, progress=progress))
    found: list[Observed] = [
        ObservedLoad(
            isl=max(round(cell.prompt_tokens.mean), 1),
            osl=max(round(cell.output_tokens.mean), 1),
            concurrency=concurrency,
            requests=cell.ok,
            ttft_s=cell.ttft_s.mean,
            tpot_s=cell.tpot_s.mean,
            output_tokens_per_s=cell.output_tok_s,
        )
        for concurrency, cell in zip(_CONCURRENCIES, result.cells, strict=True)
        if cell.ok
    ]
    if not found:
        raise UsageError(
            "no request to the endpoint succeeded", seen=result.cells[0].first_error or url
        )
    return found


def _calibrate_served(served: _Served, observed: list[Observed], origin: str, *, json: bool) -> int:
    import msgspec

    from hullspeed.hardware.catalogue import find_gpu
    from hullspeed.hardware.ceilings import timestamp
    from hullspeed.perf.calibration import calibrate as fit
    from hullspeed.perf.calibration import save_calibration
    from hullspeed.perf.fitted import FittedCost, engine_of
    from hullspeed.plan.source import load_model

    if not served.model or not served.gpu:
        raise UsageError(
            "say what is served and where",
            fix="e.g. hullspeed calibrate Qwen/Qwen3-32B --gpu h200 --bench result.json",
        )
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


def _lines(ceilings: Ceilings, weight_dtype: str, path: Path) -> list[str]:
    linear = ceilings.linear_flops_per_s[weight_dtype]
    return [
        f"memory     {ceilings.dram_bytes_per_s / 1e9:.1f} GB/s, {ceilings.threads} threads",
        *(f"linear     {linear.at(m) / 1e9:6.1f} GFLOP/s at {m} tokens" for m in (1, 8, 64, 512)),
        f"kept in    {path}",
        *(f"note       {note}" for note in ceilings.notes),
    ]
