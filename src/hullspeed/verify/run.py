"""run: every check against one endpoint, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from importlib.metadata import version

import httpx2

from hullspeed.errors import UsageError
from hullspeed.findings import Severity
from hullspeed.verify.check import Check, Fault, Skip
from hullspeed.verify.checks import CHECKS
from hullspeed.verify.completion import Unanswered
from hullspeed.verify.endpoint import Endpoint, connect
from hullspeed.verify.report import CheckResult, Outcome, VerifyReport


async def run(
    url: str,
    *,
    model: str | None = None,
    only: Iterable[str] = (),
    api_key: str | None = None,
    timeout_s: float = 300.0,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Verify the endpoint at ``url``.

    Args:
        url: With or without ``/v1``.
        model: Name to ask for; the first of ``/v1/models`` unless given.
        only: Codes of the checks to run; all unless given.
        api_key: Bearer token.
        timeout_s: Longest wait for bytes of a single answer.
        progress: Called with one line per check.

    Raises:
        UsageError: an unknown code, or not a URL.
        EngineError: nothing answers, or it serves neither completions nor chat.
    """
    chosen = _choose(only)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx2.Timeout(timeout_s, connect=10.0)
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(
        headers=headers, timeout=timeout, limits=limits, trust_env=False
    ) as client:
        endpoint = await connect(client, url, model)
        results: list[CheckResult] = []
        for check in chosen:
            if endpoint.gone:
                told = any(result.findings for result in results)
                result = _not_run(check, endpoint, tell=not told)
            else:
                result = await _run_check(check, endpoint)
            results.append(result)
            if progress is not None:
                progress(f"{result.code} {result.outcome:7} {result.title}")
    return VerifyReport(
        url=endpoint.url,
        model=endpoint.model,
        version=version("hullspeed"),
        apis=list(endpoint.apis),
        checks=results,
    )


def _choose(only: Iterable[str]) -> list[Check]:
    codes = {code.upper() for code in only}
    unknown = codes - {check.code for check in CHECKS}
    if unknown:
        raise UsageError(
            "no such check",
            seen=", ".join(sorted(unknown)),
            fix=f"the codes are {CHECKS[0].code} to {CHECKS[-1].code}",
        )
    return [check for check in CHECKS if not codes or check.code in codes]


def _not_run(check: Check, endpoint: Endpoint, *, tell: bool) -> CheckResult:
    """A check that no connection could be opened for; ``tell`` makes it a finding."""
    reason = "the endpoint no longer answers"
    fault = Fault(reason, endpoint.request("/v1/models"), {"error": endpoint.gone})
    return CheckResult(
        code=check.code,
        title=check.title,
        outcome=Outcome.FAILED if tell else Outcome.SKIPPED,
        reason=reason,
        seconds=0.0,
        findings=[check.finding(fault)] if tell else [],
    )


async def _run_check(check: Check, endpoint: Endpoint) -> CheckResult:
    start_s = time.perf_counter()
    faults: list[Fault] = []
    reason = ""
    try:
        faults = await check.ask(endpoint)
        outcome = Outcome.FAILED if faults else Outcome.PASSED
        if faults and all(fault.severity is not Severity.ERROR for fault in faults):
            outcome = Outcome.PASSED
    except Skip as skip:
        outcome, reason = Outcome.SKIPPED, str(skip)
    except Unanswered as failure:
        outcome = Outcome.FAILED
        seen = {"answer": failure.answer.shown}
        faults = [Fault("a plain request was not served", failure.answer.request, seen)]
    except Exception as error:  # noqa: BLE001 - the boundary of a check: an answer it cannot read
        outcome = Outcome.FAILED
        request = endpoint.request("/v1/models")
        faults = [
            Fault(
                "the endpoint gave an answer of a shape that this check cannot read",
                request,
                {"error": f"{type(error).__name__}: {error}"},
            )
        ]
    return CheckResult(
        code=check.code,
        title=check.title,
        outcome=outcome,
        reason=reason,
        seconds=time.perf_counter() - start_s,
        findings=[check.finding(fault) for fault in faults],
    )
