"""``hullspeed simulate``: what traffic would see, before there is a server."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from hullspeed.cli.pages import check_writable, write_file, write_page
from hullspeed.cli.sweeps import many
from hullspeed.cli.workloads import (
    check_applies,
    check_price,
    check_tables,
    make_workload,
    told,
)
from hullspeed.errors import UsageError

if TYPE_CHECKING:
    from hullspeed.arch.model import ModelArch
    from hullspeed.report.blocks import Report
    from hullspeed.twin.question import Question
    from hullspeed.twin.summary import Objective
    from hullspeed.twin.workload import Workload

Many = Parameter(consume_multiple=True, negative="")
Flag = Parameter(negative="")
EngineName = Literal["vllm", "sglang", "trtllm", "hullspeed"]
TraceFormat = Literal["hullspeed", "mooncake", "azure", "burstgpt", "weka", "sharegpt", "custom"]


def simulate(
    model: str,
    *,
    gpu: str | None = None,
    engine: EngineName | None = None,
    tp: Annotated[int, Parameter(name=["--tp", "--tensor-parallel"])] = 1,
    trace: Path | None = None,
    format: TraceFormat = "hullspeed",
    requests: int | None = None,
    thin: Annotated[bool, Flag] = False,
    isl: int = 2048,
    osl: int = 256,
    isl_sigma: float = 0.0,
    osl_sigma: float = 0.0,
    range_ratio: float = 1.0,
    shared_prefix: int = 0,
    prefixes: int = 1,
    concurrency: int | None = None,
    rate: float | None = None,
    arrival: Literal["poisson", "constant", "gamma", "ramp"] = "poisson",
    burst: float = 2.0,
    end_rate: float = 0.0,
    ramp: str = "60s",
    warmup: int = 0,
    agents: int = 0,
    think: str = "20s",
    thinking: Annotated[
        bool, Parameter(name="--strip-thinking", negative="--keep-thinking")
    ] = True,
    seed: int = 0,
    slo_ttft: Annotated[str | None, Parameter(name=["--slo-ttft", "--ttft"])] = None,
    slo_tpot: Annotated[str | None, Parameter(name=["--slo-tpot", "--tpot"])] = None,
    attainment: float = 0.9,
    context: int | None = None,
    cache: str | None = None,
    eviction: Literal["lru", "density"] = "lru",
    kv_dtype: str | None = None,
    state_dtype: str | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    memory_fraction: float | None = None,
    prefix_caching: bool | None = None,
    cost: Literal["fitted", "tables"] = "fitted",
    price: float | None = None,
    requests_per_task: int = 1,
    task_success: float = 1.0,
    capacity: Annotated[bool, Flag] = False,
    sweep: Annotated[tuple[str, ...] | None, Many] = None,
    what_if: Annotated[bool, Flag] = False,
    compare_cache: Annotated[bool, Flag] = False,
    cache_budget: Annotated[tuple[str, ...], Many] = ("8GiB", "24GiB"),
    policy: Annotated[tuple[str, ...], Many] = (),
    workers: int | None = None,
    ray: str | None = None,
    resume: Path | None = None,
    save_trace: Path | None = None,
    html: Path | None = None,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Play traffic on an engine's scheduler and cache on a virtual clock; no GPU is needed.

    Example: ``hullspeed simulate Qwen/Qwen3.6-27B-FP8 --gpu h100-sxm --rate 3 --slo-ttft 1s``

    The same options and seed give the same output. Exit codes: 0 fine, 1 the objective is missed
    by every configuration or the model does not fit, 2 usage, a malformed trace or model.

    Parameters
    ----------
    model
        Source as ``hullspeed plan`` takes it.
    gpu
        Exact name (hullspeed plan --list-gpus) or custom:memory=48GiB,bandwidth=864,bf16=362; the
        embedded engine on this machine's processor without it.
    engine
        Whose scheduling, cache and memory rules: vllm on GPUs, hullspeed here unless given.
    tp
        GPUs that split each layer.
    trace
        Recorded traffic, instead of drawn lengths.
    format
        Of the trace.
    requests
        How many: 500 drawn ones unless given; of a trace the first ones, all unless given.
    thin
        Of a trace take a sample of whole sessions over its whole duration instead.
    isl
        Input tokens: fixed, the longest with --range-ratio, the median with --isl-sigma.
    osl
        Output tokens, likewise.
    isl_sigma
        Lognormal input lengths with this standard deviation of the logarithm.
    osl_sigma
        The same for output lengths.
    range_ratio
        Uniform lengths from this share of --isl and --osl up to them, as benchmarks draw them.
    shared_prefix
        First input tokens that requests share.
    prefixes
        How many different shared prefixes there are.
    concurrency
        Closed loop: requests (or sessions) in flight, sent as fast as places are free.
    rate
        Open loop: requests (or sessions) per second; a trace keeps its own times without it.
    arrival
        How the open loop spaces its requests.
    burst
        Coefficient of variation of gamma gaps; above 1 is bursty.
    end_rate
        Rate at the end of a ramp.
    ramp
        Duration of a ramp.
    warmup
        Requests sent first that are not counted.
    agents
        So many agent sessions of several turns with shared system prompts, instead of requests.
    think
        Median time between an agent's answer and its next request.
    thinking
        Whether the template drops earlier thinking, so that outputs are never found again.
    seed
        Of everything that is drawn.
    slo_ttft
        Objective: time to first token, such as 500ms.
    slo_tpot
        Objective: mean time per output token after the first, such as 30ms.
    attainment
        Share of requests that must keep the objective.
    context
        Longest sequence; what the workload needs unless given.
    cache
        Another prefix cache than the engine's: segment, align, prompt_end, lru, hash, none.
    eviction
        What goes first from it.
    kv_dtype
        KV cache format; the checkpoint's unless given.
    state_dtype
        Recurrent state format; the model's unless given.
    max_num_seqs
        Sequences at once.
    max_num_batched_tokens
        Tokens of a step.
    memory_fraction
        The engine's own fraction, with its own meaning.
    prefix_caching
        On or off; on unless given.
    cost
        Of a step on a GPU: fitted to published measurements, or tables: measured ones of
        aiconfigurator-core (pip install 'hullspeed[aiconfigurator]').
    price
        Dollars per GPU and hour, in place of the catalogue's.
    requests_per_task
        Requests that make up one useful task.
    task_success
        Share of tasks that succeed.
    capacity
        Search the highest load that keeps the objective.
    sweep
        Axes of values, such as gpu=h100-sxm,h200-sxm engine=vllm,sglang tp=1,2 kv-dtype=bf16,fp8.
    what_if
        Change one thing at a time and rank by goodput.
    compare_cache
        Prefix-cache policies side by side on this workload, each with the same bytes.
    cache_budget
        Bytes for KV and states together, for --compare-cache; several are compared.
    policy
        Only these policies.
    workers
        Processes for sweeps; as many as there are cores unless given. The result is the same.
    ray
        Sweep over a Ray cluster at this address instead (auto: the one that runs here; local: start
        one). The result is the same.
    resume
        Keep a sweep's outcomes in this file as they come; what it already holds is not simulated
        again. It belongs to one sweep: another one's file is refused.
    save_trace
        Write the workload in hullspeed's own format.
    html
        Write the report as one self-contained page.
    json
        Print JSON.
    """
    options = dict(locals())
    _check(options)
    from hullspeed.units import parse_bytes, parse_seconds

    workload = make_workload(options, parse_seconds(ramp), parse_seconds(think))
    objective = _objective(slo_ttft, slo_tpot, attainment)
    question = _question(options, workload)
    if save_trace is not None:
        from hullspeed.twin.traces import trace_text

        write_file(save_trace, trace_text(workload), "--save-trace")
        sys.stderr.write(f"wrote {save_trace}\n")
    title = (
        f"Simulated: {model} on {question.target()}, {question.settings.engine}; {told(workload)}"
    )
    if compare_cache:
        budgets = [parse_bytes(text) for text in cache_budget]
        data, report = _compare_cache(question, workload, budgets, policy, max_num_seqs, title)
    elif sweep or what_if:
        data, report = many(question, workload, objective, options, title)
    else:
        data, report = _one(question, workload, objective, capacity, title)
    settings = {"model": model, "target": question.target(), "engine": question.settings.engine,
                "workload": told(workload), "requests": workload.n_requests,
                "seed": seed, "objective": objective}  # fmt: skip
    _show(settings | data, report, html=html, json=json)
    return 0 if report.ok else 1


