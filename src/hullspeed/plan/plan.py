"""make_plan: the answer to a case, and the advice that goes with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec

from hullspeed.errors import UsageError
from hullspeed.findings import Finding, Severity
from hullspeed.memory.allocators import allocator
from hullspeed.memory.budget import POOL_TOO_LARGE, MemoryBudget, MemoryStack, PoolPlan, Term
from hullspeed.plan.capacity import Capacity, kv_dtype, make_capacity, state_dtype
from hullspeed.plan.case import Case
from hullspeed.plan.cost import Cost, ManagedPrice, make_cost
from hullspeed.plan.engines import SHARED_SHARE, TIGHT_TPOT_S, Choice, choose
from hullspeed.plan.explain import Derivation, derive, kv_formula, state_formula
from hullspeed.plan.judge import longest_context, of_capacity, of_defaults, rate_too_high
from hullspeed.plan.remedies import Remedy, find_remedies
from hullspeed.plan.speed import Speed
from hullspeed.plan.workload import Workload
from hullspeed.units import format_bytes, format_seconds, format_tokens

_MOST_IN_FLIGHT = 1024
_LEAST_SEQS = 8

Verdict = Literal[
    "fits", "misses objective", "too many requests", "does not fit", "refused by a finding"
]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What will happen, and what to do about it.

    Attributes:
        ok: The workload fits and its objective is met at the prediction.
        summary: The verdict in one sentence, with the context and concurrency it is about.
        limit: What binds.
        kv_bytes_per_token: All ranks together.
        speed: ``None`` when no speeds are known for the target or nothing fits.
        flags: The engine's own settings for this plan.
    """

    model: str
    engine: str
    target: str
    n_gpus: int
    workload: Workload
    verdict: Verdict
    ok: bool
    summary: str
    limit: str
    assumptions: tuple[str, ...]
    findings: tuple[Finding, ...]
    stack: MemoryStack
    capacity: Capacity
    kv_bytes_per_token: int
    kv_formula: str
    state_bytes_per_sequence: int
    state_formula: str
    speed: Speed | None
    remedies: tuple[Remedy, ...]
    cost: Cost | None
    engines: tuple[Choice, ...]
    flags: dict[str, str]
    derivation: tuple[Derivation, ...]


def make_plan(
    case: Case, *, managed: ManagedPrice | None = None, usd_per_hour: float | None = None,
    advice: bool = True,
) -> Plan:  # fmt: skip
    """Plan for ``case``.

    Args:
        case: The question.
        managed: Price of a managed endpoint to compare with.
        usd_per_hour: Of one GPU (or this machine), in place of the catalogue's price.
        advice: Tables, remedies, engine choice and derivations; a sweep over many cases spares
            them.

    Raises:
        UsageError: for settings that contradict each other.
        UnsupportedModelError: if the engine does not run the model.
    """
    asked = case
    case, unreachable = _at_rate(case)
    case = _with_engine_limits(case)
    arch, settings, workload = case.model.arch, case.settings, case.workload
    predictor = case.predictor()
    stack, pool, capacity = make_capacity(
        case.model, case.memory(), settings, workload, tables=advice
    )
    slots = 2 * max(capacity.served, _LEAST_SEQS)
    if asked.settings.max_num_seqs is None and (settings.max_num_seqs or 0) > slots > 0:
        # Slots that can never run take memory from those that could.
        case = case.with_settings(max_num_seqs=slots)
        settings = case.settings
        stack, pool, capacity = make_capacity(
            case.model, case.memory(), settings, workload, tables=advice
        )
    running = min(workload.concurrency, capacity.served)
    growing = workload.rate is not None and (unreachable or running < workload.concurrency)
    in_flight = running if growing else workload.concurrency
    speed = predictor.speed(workload, in_flight, capacity.served) if predictor and running else None
    findings = [*stack.findings, *pool.findings]
    if growing and speed is not None:
        findings.append(rate_too_high(workload, speed, _MOST_IN_FLIGHT if unreachable else None))
    else:
        findings += of_capacity(workload, stack, capacity)
    if advice:
        findings += of_defaults(asked, findings)
    missed = _missed(workload, speed)
    verdict = _verdict(stack, capacity, missed, findings)
    ssm, dtype = state_dtype(arch, settings), kv_dtype(arch, settings)
    state_bytes = arch.state_bytes(ssm, arch.dtype, settings.draft_tokens)
    return Plan(
        model=case.model.name,
        engine=settings.engine,
        target=case.target,
        n_gpus=case.n_gpus,
        workload=workload,
        verdict=verdict,
        ok=verdict == "fits",
        summary=_summary(case, workload, stack, capacity, missed, findings, verdict, speed),
        limit=_limit(stack, capacity, speed, missed),
        assumptions=_assumptions(case, workload, dtype, ssm if state_bytes else ""),
        findings=tuple(findings),
        stack=stack,
        capacity=capacity,
        kv_bytes_per_token=arch.kv_bytes_per_token(dtype),
        kv_formula=kv_formula(arch, dtype) if advice else "",
        state_bytes_per_sequence=state_bytes,
        state_formula=state_formula(arch, ssm, settings.draft_tokens) if advice else "",
        speed=speed,
        remedies=find_remedies(case) if advice else (),
        cost=_cost(case, workload, speed, managed, usd_per_hour),
        engines=choose(_facts(case, workload, verdict)) if advice else (),
        flags=_flags(case, stack, pool, capacity) if advice else {},
        derivation=derive(case, stack, pool, capacity) if advice else (),
    )


