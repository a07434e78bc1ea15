"""Reports of plans: one in full, or several beside each other."""

from __future__ import annotations

from hullspeed.findings import Severity
from hullspeed.plan.cost import Cost
from hullspeed.plan.engines import Choice
from hullspeed.plan.plan import Plan
from hullspeed.plan.speed import Quantity, Speed
from hullspeed.report.blocks import (
    Block,
    Bullets,
    Code,
    Findings,
    MemoryBar,
    Paragraph,
    Report,
    Section,
    Table,
    number,
)
from hullspeed.report.nearest import nearest_table
from hullspeed.units import format_bytes, format_seconds, format_tokens


def plan_report(plan: Plan, *, explain: bool = False) -> Report:
    """Everything that one plan says; ``explain`` adds each number's derivation."""
    sections = [
        Section("Assumptions", (Bullets(plan.assumptions),)),
        Section("Memory of each GPU" if plan.n_gpus > 1 else "Memory", _memory(plan)),
        Section("Capacity", _capacity(plan)),
    ]
    shown = tuple(f for f in plan.findings if f.severity is not Severity.INFO)
    if shown:
        sections.insert(0, Section("Findings", (Findings(shown),)))
    if plan.speed is not None:
        sections.append(Section("Speed", _speed(plan, plan.speed)))
    if plan.remedies:
        sections.append(Section("What would help", (_remedies(plan),)))
    if plan.cost is not None:
        sections.append(Section("Cost", _cost(plan.cost)))
    if plan.engines:
        sections.append(Section("Engine", _engines(plan.engines)))
    if plan.flags:
        sections.append(Section("Flags", (Code(command_of(plan)),)))
    if explain:
        sections.append(Section("Derivation", (_derivation(plan),)))
    return Report(title="Plan", verdict=plan.summary, ok=plan.ok, sections=tuple(sections))


def comparison_report(plans: tuple[Plan, ...]) -> Report:
    """Several targets for one workload, a row each, in the order given."""
    rows = []
    for plan in plans:
        speed, cost = plan.speed, plan.cost
        rows.append(
            (
                plan.target,
                plan.verdict,
                format_bytes(plan.capacity.pool_bytes),
                str(plan.capacity.served),
                format_tokens(plan.capacity.by_concurrency[0].max_context_tokens)
                if plan.capacity.by_concurrency
                else "-",
                format_seconds(speed.ttft_s.value) if speed else "-",
                format_seconds(speed.itl_s.value) if speed else "-",
                number(speed.output_tokens_per_s.value) if speed else "-",
                f"${cost.usd_per_hour:.2f}" if cost else "-",
                f"${cost.curve[-1].usd_per_m_output:.2f}" if cost else "-",
            )
        )
    header = (
        "target", "verdict", "pool", "requests at once", "longest context", "TTFT", "ITL",
        "output tok/s", "$/hour", "$/M output",
    )  # fmt: skip
    first = plans[0]
    table = Table(header=header, rows=tuple(rows), text_columns=2)
    note = Paragraph(
        f"Requests of {format_tokens(first.workload.request_tokens)} tokens, "
        f"{first.workload.concurrency} in flight. Speeds: {_source(plans)}. $/M output at full use."
    )
    good = [plan.target for plan in plans if plan.ok]
    verdict = f"fits: {', '.join(good)}" if good else "fits none of these"
    return Report(
        title=f"{first.model} with {first.engine}",
        verdict=verdict,
        ok=bool(good),
        sections=(Section("Targets", (table, note)),),
    )


def _granularity(tokens: int) -> str:
    if tokens == 1:
        return "prefix-cache hits at any token"
    return f"prefix-cache hits in multiples of {tokens:,} tokens"


