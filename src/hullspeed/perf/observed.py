"""Observed: measurements of one box, read from an engine's log or from a benchmark's JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from hullspeed.errors import UsageError


class ObservedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A closed loop that was measured; 0 for what was not.

    Attributes:
        requests: In all.
    """

    isl: int
    osl: int
    concurrency: int
    requests: int
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    output_tokens_per_s: float = 0.0


class ObservedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A decode step of ``n_decode`` requests whose contexts sum to ``context_tokens``."""

    n_decode: int
    context_tokens: int
    seconds: float


Observed = ObservedLoad | ObservedStep

_VLLM_LINE = re.compile(
    r"Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
    r"Running: (\d+) reqs, Waiting: \d+ reqs.*?KV cache usage: ([\d.]+)%"
)
_VLLM_POOL = re.compile(r"KV cache size: ([\d,]+) tokens")
_SGLANG_LINE = re.compile(
    r"(?P<rank>(?:DP\d+ )?(?:TP\d+)?)\]? ?Decode batch.*?#running-req: (?P<running>\d+), "
    r"#(?:full )?token: (?P<tokens>\d+),.*?"
    r"gen throughput \(token/s\): (?P<rate>[\d.]+)"
)
_QUIET_PROMPT_TOKENS_PER_S = 20.0  # of a vLLM line: an interval with no prompt of any size in it


def observed_of_log(text: str) -> list[Observed]:
    """Decode steps of a vLLM or SGLang log: intervals in which nothing else ran.

    Both engines' lines average an interval, so only those without prompts, and with the same
    number of requests at both ends, say how long a step of so many takes. Steps that verify drafts
    are another kind.

    Raises:
        UsageError: if no such interval is in the text.
    """
    steps = [*_of_sglang(text), *_of_vllm(text)]
    if not steps:
        raise UsageError(
            "no interval of plain decoding in this log",
            seen=f"{len(text.splitlines()):,} lines",
            fix="paste the statistics lines of a steady load: vLLM's 'Avg generation throughput' "
            "with its 'GPU KV cache size', or SGLang's 'Decode batch'",
        )
    return list(steps)


def _of_sglang(text: str) -> list[ObservedStep]:
    found = []
    before: dict[str, int] = {}  # requests at the last line of each rank, unless prompts came since
    for line in text.splitlines():
        if "Prefill batch" in line:
            before.clear()
            continue
        match = _SGLANG_LINE.search(line)
        if match is None or "accept len" in line:
            continue
        running, rate = int(match["running"]), float(match["rate"])
        if running and rate > 0 and before.get(match["rank"]) == running:
            tokens = int(match["tokens"])
            found.append(
                ObservedStep(n_decode=running, context_tokens=tokens, seconds=running / rate)
            )
        before[match["rank"]] = running
    return found


def _of_vllm(text: str) -> list[ObservedStep]:
    pool = _VLLM_POOL.search(text)
    if pool is None:
        return []
    pool_tokens = int(pool[1].replace(",", ""))
    found, before = [], -1
    for match in _VLLM_LINE.finditer(text):
        prompt, rate = float(match[1]), float(match[2])
        running = int(match[3])
        steady = running == before > 0
        before = running
        if steady and prompt <= _QUIET_PROMPT_TOKENS_PER_S and rate > 0:
            tokens = round(pool_tokens * float(match[4]) / 100)
            found.append(
                ObservedStep(n_decode=running, context_tokens=tokens, seconds=running / rate)
            )
    return found


def observed_of_bench(path: Path) -> list[Observed]:
    """Loads of ``hullspeed bench --json``, of ``vllm bench serve --save-result`` or of SGLang's
    ``bench_serving --output-file``, which has a result in each line.

    Raises:
        UsageError: if the file is none of these, naming what is missing.
    """
    try:
        results = _results(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"cannot read the benchmark: {error}", seen=str(path)) from error
    found: list[Observed] = []
    for data in results:
        if isinstance(data, dict) and isinstance(data.get("cells"), list):
            found += [load for cell in data["cells"] if (load := _of_cell(cell)) is not None]
        elif isinstance(data, dict) and "mean_ttft_ms" in data:
            found += [load] if (load := _of_serving(data)) is not None else []
        else:
            raise UsageError(
                "this is no benchmark result that is known",
                seen=str(path),
                fix="give the output of hullspeed bench --json, vllm bench serve --save-result or "
                "sglang.bench_serving --output-file",
            )
    if not found:
        raise UsageError(
            "the benchmark has no closed loop to learn from",
            seen=str(path),
            fix="measure with a fixed number of requests in flight: --max-concurrency N and no "
            "--request-rate",
        )
    return found


def _results(text: str) -> list[object]:
    """One JSON document, or one in each line."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return [json.loads(line) for line in lines]


def _of_cell(cell: dict[str, Any]) -> ObservedLoad | None:
    closed = re.fullmatch(r"closed (\d+)", str(cell.get("load", "")))
    if closed is None or not cell.get("ok"):
        return None
    try:
        cached = (cell.get("cached_tokens") or {}).get("mean", 0.0)
        return ObservedLoad(
            isl=max(round(cell["prompt_tokens"]["mean"] - cached), 1),
            osl=round(cell["output_tokens"]["mean"]),
            concurrency=int(closed[1]),
            requests=int(cell["ok"]),
            ttft_s=float(cell["ttft_s"]["mean"]),
            tpot_s=float(cell["tpot_s"]["mean"]),
            output_tokens_per_s=float(cell["output_tok_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError("a cell of the benchmark lacks a field", seen=str(error)) from error


def _of_serving(data: dict[str, Any]) -> ObservedLoad | None:
    """A result of vLLM's or SGLang's serving benchmark; ``None`` if it sent at a finite rate."""
    try:
        if float(data.get("request_rate") or "inf") != float("inf"):
            return None
        completed = int(data["completed"])
        return ObservedLoad(
            isl=round(data["total_input_tokens"] / completed),
            osl=round(data["total_output_tokens"] / completed),
            concurrency=min(int(data.get("max_concurrency") or completed), completed),
            requests=completed,
            ttft_s=float(data["mean_ttft_ms"]) / 1e3,
            tpot_s=float(data["mean_tpot_ms"]) / 1e3,
            output_tokens_per_s=float(data["output_throughput"]),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError("the benchmark lacks a field", seen=str(error)) from error
