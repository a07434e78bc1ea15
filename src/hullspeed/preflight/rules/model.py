"""The model's files, and its formats against the GPU."""

from __future__ import annotations

from collections.abc import Iterator

from hullspeed.findings import Finding
from hullspeed.preflight import tables
from hullspeed.preflight.case import Case, below
from hullspeed.preflight.codes import found


def files(case: Case) -> Iterator[Finding]:
    """PF018 to PF021 and PF027: not here, cut short, unknown, incomplete."""
    model, name = case.stack.model, case.ask.model
    if model.missing_files:
        missing = model.missing_files
        yield found("PF021", count=len(missing), first=missing[0], model=name)
    elif model.error:
        yield found("PF019", path=model.path or name, error=model.error, model=name)
    elif not model.found:
        offline = case.stack.system.offline and not name.startswith("pypi:")
        yield found("PF027" if offline else "PF018", model=name)
    elif model.unsupported:
        alternative = "a model of a supported family (hullspeed plan lists them)"
        yield found("PF020", reason=model.unsupported, alternative=alternative, **case.named)


def weight_format(case: Case) -> Iterator[Finding]:
    """PF046 and PF047: a format below its minimum, or through a fallback."""
    quant = case.stack.model.quant
    row = tables.formats(case.ask.engine).get(quant)
    if row is None:
        return
    for gpu in case.used_gpus:
        seen = gpu.compute_capability
        if below(seen, row.min):
            others = [
                name
                for name, other in tables.formats(case.ask.engine).items()
                if not below(seen, other.min)
            ]
            yield found(
                "PF046", quant=quant, needs=row.min, gpu=gpu.name, seen=seen,
                alternative=", ".join(others) or "16 bit", **case.named,
            )  # fmt: skip
            return
        if below(seen, row.native):
            yield found(
                "PF047", quant=quant, gpu=gpu.name, seen=seen,
                fallback=row.fallback or "a 16-bit fallback", native=row.native,
            )  # fmt: skip
            return


def kv_format(case: Case) -> Iterator[Finding]:
    """PF065: a KV type that the GPU's generation lacks on this engine."""
    needs = tables.kv_formats(case.ask.engine).get(case.ask.kv_dtype)
    for gpu in case.used_gpus:
        if needs and below(gpu.compute_capability, needs):
            yield found(
                "PF065", kv_dtype=case.ask.kv_dtype, gpu=gpu.name, seen=gpu.compute_capability,
                needs=needs, **case.named,
            )  # fmt: skip
            return


def context(case: Case) -> Iterator[Finding]:
    """PF064: more context than the model was made for."""
    asked, limit = case.ask.context_tokens, case.stack.model.max_context_tokens
    if asked and limit and asked > limit:
        yield found("PF064", context=asked, limit=limit)


RULES = (files, weight_format, kv_format, context)
