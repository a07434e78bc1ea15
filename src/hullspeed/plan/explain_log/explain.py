"""Explanation: everything that can be said about one start-up log."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UnsupportedModelError, UsageError
from hullspeed.findings import Finding, Severity
from hullspeed.memory.profile import engine_profile
from hullspeed.memory.vllm_groups import StateMode
from hullspeed.plan.explain_log.checks import Check, consistency
from hullspeed.plan.explain_log.facts import Facts, facts_of
from hullspeed.plan.explain_log.failures import failures
from hullspeed.plan.explain_log.infer import Candidate, Inference, infer_vllm
from hullspeed.plan.explain_log.models import find_arch
from hullspeed.plan.explain_log.reader import LogEvent, read_log
from hullspeed.plan.explain_log.serving import Remedy, Served, lengths_for, remedies, served
from hullspeed.plan.explain_log.slots import (
    SlotReading,
    read_slots,
    served_slots,
    slot_remedies,
)

MAX_SHOWN = 12


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of settings that reproduces the log.

    Attributes:
        share: Weight among those that fit, 0..1.
        matched: The printed numbers it reproduces.
    """

    kv_dtype: str
    state_dtype: str
    draft_tokens: int
    prefix_cache_mode: str
    tp: int
    block_tokens: int
    bytes_per_block: int
    blocks: int
    blocks_per_request: int
    flashinfer_gdn: bool
    matched: tuple[str, ...]
    share: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a log means and what it leaves out.

    Attributes:
        started: No error stopped the start.
        model: Name in the log; ``shapes`` is the catalogue model whose shapes were used.
        events: Recognised lines with their meaning.
        checks: Identities between the printed numbers.
        fitted: Settings that reproduce the numbers, likeliest first.
        certain: Settings in which all of them agree.
        luck: Chance that a wrong combination would fit too (0..1); ``None`` without a search.
        inference_note: Why nothing was inferred, where so.
        served: What it really serves, by length.
        remedies: What would serve more, best first.
        findings: Failures first, then what bites later.
    """

    engine: str
    version: str | None
    model: str | None
    shapes: str | None
    started: bool
    n_lines: int
    events: tuple[LogEvent, ...]
    checks: tuple[Check, ...]
    fitted: tuple[Fitted, ...]
    n_fitted: int
    certain: dict[str, str]
    luck: float | None
    inference_note: str
    slots: SlotReading | None
    served: tuple[Served, ...]
    remedies: tuple[Remedy, ...]
    findings: tuple[Finding, ...]


def explain_log(text: str, *, arch: ModelArch | None = None, tp: int | None = None) -> Explanation:
    """Explain a pasted start-up log of vLLM or SGLang.

    Args:
        text: The log as printed; prefixes and colours do not matter.
        arch: Shapes of the model, when its name in the log is not known.
        tp: Tensor parallelism, when the log does not state it.

    Raises:
        UsageError: not a log of either engine.
    """
    log = read_log(text)
    facts = facts_of(log)
    if tp is not None:
        facts = replace(facts, tp=tp)
    named = None if arch is not None else find_arch(facts.model)
    shapes = arch if arch is not None else (named.arch if named else None)
    inference, slots = _infer(facts, shapes)
    findings = [
        *failures(log, facts, inference),
        *_version_finding(facts, log.version),
        *_runtime_findings(facts, inference),
    ]
    table, better = _serving(facts, shapes, inference, slots)
    return Explanation(
        engine=log.engine,
        version=log.version,
        model=facts.model,
        shapes=named.name if named else ("given" if arch is not None else None),
        started=not any(finding.severity is Severity.ERROR for finding in findings),
        n_lines=log.n_lines,
        events=log.events,
        checks=tuple(consistency(facts)),
        fitted=tuple(_fitted(c) for c in inference.candidates[:MAX_SHOWN]),
        n_fitted=len(inference.candidates),
        certain=_certain(inference),
        luck=inference.best.luck if inference.best else None,
        inference_note=inference.reason,
        slots=slots,
        served=tuple(table),
        remedies=tuple(better),
        findings=tuple(findings),
    )


def _infer(facts: Facts, arch: ModelArch | None) -> tuple[Inference, SlotReading | None]:
    if arch is None:
        reason = "the model's shapes are not known: give --model a folder or a catalogue name"
        return Inference((), reason), None
    try:
        if facts.engine == "sglang":
            return Inference((), "SGLang prints its pools: read below"), read_slots(facts, arch)
        return infer_vllm(facts, arch), None
    except (UsageError, UnsupportedModelError) as error:
        # A setting in the log that the planner does not know must not hide the rest.
        return Inference((), str(error)), None


def _serving(
    facts: Facts,
    arch: ModelArch | None,
    inference: Inference,
    slots: SlotReading | None,
) -> tuple[list[Served], list[Remedy]]:
    if slots is not None:
        lengths = lengths_for(facts)
        return served_slots(slots, lengths), slot_remedies(slots, lengths)
    best = inference.best
    if best is None or arch is None or facts.needed_gib is not None:
        return [], []
    return served(best.pool, lengths_for(facts)), remedies(arch, facts, best)


def _fitted(candidate: Candidate) -> Fitted:
    pool = candidate.pool
    return Fitted(
        kv_dtype=candidate.kv_dtype,
        state_dtype=candidate.state_dtype,
        draft_tokens=candidate.draft_tokens,
        prefix_cache_mode=candidate.state_mode,
        tp=candidate.tp,
        block_tokens=pool.block_tokens,
        bytes_per_block=pool.bytes_per_block,
        blocks=candidate.blocks,
        blocks_per_request=pool.blocks_per_request(pool.max_model_len),
        flashinfer_gdn=candidate.gdn_prefill,
        matched=candidate.matched,
        share=round(candidate.share, 3),
    )


_SETTINGS = ("kv_dtype", "state_dtype", "draft_tokens", "state_mode", "tp", "blocks")


def _certain(inference: Inference) -> dict[str, str]:
    best = inference.best
    if best is None:
        return {}
    return {name: str(getattr(best, name)) for name in _SETTINGS if inference.agreed(name)}


def _version_finding(facts: Facts, stated: str | None) -> list[Finding]:
    if facts.version is None and stated is not None:
        return [
            Finding(
                code="EL204",
                severity=Severity.INFO,
                what="a development build without a release number: the newest rules are tried, "
                "and both wordings of the token line",
                evidence={"version": stated},
            )
        ]
    if facts.version is None:
        return []
    profile = engine_profile(facts.engine, facts.version, extrapolate=True)
    if not profile.extrapolated:
        return []
    return [
        Finding(
            code="EL201",
            severity=Severity.INFO,
            what=f"{facts.engine} {facts.version} lies outside the checked range "
            f"({profile.range_text}); the planner's rules are extrapolated",
            evidence={"checked": profile.checked_source},
        )
    ]


def _runtime_findings(facts: Facts, inference: Inference) -> list[Finding]:
    found = []
    best = inference.best
    if best is not None and facts.needed_gib is None:
        # The start-up checks of the pool are about flags that a log may not show.
        found += [f for f in best.pool.findings if f.code == "MEM003"]
        if best.draft_tokens and best.state_mode == StateMode.ALIGN:
            found.append(_corruption(facts))
    if facts.draft_model:
        found.append(
            Finding(
                code="EL202",
                severity=Severity.INFO,
                what="an external draft model shares the pool",
                why="five sliding layers of 2,048 tokens are assumed, as DFlash2 has"
                if inference.candidates
                else "block counts cannot be inverted without its configuration",
                evidence={"method": facts.draft_method or ""},
            )
        )
    return found


def _corruption(facts: Facts) -> Finding:
    return Finding(
        code="EL203",
        severity=Severity.WARNING,
        what="drafts and prefix caching together corrupted answers on hybrid models",
        why="an unaligned state can be stored as a block boundary's "
        "(vllm-project/vllm#43559, #53912)",
        evidence={"version": facts.version or "not stated"},
        fix="--no-enable-prefix-caching, or verify: hullspeed verify compares cold with cached",
    )