def _at_rate(case: Case) -> tuple[Case, bool]:
    """The case with the requests in flight that its rate means, and whether no number of them
    completes so many.
    """
    workload = case.workload
    predictor = None if workload.rate is None else case.predictor()
    if workload.rate is None or predictor is None:
        return case, False
    needed = predictor.concurrency_for(workload, workload.rate, _MOST_IN_FLIGHT)
    found = msgspec.structs.replace(workload, concurrency=needed or _MOST_IN_FLIGHT)
    return replace(case, workload=found), needed is None


def _with_engine_limits(case: Case) -> Case:
    """The workload's context and concurrency as engine settings, where none were given: vLLM left
    at its default max_num_seqs of 1,024 sets memory aside for 1,024 requests.
    """
    settings, workload = case.settings, case.workload
    seqs = settings.max_num_seqs
    if seqs is None and settings.engine == "vllm":
        seqs = max(_LEAST_SEQS, workload.concurrency)
    context = settings.max_model_len or workload.context_tokens
    case = case.with_settings(max_model_len=context, max_num_seqs=seqs)
    if seqs is None and settings.engine == "hullspeed":
        return case.with_settings(max_num_seqs=_starting_seqs(case))
    return case


def _starting_seqs(case: Case) -> int | None:
    """With how many sequences the embedded engine starts, where the recurrent states of its own
    default do not fit.
    """
    engine, arch, memory = allocator("hullspeed"), case.model.arch, case.memory()
    stack = engine.stack(arch, memory, case.settings, case.model.weights)
    pool = engine.pool(arch, memory, case.settings, stack.divided_bytes[0])
    return pool.max_num_seqs or None if pool.findings else None


def _missed(workload: Workload, speed: Speed | None) -> list[str]:
    """Objectives that the prediction misses, as sentences."""
    if speed is None:
        return []
    missed = []
    ttft = (speed.ttft_cached_s or speed.ttft_s).value
    if workload.ttft_s is not None and ttft > workload.ttft_s:
        missed.append(f"TTFT {format_seconds(ttft)} above {format_seconds(workload.ttft_s)}")
    itl = speed.itl_s.value
    if workload.tpot_s is not None and itl > workload.tpot_s:
        missed.append(f"TPOT {format_seconds(itl)} above {format_seconds(workload.tpot_s)}")
    return missed


def _verdict(
    stack: MemoryStack, capacity: Capacity, missed: list[str], findings: list[Finding]
) -> Verdict:
    if stack.pool_bytes == 0 or capacity.longest_served < 1 or _too_large(findings):
        return "does not fit"
    if capacity.served < capacity.needed:
        return "too many requests"
    if _first_error(findings):
        return "refused by a finding"
    return "misses objective" if missed else "fits"


def _too_large(findings: list[Finding]) -> Finding | None:
    return next((f for f in findings if f.code == POOL_TOO_LARGE), None)


def _first_error(findings: list[Finding]) -> Finding | None:
    return next((f for f in findings if f.severity is Severity.ERROR), None)


def _summary(
    case: Case, workload: Workload, stack: MemoryStack, capacity: Capacity, missed: list[str],
    findings: list[Finding], verdict: Verdict, speed: Speed | None,
) -> str:  # fmt: skip
    what = f"{case.model.name} on {case.target} with {case.settings.engine}"
    size = (
        f"{workload.concurrency} requests of {format_tokens(workload.request_tokens)} tokens, "
        f"longest {format_tokens(workload.context_tokens)}"
    )
    if verdict == "fits":
        return f"{what} fits {size}; memory holds {capacity.served} such"
    if verdict == "misses objective":
        return f"{what} fits {size}, but misses its objective: {'; '.join(missed)}"
    if workload.rate is not None and speed and speed.requests_per_s < workload.rate:
        return (
            f"{what} completes {speed.requests_per_s:.3g} requests/s of "
            f"{format_tokens(workload.request_tokens)} tokens, not the {workload.rate:g} asked; "
            f"memory runs {capacity.served} at once"
        )
    if verdict == "refused by a finding" and (error := _first_error(findings)):
        return f"{what} would hold {size}, but: {error.what}"
    if verdict == "too many requests":
        return f"{what} runs {capacity.served} at once, not {size}"
    weights = stack.bytes_of(Term.WEIGHTS)
    if weights > stack.total_bytes:
        return (
            f"{what} does not fit: weights of {format_bytes(weights)} in memory of "
            f"{format_bytes(stack.total_bytes)}"
        )
    if pool := _too_large(findings):
        return f"{what} does not fit: {pool.what}"
    return f"{what} does not fit one request of {size}; {longest_context(capacity)}"


