"""Question: one configuration to simulate; its answer and its limits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.findings import Finding, Severity
from hullspeed.hardware.ceilings import Ceilings
from hullspeed.hardware.gpu import Gpu
from hullspeed.memory.allocators import of_default_seqs, plan_memory
from hullspeed.memory.budget import EngineSettings, GpuMemory, WeightBytes
from hullspeed.memory.layers import kv_dtype_of, state_dtype_of
from hullspeed.perf.calibration import Calibration
from hullspeed.perf.fitted import FittedCost, coefficients_of, engine_of
from hullspeed.perf.measured_tables import CostModel, TableCost, table_cost
from hullspeed.perf.speculative import MTP_ACCEPT, SpeculativeCost
from hullspeed.perf.step import StepCost
from hullspeed.perf.work import StepSeconds
from hullspeed.twin.engine import EngineModel
from hullspeed.twin.played import Played
from hullspeed.twin.player import play
from hullspeed.twin.setup import Host, engine_model
from hullspeed.twin.summary import Objective, Summary, summarize
from hullspeed.twin.workload import Workload


class Cost(NamedTuple):
    """What steps and requests cost.

    Attributes:
        request_s, prompt_token_s: From a request's bytes to its arrival at the scheduler, and what
            each prompt token adds to it.
        stream_token_s: Added to a step for each token it puts out.
        history: What the numbers rest on, with their errors.
        model: Which cost model this is: ``fitted``, ``tables`` or ``measured here``.
        tables: The measured tables, where they are it.
    """

    steps: StepSeconds
    request_s: float
    stream_token_s: float
    history: str
    prompt_token_s: float = 0.0
    model: str = "fitted"
    tables: TableCost | None = None

    @property
    def source(self) -> str:
        """What the numbers rest on; of tables also how many steps the guard answered so far."""
        if self.tables is None:
            return self.history
        return f"{self.tables.source}; requests and the guard: {self.history}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model on GPUs under an engine's settings.

    Attributes:
        label: What distinguishes it from its neighbours in a table.
        gpu: ``None`` for the embedded engine on this machine, whose ``ceilings`` then say how fast
            it is.
        own_core: Of that machine, a core that the engine leaves to the API process.
        cache: Another prefix cache than the engine's own.
        usd_per_hour: Of all GPUs.
        cost_model: Which cost of a step on a GPU is asked.
        model: Name of the model, for errors.
        changes: Axes of a sweep with their values here.
    """

    label: str
    arch: ModelArch
    weights: WeightBytes
    gpu: Gpu | None
    memory: GpuMemory
    settings: EngineSettings
    cache: str | None = None
    eviction: str = "lru"
    ceilings: Ceilings | None = None
    own_core: bool = False
    weight_dtype: str = "fp16"
    usd_per_hour: float | None = None
    requests_per_task: int = 1
    task_success: float = 1.0
    calibration: Calibration | None = None
    cost_model: CostModel = "fitted"
    model: str = ""
    changes: tuple[tuple[str, str], ...] = ()

    def target(self) -> str:
        """The hardware in words."""
        if self.gpu is None:
            return "this machine"
        return f"{self.settings.tp} x {self.gpu.name}" if self.settings.tp > 1 else self.gpu.name

    def cost(self) -> Cost:
        """The cost model of its steps.

        Raises:
            UsageError: if nothing is known of the hardware's speed, or the measured tables are
                asked for and do not hold this case.
            BrokenStackError: if they are asked for and not installed.
        """
        if self.ceilings is not None:
            over = self.ceilings.overheads
            step = StepCost(
                self.arch, self.ceilings, self.weight_dtype, self.settings.kv_dtype or "fp32"
            )
            how = f"this machine's kernels, {self.ceilings.source} {self.ceilings.measured_at}"
            return Cost(
                step, over.request_s, over.stream_token_s, how.strip(), over.prompt_token_s,
                model="measured here",
            )  # fmt: skip
        if self.gpu is None:
            raise UsageError("name a GPU", fix="e.g. --gpu h100-sxm")
        coefficients = coefficients_of(self.settings.engine)
        if self.calibration is not None:
            coefficients = self.calibration.apply(coefficients)
        fitted = FittedCost(
            self.arch,
            self.gpu,
            engine=self.settings.engine,
            weight_bytes=self.weights.decoder,
            kv_dtype=kv_dtype_of(self.arch, self.settings.kv_dtype),
            state_dtype=state_dtype_of(self.arch, self.settings.state_dtype),
            tp=self.settings.tp,
            eager=self.settings.enforce_eager,
            coefficients=coefficients,
        )
        tables = self._tables(fitted)
        steps: StepSeconds = tables or fitted
        if drafts := self.settings.draft_tokens:
            steps = SpeculativeCost(tables or fitted, drafts, min(MTP_ACCEPT, 1 + 0.75 * drafts))
        known = engine_of(self.settings.engine, self.gpu)
        request_s = known.request_s + coefficients.first_token_s
        return Cost(
            steps, request_s, 0.0, coefficients.origin, model=self.cost_model, tables=tables
        )

    def _tables(self, guard: FittedCost) -> TableCost | None:
        """The measured tables, where they are asked for."""
        if self.cost_model != "tables" or self.gpu is None:
            return None
        kv_dtype = kv_dtype_of(self.arch, self.settings.kv_dtype)
        return table_cost(
            self.arch, self.gpu.name, self.settings.tp, self.settings.engine, guard, kv_dtype,
            model=self.model,
        )  # fmt: skip

    def findings(self) -> tuple[Finding, ...]:
        """What the engine would meet when it starts with these settings, which the simulation
        passes over: its start-up checks. A max_num_seqs that was not given is a warning.
        """
        plan = plan_memory(self.arch, self.memory, self.settings, self.weights)
        found = (*plan.stack.findings, *plan.pool.findings)
        if self.settings.max_num_seqs is not None:
            return found
        return tuple(of_default_seqs(f) if f.severity is Severity.ERROR else f for f in found)

    def engine(self, workload: Workload, cost: Cost) -> EngineModel:
        """The engine with its memory."""
        return engine_model(
            self.arch,
            self.memory,
            self.settings,
            self.weights,
            typical_tokens=_typical(workload),
            cache=self.cache,
            eviction=self.eviction,
            host=self._host(workload, cost),
        )

    def _host(self, workload: Workload, cost: Cost) -> Host:
        """What passes beside the steps; of the embedded engine as ``up`` takes it."""
        prompt_tokens = _mean_prompt(workload)
        request_s = cost.request_s + cost.prompt_token_s * prompt_tokens
        if self.ceilings is None:
            return Host(request_s, stream_token_s=cost.stream_token_s)
        work_s = self.ceilings.overheads.work_seconds(round(prompt_tokens))
        host = Host(request_s, work_s, self.own_core, cost.stream_token_s)
        others = self.ceilings.interruptions
        return host if others is None else host._replace(interruptions=others)

    def play(self, workload: Workload, cost: Cost | None = None) -> Played:
        """Simulate ``workload`` at ``cost``, the question's own unless given.

        Raises:
            CapacityError: if the engine would not start.
        """
        cost = cost or self.cost()
        return play(self.engine(workload, cost), cost.steps, workload)

    def answer(self, workload: Workload, objective: Objective) -> Summary:
        """Simulate and sum up."""
        return self.sum_up(self.play(workload), objective)

    def sum_up(self, played: Played, objective: Objective) -> Summary:
        """With the question's prices."""
        return summarize(
            played,
            objective,
            usd_per_hour=self.usd_per_hour,
            requests_per_task=self.requests_per_task,
            task_success=self.task_success,
        )


