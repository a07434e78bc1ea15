"""``hullspeed verify``: is an endpoint correct."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from hullspeed.verify import VerifyReport

_MARKS = {"passed": "[green]ok[/]", "failed": "[red]FAIL[/]", "skipped": "[dim]skip[/]"}


def verify(
    url: str,
    *,
    model: str | None = None,
    only: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = (),
    api_key: Annotated[str | None, Parameter(env_var="HULLSPEED_API_KEY")] = None,
    timeout: str = "300s",
    json: Annotated[bool, Parameter(name="--json")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
) -> int:
    """Check that an OpenAI-compatible endpoint is correct; each finding comes with a curl line.

    Example: ``hullspeed verify http://127.0.0.1:8000 --only V005 V006``

    Run it before a benchmark: wrong answers can be fast. Exit codes: 0 all checks passed or do not
    apply, 1 a finding, 2 usage, 3 the endpoint does not answer.

    Parameters
    ----------
    url
        Endpoint, with or without /v1.
    model
        Model to ask for; the first that the endpoint names unless given.
    only
        Codes of the checks to run.
    api_key
        Bearer token.
    timeout
        Longest wait for bytes of one answer.
    json
        Print JSON.
    quiet
        No progress on stderr.
    """
    from hullspeed.units import parse_seconds
    from hullspeed.verify import run

    report = asyncio.run(
        run(
            url,
            model=model,
            only=only,
            api_key=api_key,
            timeout_s=parse_seconds(timeout),
            progress=None if quiet else _progress,
        )
    )
    if json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        sys.stdout.buffer.flush()
    else:
        _print(report)
    return 0 if report.passed else 1


def _progress(line: str) -> None:
    sys.stderr.write(line + "\n")


def _print(report: VerifyReport) -> None:
    from rich.console import Console
    from rich.markup import escape

    from hullspeed.verify import Outcome

    console = Console(highlight=False, soft_wrap=True)
    for check in report.checks:
        reason = f" [dim]({escape(check.reason)})[/]" if check.reason else ""
        console.print(f"{check.code} {_MARKS[check.outcome]:4} {escape(check.title)}{reason}")
        for finding in check.findings:
            console.print(f"     [bold]{finding.severity}[/]: {escape(finding.what)}")
            for name, value in finding.evidence.items():
                console.print(f"       {name}: {escape(value)}")
            console.print(f"       why: {escape(finding.why)}")
            console.print(f"       fix: {escape(finding.fix)}")
    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in Outcome)
    console.print(f"{report.model} at {report.url}: {counts}")
