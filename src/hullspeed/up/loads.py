"""Loads: the cells that ``up`` predicts and measures, stated once for both."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hullspeed.bench.spec import BenchSpec, Objective
from hullspeed.twin.load import Load


class Cell(NamedTuple):
    """One load: closed loop, prompts of ``isl_tokens``, outputs of ``osl_tokens``."""

    title: str
    isl_tokens: int
    osl_tokens: int
    concurrency: int
    requests: int
    cache: Literal["cold", "cached"]

    def as_bench(self, url: str, model: str, objective: Objective) -> BenchSpec:
        """As ``bench`` measures it."""
        return BenchSpec(
            url=url,
            model=model,
            isl_tokens=self.isl_tokens,
            osl_tokens=self.osl_tokens,
            concurrency=(self.concurrency,),
            requests=self.requests,
            cache=self.cache,
            objective=objective,
        )

    def as_load(self) -> Load:
        """As the twin plays it."""
        return Load(
            isl_tokens=self.isl_tokens,
            osl_tokens=self.osl_tokens,
            requests=self.requests,
            concurrency=self.concurrency,
            cache=self.cache,
        )


def cells(max_context_tokens: int, *, isl_tokens: int, osl_tokens: int) -> tuple[Cell, ...]:
    """One stream, eight streams, and a long prompt cold and cached, cut to the context."""
    isl = min(isl_tokens, max_context_tokens - osl_tokens)
    long = min(4 * isl_tokens, max_context_tokens - osl_tokens)
    return (
        Cell("one stream", isl, osl_tokens, 1, 4, "cold"),
        Cell("eight streams", isl, osl_tokens, 8, 24, "cold"),
        Cell("long prompt, cold", long, 16, 1, 4, "cold"),
        Cell("long prompt, cached", long, 16, 1, 8, "cached"),
    )