def _typical(workload: Workload) -> int:
    """Mean length of a sequence at its end."""
    total = sum(t.isl_tokens + t.osl_tokens for s in workload.sessions for t in s.turns)
    return max(1, round(total / max(1, workload.n_requests)))


def _mean_prompt(workload: Workload) -> float:
    """Mean prompt tokens of a request."""
    total = sum(t.isl_tokens for s in workload.sessions for t in s.turns)
    return total / max(1, workload.n_requests)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The most load that keeps the objective.

    Attributes:
        factor: On the arrival rate of the workload (open loop).
        load: Requests (sessions) per second, or in flight for a closed loop; 0 when even the
            least load misses.
        bounded: Whether more was tried and missed; else the objective held at all that was tried.
    """

    factor: float
    load: float
    unit: str
    bounded: bool
    summary: Summary | None


def capacity(
    question: Question, workload: Workload, objective: Objective, *, tries: int = 12
) -> Capacity:
    """The highest rate of arrivals (closed loop: sessions in flight) at which the share of
    requests that the objective asks for keeps it.

    The same requests are sent faster or slower, so that only the load differs between tries.
    """
    if workload.concurrency:
        return _concurrency(question, workload, objective, tries)
    rate = _rate(workload)
    low, high = 0.0, math.inf
    factor, best = 1.0, None
    for _ in range(tries):
        summary = question.answer(workload.scaled(factor), objective)
        if summary.meets:
            low, best = factor, summary
        else:
            high = factor
        if high - low <= 0.02 * low or factor < 1e-4 or factor > 1e4:
            break
        factor = low * 2 if math.isinf(high) else high / 4 if low == 0 else math.sqrt(low * high)
    factor = float(f"{low:.6g}")
    return Capacity(
        factor=factor,
        load=float(f"{low * rate:.6g}"),
        unit="sessions/s" if workload.n_requests > len(workload.sessions) else "requests/s",
        bounded=not math.isinf(high),
        summary=best,
    )


def _concurrency(
    question: Question, workload: Workload, objective: Objective, tries: int
) -> Capacity:
    low, high, best = 0, len(workload.sessions) + 1, None
    n, bounded = min(max(1, workload.concurrency), high - 1), False
    for _ in range(tries):
        tried = msgspec.structs.replace(workload, concurrency=n)
        summary = question.answer(tried, objective)
        if summary.meets:
            low, best = n, summary
        else:
            high, bounded = n, True
        if high - low <= 1:
            break
        n = min(low * 2, high - 1) if not bounded else (low + high) // 2
    return Capacity(
        factor=low / max(1, workload.concurrency),
        load=float(low),
        unit="in flight",
        bounded=bounded,
        summary=best,
    )


def _rate(workload: Workload) -> float:
    last = max(session.at_s for session in workload.sessions)
    return len(workload.sessions) / last if last else 0.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A question's label with its summary, or why there is none.

    Attributes:
        changes: Axes of a sweep with their values here.
        cost_source: What the cost of its steps rests on.
    """

    label: str
    changes: dict[str, str] = {}
    summary: Summary | None = None
    error: str = ""
    cost_source: str = ""


def pareto(outcomes: Iterable[Outcome]) -> set[str]:
    """Labels that no other outcome beats in cost, TTFT p99 and TPOT p50 all together."""
    points = [(o.label, _axes(o.summary)) for o in outcomes if o.summary and o.summary.requests]
    return {
        label
        for label, mine in points
        if not any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
            for _, other in points
        )
    }


def _axes(summary: Summary) -> tuple[float, float, float]:
    """Less is better: dollars per million output tokens (seconds per token without a price)."""
    price = summary.usd_per_m_output
    if price is None:
        price = 1 / summary.output_tokens_per_s if summary.output_tokens_per_s else math.inf
    return price, summary.ttft_s.get("p99", math.inf), summary.tpot_s.get("p50", 0.0)


def with_settings(question: Question, label: str, **changes: object) -> Question:
    """The same question with other engine settings."""
    settings = replace(question.settings, **changes)  # type: ignore[arg-type]
    return replace(question, label=label, settings=settings)
