"""``hullspeed simulate``: what traffic would see, before there is a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

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
    sweep: Annotated[tuple[str, ...], Many] = (),
    what_if: Annotated[bool, Flag] = False,
    compare_cache: Annotated[bool, Flag] = False,
    cache_budget: Annotated[tuple[str, ...], Many] = ("8GiB", "24GiB"),
    policy: Annotated[tuple[str, ...], Many] = (),
    workers: int | None = None,
    ray: str | None = None,
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
    save_trace
        Write the workload in hullspeed's own format.
    html
        Write the report as one self-contained page.
    json
        Print JSON.
    """
    options = dict(locals())
    if cost == "tables":
        _check_tables(gpu)
    from hullspeed.units import parse_bytes, parse_seconds

    workload = _workload(options, parse_seconds(ramp), parse_seconds(think))
    objective = _objective(slo_ttft, slo_tpot, attainment)
    if save_trace is not None:
        from hullspeed.twin.traces import write_trace

        write_trace(workload, save_trace)
        sys.stderr.write(f"wrote {save_trace}\n")
    question = _question(options, workload)
    title = (
        f"Simulated: {model} on {question.target()}, {question.settings.engine}; {workload.name}"
    )
    if compare_cache:
        budgets = [parse_bytes(text) for text in cache_budget]
        data, report = _compare_cache(question, workload, budgets, policy, max_num_seqs, title)
    elif sweep or what_if:
        data, report = _many(question, workload, objective, options, title)
    else:
        data, report = _one(question, workload, objective, capacity, title)
    settings = {"model": model, "workload": workload.name, "requests": workload.n_requests,
                "seed": seed, "objective": objective}  # fmt: skip
    _show(settings | data, report, html=html, json=json)
    return 0 if report.ok else 1


def _check_tables(gpu: str | None) -> None:
    from hullspeed.perf.measured_tables import require_tables

    if gpu is None:
        raise UsageError(
            "the measured tables are of GPUs", seen="--cost tables", fix="name one: --gpu h100-sxm"
        )
    require_tables()


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


def _workload(options: dict[str, Any], ramp_s: float, think_s: float) -> Workload:
    concurrency, rate = options["concurrency"], options["rate"]
    if concurrency is not None and rate is not None:
        raise UsageError(
            "a load is closed (--concurrency) or open (--rate), not both", seen=(concurrency, rate)
        )
    if concurrency is not None and concurrency < 1:
        raise UsageError("--concurrency must be at least 1", seen=concurrency)
    if options["trace"] is not None:
        return _traced(options)
    if options["agents"]:
        return _agents(options, think_s)
    from hullspeed.twin.generate import closed_loop, open_loop
    from hullspeed.twin.lengths import Lengths

    def lengths(tokens: int, sigma: float) -> Lengths:
        if sigma:
            return Lengths(tokens=tokens, kind="lognormal", sigma=sigma, most=32 * tokens)
        ratio = options["range_ratio"]
        return Lengths(tokens=tokens, kind="fixed" if ratio == 1 else "uniform", range_ratio=ratio)

    isl = lengths(options["isl"], options["isl_sigma"])
    osl = lengths(options["osl"], options["osl_sigma"])
    requests = 500 if options["requests"] is None else options["requests"]
    common = {"requests": requests, "shared_tokens": options["shared_prefix"],
              "n_shared": options["prefixes"], "seed": options["seed"]}  # fmt: skip
    if options["prefixes"] < 1:
        raise UsageError("--prefixes must be at least 1", seen=options["prefixes"])
    if rate is None:
        warm_up = options["warmup"]
        return closed_loop(isl, osl, concurrency=concurrency or 8, warm_up=warm_up, **common)
    from hullspeed.twin.arrivals import Arrivals

    arrivals = Arrivals(
        rate=rate,
        kind=options["arrival"],
        cv=options["burst"],
        end_rate=options["end_rate"],
        over_s=ramp_s,
    )
    return open_loop(isl, osl, arrivals, **common)


def _agents(options: dict[str, Any], think_s: float) -> Workload:
    from hullspeed.twin.agents import AgentLoad, agent_sessions

    rate, sessions = options["rate"], options["agents"]
    if rate is not None and not rate > 0:
        raise UsageError("--rate must be above 0", seen=rate)
    over_s = sessions / rate if rate else AgentLoad().over_s
    load = AgentLoad(
        sessions=sessions,
        think_s=think_s,
        over_s=over_s,
        strip_thinking=options["thinking"],
        seed=options["seed"],
    )
    return _closed(agent_sessions(load), options["concurrency"])