def _check(options: dict[str, Any]) -> None:
    """What can be refused before anything is read.

    Raises:
        UsageError: for options that say nothing here, numbers that cannot be, files that could not
            be written.
        BrokenStackError: if the measured tables are asked for and not installed.
    """
    parameters = inspect.signature(simulate).parameters
    check_applies(options, {name: p.default for name, p in parameters.items()})
    if options["sweep"] == ():
        from hullspeed.twin.sweep import AXES

        raise UsageError(
            "--sweep needs axes, each a name and its values",
            fix=f"e.g. --sweep tp=1,2 (axes: {', '.join(AXES)})",
        )
    check_writable(options["html"], "--html")
    check_writable(options["save_trace"], "--save-trace")
    check_price(options["price"])
    workers = options["workers"]
    if workers is not None and workers < 1:
        raise UsageError("--workers must be at least 1", seen=workers)
    if options["requests_per_task"] < 1 or not 0 < options["task_success"] <= 1:
        raise UsageError(
            "a task has at least one request, and succeeds a share of the time above 0",
            seen=(options["requests_per_task"], options["task_success"]),
        )
    if options["cost"] == "tables":
        check_tables(on_gpu=options["gpu"] is not None)


def _objective(ttft: str | None, tpot: str | None, attainment: float) -> Objective:
    from hullspeed.twin.summary import Objective
    from hullspeed.units import parse_seconds

    objective = Objective(
        ttft_s=None if ttft is None else parse_seconds(ttft),
        tpot_s=None if tpot is None else parse_seconds(tpot),
        attainment=attainment,
    )
    objective.check()
    return objective


