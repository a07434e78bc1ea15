"""An explanation as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from hullspeed.findings import Finding
from hullspeed.plan.explain_log.explain import Explanation, Fitted
from hullspeed.units import MIB

_HIDDEN_EVENTS = ("capturing", "config", "args")


def lines_of(explanation: Explanation, *, verbose: bool = False) -> Iterator[str]:
    """The report, line by line; ``verbose`` shows every recognised line and candidate."""
    e = explanation
    yield f"{e.engine} {e.version or '(version not stated)'}: {e.model or 'model not stated'}"
    if e.shapes and e.shapes != e.model:
        yield f"  shapes taken from {e.shapes}"
    yield from _findings(e)
    yield ""
    yield "What the lines mean"
    for event in e.events:
        if event.name in _HIDDEN_EVENTS and not verbose:
            continue
        times = f" ({event.count} ranks)" if event.count > 1 else ""
        yield f"  {event.line:>5}  {event.meaning}{times}"
    yield from _checks(e)
    yield from _inferred(e, verbose)
    yield from _slots(e)
    yield from _served(e)


def _findings(e: Explanation) -> Iterator[str]:
    for finding in e.findings:
        yield ""
        yield from _finding(finding)


def _finding(finding: Finding) -> Iterator[str]:
    yield f"{finding.severity.upper()} {finding.code}: {finding.what}"
    if finding.why:
        yield f"  why: {finding.why}"
    if finding.evidence:
        yield "  seen: " + ", ".join(f"{name} {value}" for name, value in finding.evidence.items())
    if finding.fix:
        yield f"  fix: {finding.fix}"


def _checks(e: Explanation) -> Iterator[str]:
    if e.checks:
        yield ""
        yield "Do the numbers agree?"
    for check in e.checks:
        yield f"  {'yes' if check.holds else 'NO '}  {check.evidence}: {check.says}"


def _inferred(e: Explanation, verbose: bool) -> Iterator[str]:
    yield ""
    yield "What is not printed"
    if not e.fitted:
        yield f"  nothing inferred: {e.inference_note}"
        return
    luck = "" if e.luck is None or e.luck >= 1 else f"; by luck about 1 in {1 / e.luck:,.0f}"
    yield f"  {e.n_fitted} combination(s) reproduce {', '.join(e.fitted[0].matched)}{luck}"
    for fitted in e.fitted if verbose else e.fitted[:3]:
        yield f"  {fitted.share:>4.0%}  {_fitted_text(fitted)}"
    if e.n_fitted > 1 and e.certain:
        agreed = ", ".join(f"{name} {value}" for name, value in e.certain.items() if value)
        yield f"  all agree on: {agreed}"


def _fitted_text(f: Fitted) -> str:
    parts = [f"KV {f.kv_dtype}"]
    if f.state_dtype:
        parts.append(f"state {f.state_dtype}")
    parts.append(f"drafts {f.draft_tokens}" if f.draft_tokens else "no drafts")
    if f.prefix_cache_mode:
        parts.append(f"prefix cache {'on' if f.prefix_cache_mode != 'none' else 'off'}")
    parts.append(f"TP {f.tp}")
    parts.append(
        f"{f.blocks} blocks of {f.block_tokens} tokens, {f.bytes_per_block / MIB:.4g} MiB; "
        f"{f.blocks_per_request} for the longest request"
    )
    return ", ".join(parts)


def _slots(e: Explanation) -> Iterator[str]:
    reading = e.slots
    if reading is None:
        return
    yield ""
    yield "The two pools"
    if reading.token_bytes:
        fits = " or ".join(reading.kv_dtypes) or "no known dtype"
        yield f"  {reading.tokens:,} tokens of {reading.token_bytes:,.0f} bytes: KV in {fits}"
    else:
        yield f"  {reading.tokens:,} tokens"
    if reading.slots:
        size = f" of {reading.slot_bytes / MIB:.1f} MiB" if reading.slot_bytes else ""
        fits = " or ".join(reading.state_dtypes) or "dtype not settled"
        yield f"  {reading.slots} state slots{size}: {fits}"
    if reading.max_running is not None:
        why = f" ({' or '.join(reading.strategies)})" if reading.strategies else ""
        yield f"  at most {reading.max_running} running requests, bound by {reading.bound}{why}"


def _served(e: Explanation) -> Iterator[str]:
    if not e.served:
        return
    yield ""
    yield "What it really serves"
    yield "   tokens a request   by the log   at once"
    for row in e.served:
        yield f"   {row.context_tokens:>16,} {row.by_the_log:>12.2f} {row.really:>9}"
    if e.remedies:
        yield ""
        yield "What would serve more (requests at once by length)"
    for remedy in e.remedies:
        after = ", ".join(f"{n:,}: {count}" for n, count in remedy.really.items())
        yield f"  x{remedy.gain:<5.2f} {remedy.flag}  ({after})"
        yield f"         {remedy.change}: {remedy.caveat}"
