"""Predicted: what the cells should see, before anything is served."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.hardware.ceilings import Ceilings
from hullspeed.hardware.machine import detect_machine
from hullspeed.perf.step import StepCost
from hullspeed.runtime.config import EngineConfig
from hullspeed.twin.closed_loop import TwinEngine, simulate
from hullspeed.twin.outcome import percentile
from hullspeed.up.loads import Cell


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one cell, as the twin saw it; seconds.

    Attributes:
        relative_error: Half-width of the interval, relative.
    """

    ttft_s: float
    itl_s: float
    output_tok_s: float
    relative_error: float


def predict(
    arch: ModelArch, config: EngineConfig, ceilings: Ceilings, n_pages: int, cells: Sequence[Cell]
) -> list[Prediction]:
    """Play every cell on the production scheduler with this machine's step times."""
    over = ceilings.overheads
    engine = TwinEngine(
        vocab=arch.vocab,
        max_context_tokens=config.max_context_tokens or arch.max_context_tokens,
        n_pages=n_pages,
        page_tokens=config.page_tokens,
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        cache=config.cache,
        eviction=config.eviction,
        stream_token_s=over.stream_token_s,
        own_core=ceilings.threads < detect_machine().cores,
    )
    if (others := ceilings.interruptions) is not None:
        engine = msgspec.structs.replace(
            engine, interrupted_every_s=others.every_s, interrupted_s=others.lost_s
        )
    cost = StepCost(arch, ceilings, config.weight_dtype, config.kv_dtype)
    predictions = []
    for cell in cells:
        replaced = msgspec.structs.replace(
            engine,
            request_s=over.request_seconds(cell.isl_tokens),
            request_work_s=over.work_seconds(cell.isl_tokens),
        )
        outcome = simulate(replaced, cost, cell.as_load())
        predictions.append(
            Prediction(
                ttft_s=percentile(outcome.ttft_s, 0.5),
                itl_s=percentile(outcome.itl_s, 0.5),
                output_tok_s=outcome.output_tokens_per_s,
                relative_error=ceilings.relative_error,
            )
        )
    return predictions