def _question(options: dict[str, Any], workload: Workload) -> Question:
    from hullspeed.memory.budget import EngineSettings
    from hullspeed.plan.source import load_model
    from hullspeed.twin.question import Question
    from hullspeed.twin.sweep import priced

    planned = load_model(options["model"])
    context, most = options["context"], planned.arch.max_context_tokens
    if context is not None and not 1 <= context <= most:
        raise UsageError(
            f"the model's context is {most:,} tokens", seen=context, fix="lower --context"
        )
    longest = max(t.isl_tokens + t.osl_tokens for s in workload.sessions for t in s.turns)
    settings = EngineSettings(
        engine=options["engine"] or ("hullspeed" if options["gpu"] is None else "vllm"),
        memory_fraction=options["memory_fraction"],
        max_model_len=options["context"] or min(longest, planned.arch.max_context_tokens),
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        kv_dtype=options["kv_dtype"],
        state_dtype=options["state_dtype"],
        tp=options["tp"],
        prefix_caching=options["prefix_caching"],
    )
    hardware = _hardware(options["gpu"], settings.engine, planned.arch)
    calibration = None
    if hardware["gpu"] is not None:
        from hullspeed.perf.calibration import load_calibration

        calibration = load_calibration(
            planned.name, hardware["gpu"].name, settings.tp, settings.engine
        )
    question = Question(
        label="as asked",
        calibration=calibration,
        cost_model=options["cost"],
        model=planned.name,
        arch=planned.arch,
        weights=planned.weights
        if hardware["gpu"]
        else planned.embedded(hardware["weight_dtype"]).weights,
        settings=settings,
        cache=options["cache"],
        eviction=options["eviction"],
        requests_per_task=options["requests_per_task"],
        task_success=options["task_success"],
        **hardware,
    )
    return priced(question, options["price"])