def command_of(plan: Plan) -> str:
    """The engine's flags of the plan, one to a line, below its command."""
    start = {
        "vllm": f"vllm serve {plan.model}",
        "sglang": f"sglang serve --model-path {plan.model}",
        "trtllm": f"trtllm-serve {plan.model}",
        "transformers": f"transformers serve {plan.model}",
        "hullspeed": f"hullspeed serve {plan.model}",
    }[plan.engine]
    flags = [f"{name} {value}".strip() for name, value in plan.flags.items()]
    if plan.n_gpus > 1 and plan.engine in ("vllm", "sglang"):
        flags.append({"vllm": "--tensor-parallel-size", "sglang": "--tp"}[plan.engine]
                     + f" {plan.n_gpus}")  # fmt: skip
    return " \\\n  ".join([start, *flags])


def _source(plans: tuple[Plan, ...]) -> str:
    return next((plan.speed.source for plan in plans if plan.speed), "none known")


def _memory(plan: Plan) -> tuple[Block, ...]:
    lines = [
        f"KV of one token: {format_bytes(plan.kv_bytes_per_token)} = {plan.kv_formula}",
    ]
    if plan.state_bytes_per_sequence:
        lines.append(
            f"State of one sequence: {format_bytes(plan.state_bytes_per_sequence)} = "
            f"{plan.state_formula}"
        )
    return (MemoryBar(plan.stack), Bullets(tuple(lines)))


def _capacity(plan: Plan) -> tuple[Block, ...]:
    capacity = plan.capacity
    by_context = Table(
        header=("context", "pool / KV alone", "engine's figure", "really at once"),
        rows=tuple(
            (
                format_tokens(row.context_tokens),
                f"{row.divided:.1f}",
                f"{row.engine:.2f}",
                str(row.served),
            )
            for row in capacity.by_context
        ),
        caption="Requests at once, by length",
    )
    by_concurrency = Table(
        header=("requests at once", "longest context"),
        rows=tuple(
            (str(row.concurrency), format_tokens(row.max_context_tokens))
            for row in capacity.by_concurrency
        ),
    )
    facts = [
        f"pool {format_bytes(capacity.pool_bytes)} "
        f"({format_bytes(capacity.pool_low_bytes)} to {format_bytes(capacity.pool_high_bytes)}): "
        f"{capacity.blocks:,} blocks of {capacity.block_tokens:,} tokens; the engine's log would "
        f"say {format_tokens(capacity.printed_tokens)} tokens, {capacity.printed_concurrency:.2f}x",
        _granularity(capacity.hit_granularity_tokens),
        f"what binds: {plan.limit}",
    ]
    if capacity.max_num_seqs is not None:
        facts.append(f"max_num_seqs up to {capacity.max_num_seqs:,} starts")
    return (
        by_context,
        by_concurrency,
        Bullets((*facts, *capacity.notes)),
    )


def _speed(plan: Plan, speed: Speed) -> tuple[Block, ...]:
    rows = tuple(_quantity(q) for q in speed.quantities())
    table = Table(header=("", "predicted", "90 % interval"), rows=rows)
    text = f"{_load(plan, speed)}. Cost of a step, {speed.cost_model}: {speed.source}."
    blocks: list[Block] = [table, Paragraph(text), Bullets(tuple(_limits(speed)))]
    if speed.nearest:
        blocks.append(nearest_table(speed.nearest))
    return tuple(blocks)


def _load(plan: Plan, speed: Speed) -> str:
    """Which load the figures are of, in words."""
    rate = plan.workload.rate
    if rate is not None and speed.requests_per_s < rate:
        return (
            f"With {speed.running:,} requests in flight, as many as run at once: at {rate:g} "
            "requests/s the queue, and with it TTFT, grows for as long as they come"
        )
    if rate is not None:
        return f"At {rate:g} requests/s, {speed.concurrency:,} of them in flight on average"
    load = f"With {speed.concurrency:,} requests in flight"
    if speed.running < speed.concurrency:
        return f"{load}, {speed.running:,} of them at once: the others wait for whole answers"
    return (
        f"{load}. TTFT is {format_seconds(speed.ttft_settled_s)} when requests are out of step and "
        f"{format_seconds(speed.ttft_burst_s)} when all arrive together"
    )


