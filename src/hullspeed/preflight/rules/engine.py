"""The engine: installed, with its pins, able to run this architecture."""

from __future__ import annotations

from collections.abc import Iterator

from hullspeed.findings import Finding
from hullspeed.preflight import tables
from hullspeed.preflight.case import Case, below
from hullspeed.preflight.codes import found

# Prefix caching is on by default for hybrid models from this version. Source: vllm PR 50991.
_VLLM_HYBRID_CACHING_SINCE = "0.28.0"


def installed(case: Case) -> Iterator[Finding]:
    """PF042: the engine is not in its interpreter."""
    if case.engine_version is None:
        engine = case.engine
        package = engine.package if case.ask.on_gpu else engine.cpu_package or engine.package
        executable = case.stack.python.executable
        yield found("PF042", package=package, executable=executable, **case.named)


def known(case: Case) -> Iterator[Finding]:
    """PF044: a version that the table does not cover."""
    if case.engine_version is not None and case.row is None:
        yield found("PF044", known=case.engine.known, **case.named)


def packages(case: Case) -> Iterator[Finding]:
    """PF008 to PF010: packages missing or in another version than the engine pins."""
    held, row = case.stack.python.packages, case.row
    if row is None:
        return
    if case.ask.engine == "hullspeed" and "numba" not in held and not case.ask.on_gpu:
        yield found("PF008", executable=case.stack.python.executable)
    missing = [name for name in (*row.requires, *row.pins) if name not in held]
    if missing:
        names = [f"'{name}{row.pins.get(name, '')}'" for name in missing]
        yield found("PF009", missing=", ".join(missing), requirements=" ".join(names), **case.named)
    for package, needs in row.pins.items():
        if package in held and not tables.fits(held[package], needs):
            yield found("PF010", package=package, needs=needs, seen=held[package], **case.named)


def knows_family(case: Case) -> Iterator[Finding]:
    """PF020 and PF043: an architecture the engine does not run, or not yet in this version."""
    family, version = case.stack.model.family, case.engine_version
    if not family or case.stack.model.unsupported or version is None:
        return
    since = case.engine.families.get(family)
    if since is None:
        others = [name for name, engine in tables.engines().items() if family in engine.families]
        alternative = " or ".join(f"--engine {name}" for name in others) or "another model"
        reason = f"family {family} is not in its table"
        yield found("PF020", reason=reason, alternative=alternative, **case.named)
    elif below(version, since):
        yield found("PF043", family=family, needs=since, **case.named)


def speculative_hybrid(case: Case) -> Iterator[Finding]:
    """PF045: draft tokens with prefix caching on recurrent state. Source: vllm issues 43559,
    53912; open for 0.33.
    """
    if case.ask.engine != "vllm" or not case.stack.model.hybrid or not case.ask.draft_tokens:
        return
    caching = case.ask.prefix_caching
    if caching is None:
        version = case.engine_version
        caching = version is not None and not below(version, _VLLM_HYBRID_CACHING_SINCE)
    if caching:
        yield found("PF045", draft_tokens=case.ask.draft_tokens, **case.named)


def batches(case: Case) -> Iterator[Finding]:
    """PF048: transformers' continuous batching has no recurrent state."""
    batching = case.ask.engine == "transformers" and case.ask.continuous_batching
    if batching and case.stack.model.hybrid:
        yield found("PF048", family=case.stack.model.family)


RULES = (installed, known, packages, knows_family, speculative_hybrid, batches)
