"""Workload: what will be asked of the server."""

from __future__ import annotations

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError

DEFAULT_ISL, DEFAULT_OSL, DEFAULT_CONCURRENCY = 2048, 256, 8


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests as the server will see them.

    Attributes:
        context_tokens: Longest sequence the server must take, prompt and output.
        isl: Input tokens of a typical request.
        osl: Output tokens of a typical request.
        concurrency: Requests in flight.
        rate: Requests per second, if the load is known that way; concurrency then follows.
        shared_prefix: First input tokens that requests share.
        ttft_s: Objective for the time to first token.
        tpot_s: Objective for the time per output token after the first.
        structured: Answers must follow a JSON schema.
        requests_per_task: Requests that make up one useful task.
        task_success: Share of tasks that succeed.
        assumed: Which of the fields were not given, as sentences.
    """

    context_tokens: int
    isl: int = DEFAULT_ISL
    osl: int = DEFAULT_OSL
    concurrency: int = DEFAULT_CONCURRENCY
    rate: float | None = None
    shared_prefix: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    structured: bool = False
    requests_per_task: int = 1
    task_success: float = 1.0
    assumed: tuple[str, ...] = ()

    @property
    def request_tokens(self) -> int:
        """Tokens of a typical sequence at its end."""
        return self.isl + self.osl


def make_workload(
    arch: ModelArch,
    *,
    context: int | None = None,
    isl: int | None = None,
    osl: int | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    shared_prefix: int = 0,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    structured: bool = False,
    requests_per_task: int = 1,
    task_success: float = 1.0,
) -> Workload:
    """A workload with what was not given filled in, and said so.

    Raises:
        UsageError: for sizes that contradict each other or the model.
    """
    _check_positive(context=context, isl=isl, osl=osl, concurrency=concurrency, rate=rate,
                    ttft=ttft_s, tpot=tpot_s, requests_per_task=requests_per_task)  # fmt: skip
    if not 0 < task_success <= 1:
        raise UsageError("--task-success is a share above 0 and at most 1", seen=task_success)
    assumed = []
    longest = arch.max_context_tokens
    if osl is None:
        osl = min(DEFAULT_OSL, max(1, (context or longest) // 8))
        assumed.append(f"output of {osl} tokens (--osl)")
    if isl is None:
        isl = min(DEFAULT_ISL, longest - osl) if context is None else context - osl
        assumed.append(f"input of {isl} tokens (--isl)")
    if context is None:
        context = isl + osl
        assumed.append(
            f"context of {context:,} tokens, input and output, not the model's own {longest:,} "
            "(--context)"
        )
    if concurrency is None:
        concurrency = DEFAULT_CONCURRENCY
        if rate is None:
            assumed.append(f"{concurrency} requests in flight (--concurrency or --rate)")
    if isl < 1 or isl + osl > context:
        raise UsageError(
            "input and output do not fit in the context",
            seen=f"--isl {isl} + --osl {osl} > --context {context}",
            fix="lower --isl or --osl, or raise --context",
        )
    if context > longest:
        raise UsageError(
            f"the model's context is {longest:,} tokens", seen=context, fix="lower --context"
        )
    if not 0 <= shared_prefix < isl:
        raise UsageError(
            "the shared prefix must be shorter than the input",
            seen=shared_prefix,
            fix=f"use 0 to {isl - 1}",
        )
    return Workload(
        context_tokens=context,
        isl=isl,
        osl=osl,
        concurrency=concurrency,
        rate=rate,
        shared_prefix=shared_prefix,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        structured=structured,
        requests_per_task=requests_per_task,
        task_success=task_success,
        assumed=tuple(assumed),
    )


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < 1e9:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} must be above 0", seen=value)