def _limits(speed: Speed) -> list[str]:
    """How far each limit is, in words."""
    lines = [f"what binds a decode step: {speed.bound}"]
    lines += [f"{limit.name}: {limit.used:.0%} of {limit.what} used" for limit in speed.limits]
    if speed.decode_bound_tokens_per_s:
        lines.append(
            f"one request alone can never exceed {number(speed.decode_bound_tokens_per_s)} tok/s "
            "without speculation: bandwidth over the bytes that a token reads"
        )
    if speed.goodput_per_s is not None:
        lines.append(
            f"goodput: {speed.goodput_per_s:.2f} of {speed.requests_per_s:.2f} requests a second "
            "meet the objective"
        )
    return lines


def _quantity(q: Quantity) -> tuple[str, str, str]:
    def show(value: float) -> str:
        return format_seconds(value) if q.unit == "s" else f"{number(value)} {q.unit}"

    return (q.name, show(q.value), f"{show(q.low)} to {show(q.high)}")


def _remedies(plan: Plan) -> Table:
    return Table(
        header=("change", "flag", "at the price of", "at once", "longest", "output tok/s"),
        rows=tuple(
            (
                r.change,
                r.flags,
                r.tradeoff,
                f"{r.served_before} -> {r.served_after}",
                f"{format_tokens(r.longest_before)} -> {format_tokens(r.longest_after)}",
                f"{number(r.output_before)} -> {number(r.output_after)}",
            )
            for r in plan.remedies
        ),
        text_columns=3,
    )


def _cost(cost: Cost) -> tuple[Block, ...]:
    table = Table(
        header=("busy", "$ per M output", "$ per M tokens", "$ per useful task"),
        rows=tuple(
            (
                f"{row.utilization:.0%}",
                f"{row.usd_per_m_output:.2f}",
                f"{row.usd_per_m_total:.3f}",
                f"{row.usd_per_task:.5f}",
            )
            for row in cost.curve
        ),
        text_columns=0,
    )
    lines = [f"${cost.usd_per_hour:.2f} an hour ({cost.price_source})."]
    if cost.managed is not None and cost.break_even_utilization is not None:
        managed = cost.managed
        lines.append(
            f"Managed endpoint: ${managed.usd_per_m_input:g} in, ${managed.usd_per_m_output:g} out "
            f"per M tokens ({managed.source}, {managed.date}): ${cost.managed_usd_per_task:.5f} a "
            "useful task."
        )
        if cost.break_even_utilization > 1:
            lines.append("Cheaper at any load here: own GPUs never break even.")
        else:
            lines.append(
                f"Own GPUs break even at {cost.break_even_utilization:.1%} busy, "
                f"{cost.break_even_requests_per_day:,.0f} requests a day."
            )
    return (table, Paragraph(" ".join(lines)))


def _engines(choices: tuple[Choice, ...]) -> tuple[Block, ...]:
    rows = []
    for choice in choices:
        state = f"{choice.points} points" if choice.possible else "ruled out"
        for i, reason in enumerate(choice.reasons):
            rows.append((choice.engine if i == 0 else "", state if i == 0 else "", reason.why,
                         reason.changes))  # fmt: skip
        if not choice.reasons:
            rows.append((choice.engine, state, "nothing here speaks for or against it", ""))
    table = Table(
        header=("engine", "", "because", "would change with"), rows=tuple(rows), text_columns=4
    )
    text = (
        "A table of reasons, not a benchmark: check that the engine's version supports the model, "
        "verify answers, then bench pinned versions on your hardware."
    )
    return (table, Paragraph(text))


def _derivation(plan: Plan) -> Table:
    return Table(
        header=("number", "value", "formula", "source"),
        rows=tuple((d.name, d.value, d.formula, d.source) for d in plan.derivation),
        text_columns=4,
    )