def _traced(options: dict[str, Any]) -> Workload:
    import random
    from itertools import islice

    import msgspec

    from hullspeed.twin.arrivals import Arrivals
    from hullspeed.twin.traces import first, load_trace, thinned

    workload = load_trace(options["trace"], options["format"])
    requests = options["requests"]
    if requests is not None:
        if requests < 1:
            raise UsageError("--requests must be at least 1", seen=requests)
        sample = options["thin"]
        workload = (
            thinned(workload, requests, options["seed"]) if sample else first(workload, requests)
        )
    if options["rate"] is None:
        return _closed(workload, options["concurrency"])
    arrivals = Arrivals(rate=options["rate"], kind=options["arrival"], cv=options["burst"])
    times = islice(arrivals.times(random.Random(options["seed"])), len(workload.sessions))  # noqa: S311
    sessions = tuple(
        msgspec.structs.replace(session, at_s=at_s)
        for session, at_s in zip(workload.sessions, times, strict=True)
    )
    return msgspec.structs.replace(workload, sessions=sessions, concurrency=0)


def _closed(workload: Workload, concurrency: int | None) -> Workload:
    import msgspec

    if concurrency is None:
        return workload
    return msgspec.structs.replace(workload, concurrency=min(concurrency, len(workload.sessions)))


def _question(options: dict[str, Any], workload: Workload) -> Question:
    from hullspeed.memory.budget import EngineSettings
    from hullspeed.plan.source import load_model
    from hullspeed.twin.question import Question
    from hullspeed.twin.sweep import priced

    if options["requests_per_task"] < 1 or not 0 < options["task_success"] <= 1:
        raise UsageError(
            "a task has at least one request, and succeeds a share of the time above 0",
            seen=(options["requests_per_task"], options["task_success"]),
        )
    planned = load_model(options["model"])
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
    return {"gpu": None, "memory": memory, "ceilings": ceilings, "weight_dtype": dtype}


def _one(
    question: Question, workload: Workload, objective: Objective, search: bool, title: str
) -> tuple[dict[str, Any], Report]:
    from hullspeed.report.simulated import simulation_report
    from hullspeed.twin.profiles import profile
    from hullspeed.twin.question import capacity

    cost = question.cost()
    played = question.play(workload, cost)
    summary = question.sum_up(played, objective)
    found = capacity(question, workload, objective) if search else None
    notes = (
        f"cost of a step, {cost.model}: {cost.source}",
        f"{question.settings.engine}: {profile(question.settings.engine).source}",
    )
    report = simulation_report(title, summary, played.timeline, played.n_pages, found, notes)
    timeline = [
        {"at_s": float(f"{m.at_s:.6g}"), "running": m.running, "waiting": m.waiting,
         "pages_in_use": m.pages_in_use, "pages_cached": m.pages_cached}
        for m in played.timeline
    ]  # fmt: skip
    data = {"cost_model": cost.model, "cost_source": cost.source, "summary": summary,
            "capacity": found, "n_pages": played.n_pages, "timeline": timeline}  # fmt: skip
    return data, report


def _many(
    question: Question,
    workload: Workload,
    objective: Objective,
    options: dict[str, Any],
    title: str,
) -> tuple[dict[str, Any], Report]:
    from hullspeed.plan.capacity import memory_of
    from hullspeed.report.simulated import sweep_report
    from hullspeed.twin.fanout import answers
    from hullspeed.twin.question import pareto
    from hullspeed.twin.sweep import expand, parse_axes, what_if

    price = options["price"]
    if options["what_if"]:
        questions = what_if(question, memory_of, price)
    else:
        questions = expand(question, parse_axes(options["sweep"]), memory_of, price)

    def progress(done: int) -> None:
        if done % 50 == 0 or done == len(questions):
            sys.stderr.write(f"{done} of {len(questions)} configurations\n")

    outcomes = answers(
        questions,
        workload,
        objective,
        workers=options["workers"],
        ray=options["ray"],
        progress=progress,
    )
    front = pareto(outcomes)
    report = sweep_report(title, outcomes, front, ranked=options["what_if"])
    data = {
        "cost_model": question.cost().model,
        "outcomes": outcomes,
        "pareto": [o.label for o in outcomes if o.label in front],
    }
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
        from hullspeed.report.html import page

        html.write_text(page(report), encoding="utf-8")
        sys.stderr.write(f"wrote {html}\n")
    if json:
        import msgspec

        text = msgspec.json.format(msgspec.json.encode(data), indent=2).decode()
        sys.stdout.write(text + "\n")
        return
    from rich.console import Console

    from hullspeed.report.terminal import render

    render(report, Console(highlight=False))