def _hardware(gpu: str | None, engine: str, arch: ModelArch) -> dict[str, Any]:
    from hullspeed.plan.capacity import memory_of, memory_of_machine

    if (gpu is None) != (engine == "hullspeed"):
        raise UsageError(
            "vllm, sglang and trtllm run on a GPU, the embedded engine on this machine",
            seen=f"--engine {engine}" + (f" --gpu {gpu}" if gpu else ""),
            fix="name a GPU, such as --gpu h100-sxm, or leave out both",
        )
    if gpu is not None:
        from hullspeed.hardware.catalogue import find_gpu

        found = find_gpu(gpu)
        return {"gpu": found, "memory": memory_of(found)}
    from hullspeed.hardware.ceilings import load_ceilings, quick_ceilings
    from hullspeed.hardware.machine import detect_machine
    from hullspeed.memory.held import held_dtype

    machine = detect_machine()
    dtype = held_dtype(arch, "native", machine.isa)
    ceilings = load_ceilings(machine)
    if ceilings is None or dtype not in ceilings.linear_flops_per_s:
        sys.stderr.write("no calibration of this machine: a quick measurement stands in\n")
        ceilings = quick_ceilings(machine, 0.4)
    memory = memory_of_machine(machine)
    own_core = ceilings.threads < machine.cores
    return {
        "gpu": None, "memory": memory, "ceilings": ceilings, "weight_dtype": dtype,
        "own_core": own_core,
    }  # fmt: skip


def _one(
    question: Question, workload: Workload, objective: Objective, search: bool, title: str
) -> tuple[dict[str, Any], Report]:
    from hullspeed.report.simulated import simulation_report
    from hullspeed.twin.certainty import certainty
    from hullspeed.twin.profiles import profile
    from hullspeed.twin.question import capacity

    cost = question.cost()
    played = question.play(workload, cost)
    summary = question.sum_up(played, objective)
    found = capacity(question, workload, objective) if search else None
    sure = certainty(question, cost, workload, summary)
    findings = question.findings()
    notes = (
        f"cost of a step, {cost.model}: {cost.source}",
        f"{question.settings.engine}: {profile(question.settings.engine).source}",
    )
    report = simulation_report(
        title, summary, played.timeline, played.n_pages, found, objective, sure, findings, notes
    )
    timeline = [
        {"at_s": float(f"{m.at_s:.6g}"), "running": m.running, "waiting": m.waiting,
         "pages_in_use": m.pages_in_use, "pages_cached": m.pages_cached,
         "states_share": m.states_share}
        for m in played.timeline
    ]  # fmt: skip
    data = {"cost_model": cost.model, "cost_source": cost.source, "findings": findings,
            "summary": summary, "certainty": sure, "capacity": found, "n_pages": played.n_pages,
            "timeline": timeline}  # fmt: skip
    return data, report


def _compare_cache(
    question: Question,
    workload: Workload,
    budgets: list[int],
    names: tuple[str, ...],
    max_running: int | None,
    title: str,
) -> tuple[dict[str, Any], Report]:
    from hullspeed.report.simulated import cache_report
    from hullspeed.twin.cache_rows import by_name, cache_row
    from hullspeed.units import GIB

    cost = question.cost()
    rows = []
    for chosen in by_name(question.arch, names):
        for budget in budgets:
            row = cache_row(
                question.arch,
                cost.steps,
                workload,
                chosen,
                budget / GIB,
                max_running=max_running or 8,
            )
            rows.append(row)
            sys.stderr.write(f"{row.policy} {row.state_dtype} {row.budget_gib:g} GiB\n")
    data = {"cost_model": cost.model, "cost_source": cost.source, "cache": rows}
    return data, cache_report(title, rows)


def _show(data: dict[str, Any], report: Report, *, html: Path | None, json: bool) -> None:
    if html is not None:
        write_page(html, report)
        sys.stderr.write(f"wrote {html}\n")
    if json:
        import msgspec

        text = msgspec.json.format(msgspec.json.encode(data), indent=2).decode()
        sys.stdout.write(text + "\n")
        return
    from rich.console import Console

    from hullspeed.report.terminal import render

    render(report, Console(highlight=False))