def _limit(stack: MemoryStack, capacity: Capacity, speed: Speed | None, missed: list[str]) -> str:
    if stack.pool_bytes == 0:
        return "memory: weights and runtime leave nothing for sequences"
    if capacity.served < capacity.needed or speed is None:
        return "memory for sequences"
    what = "speed" if missed else "speed, before memory"
    return f"{what}: {speed.bound}"


def _assumptions(case: Case, workload: Workload, kv: str, ssm: str) -> tuple[str, ...]:
    settings = case.settings
    lines = [*workload.assumed, f"KV cache in {kv}"]
    if ssm:
        lines.append(f"recurrent state in {ssm}")
    if settings.version:
        lines.append(f"{settings.engine} {settings.version}")
    elif settings.engine != "hullspeed":
        lines.append(f"{settings.engine}: newest version that was checked (--engine-version)")
    if case.gpu is not None:
        lines.append(
            f"{case.gpu.name}: {case.gpu.memory_gib:.2f} GiB as the driver reports it "
            f"({case.gpu.memory_origin}), nothing else on it"
        )
        if case.gpu.unified:
            lines.append("memory is shared with the system, whose use is not subtracted")
    if workload.shared_prefix:
        lines.append(f"first {workload.shared_prefix:,} input tokens are shared and stay cached")
    if workload.rate is not None:
        lines.append("requests arrive at random (Poisson) at the rate given")
    lines.append("TTFT is a median, ITL a mean; lengths vary by 10 % around the typical ones")
    return tuple(lines)


def _facts(case: Case, workload: Workload, verdict: Verdict) -> frozenset[str]:
    arch = case.model.arch
    facts = {
        "no_gpu": case.gpu is None,
        "gpu": case.gpu is not None,
        "nvidia": case.gpu is not None and case.gpu.vendor == "nvidia",
        "amd": case.gpu is not None and case.gpu.vendor == "amd",
        "hybrid": arch.state_bytes("fp32", "bf16") > 0,
        "moe": any(layer.mlp.kind == "moe" for layer in arch.layers),
        "dense": all(layer.mlp.kind != "moe" for layer in arch.layers),
        "does_not_fit": verdict == "does not fit",
        "shared_prefix": workload.shared_prefix >= SHARED_SHARE * workload.isl,
        "structured": workload.structured,
        "concurrent": workload.concurrency > 1,
        "single": workload.concurrency == 1,
        "tight_latency": workload.tpot_s is not None and workload.tpot_s < TIGHT_TPOT_S,
    }
    return frozenset(name for name, true in facts.items() if true)


def _cost(
    case: Case, workload: Workload, speed: Speed | None, managed: ManagedPrice | None,
    usd_per_hour: float | None,
) -> Cost | None:  # fmt: skip
    if usd_per_hour is not None and usd_per_hour <= 0:
        raise UsageError("--price must be above 0", seen=usd_per_hour)
    price = case.gpu.price if case.gpu else None
    if speed is None or (usd_per_hour is None and price is None):
        return None
    each = usd_per_hour if usd_per_hour is not None else price.usd_per_hour if price else 0.0
    source = (
        "given" if usd_per_hour is not None else f"{price.source}, {price.date}" if price else ""
    )
    return make_cost(
        workload,
        usd_per_hour=each * case.n_gpus,
        price_source=source,
        requests_per_s=speed.requests_per_s,
        managed=managed,
    )


def _flags(case: Case, stack: MemoryStack, pool: PoolPlan, capacity: Capacity) -> dict[str, str]:
    """The engine's knobs for this budget: slots for the workload, never more than start."""
    settings, workload = case.settings, case.workload
    seqs = settings.max_num_seqs or max(workload.concurrency, capacity.served)
    if capacity.max_num_seqs is not None:
        seqs = min(seqs, capacity.max_num_seqs)
    budget = MemoryBudget(
        gpu=case.memory(),
        weights_bytes=stack.bytes_of(Term.WEIGHTS),
        runtime_bytes=stack.bytes_of(Term.RUNTIME),
        pool_bytes=pool.pool_bytes,
        max_model_len=settings.max_model_len or workload.context_tokens,
        max_num_seqs=max(1, seqs),
    )
    if pool.pool_bytes <= 0:
        return {}
    flags = allocator(settings.engine).knobs(budget)
    if settings.engine == "hullspeed" and settings.kv_dtype is not None:
        flags["--kv-dtype"] = settings.kv_dtype
    return flags
