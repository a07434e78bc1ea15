"""Executor: runs a Step. The scheduler cannot tell real from simulated; that keeps both honest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hullspeed.clock import VirtualClock
from hullspeed.core.request import Sequence
from hullspeed.core.step import Sampled, Step, StepResult


class Executor(Protocol):
    """Computes steps, in order, one at a time."""

    def execute(self, step: Step) -> StepResult:
        """Make the step's copies, compute its spans and sample where asked.

        Raises:
            EngineError: if the whole step failed; a fault of one request is its ``Sampled.error``.
        """
        ...


class CostModelExecutor:
    """Takes the time that a step is said to take, on a virtual clock, and makes tokens up.

    Args:
        clock: Advanced by the step's time.
        step_seconds: Seconds that a step takes.
        next_token: Token after ``sequence.tokens``; the default never ends a request early.
    """

    def __init__(
        self,
        clock: VirtualClock,
        step_seconds: Callable[[Step], float],
        next_token: Callable[[Sequence], int] = lambda _: 0,
    ) -> None:
        self._clock = clock
        self._step_seconds = step_seconds
        self._next_token = next_token

    def execute(self, step: Step) -> StepResult:
        """Advance the clock and answer every sampling span."""
        self._clock.advance(self._step_seconds(step))
        sampled = [Sampled(self._next_token(s.sequence)) for s in step.spans if s.sample]
        return StepResult(sampled)
