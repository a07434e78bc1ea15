"""The gate: nothing is loaded while an error stands, unless it is overridden by its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hullspeed.errors import BrokenStackError, CapacityError, HullspeedError, UsageError
from hullspeed.findings import Finding, Severity
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.chain import check
from hullspeed.preflight.codes import codes
from hullspeed.preflight.probes import MachineProbes, Probes
from hullspeed.preflight.sizing import sized


def run_preflight(
    model: str, *, engine: str = "hullspeed", probes: Probes | None = None, **ask: Any
) -> list[Finding]:
    """Judge this machine (or what ``probes`` shows) for a launch.

    Args:
        model: Source as ``hullspeed pull`` takes it; it must be on this machine already.
        engine: ``hullspeed``, ``vllm``, ``sglang``, ``trtllm`` or ``transformers``.
        probes: Where the facts come from; this machine by default.
        ask: Further fields of :class:`~hullspeed.preflight.ask.Ask`.

    Raises:
        UsageError: for an ask that cannot be.
        BrokenStackError: if the engine's interpreter does not run.
    """
    asked = Ask(model=model, engine=engine, **ask).checked()
    stack = (probes or MachineProbes()).stack(asked)
    return check(sized(asked, stack), stack)


def gate(findings: Sequence[Finding], overrides: Sequence[str] = ()) -> list[Finding]:
    """Let a launch pass, or refuse it.

    Returns:
        The errors that were overridden, so that the caller can say so.

    Raises:
        UsageError: for an override that is no code.
        BrokenStackError: for an error in the environment (exit 3).
        CapacityError: for errors of the launch only (exit 1).
    """
    wanted = set(parse_overrides(overrides))
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    blocking = [finding for finding in errors if finding.code not in wanted]
    if blocking:
        raise _refusal(blocking)
    return errors


def parse_overrides(overrides: Sequence[str]) -> list[str]:
    """Codes as given, separately or with commas between.

    Raises:
        UsageError: for one that is no code of this gate.
    """
    given = [code.strip().upper() for text in overrides for code in text.split(",") if code.strip()]
    for code in given:
        if code not in codes():
            raise UsageError(
                "no such code to override", seen=code, fix="give a code that preflight printed"
            )
    return given


def exit_code(findings: Sequence[Finding], overrides: Sequence[str] = ()) -> int:
    """0 when nothing blocks, 3 when the environment is broken, 1 when only the launch is wrong."""
    wanted = set(parse_overrides(overrides))
    errors = [f for f in findings if f.severity is Severity.ERROR and f.code not in wanted]
    if any(codes()[finding.code].broken for finding in errors):
        return 3
    return 1 if errors else 0


def _refusal(blocking: Sequence[Finding]) -> HullspeedError:
    first = blocking[0]
    more = f" and {len(blocking) - 1} more" if len(blocking) > 1 else ""
    names = ", ".join(dict.fromkeys(finding.code for finding in blocking))
    kind = BrokenStackError if exit_code(blocking) == 3 else CapacityError
    return kind(
        f"the gate is closed by {names}: {first.what}{more}",
        fix=f"{first.fix} (or --override {first.code} if you know better)",
    )
