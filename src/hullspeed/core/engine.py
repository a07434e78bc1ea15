"""EngineLoop: requests in, tokens out; the same loop for the real engine and for the simulation."""

from __future__ import annotations

from dataclasses import dataclass

from hullspeed.clock import Clock
from hullspeed.core.executor import Executor
from hullspeed.core.request import Request, Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.scheduler import Output, Scheduler
from hullspeed.core.step import Step
from hullspeed.errors import ContextOverflowError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the loaded model allows; checked again at the engine's door.

    Attributes:
        eos_token_ids: Every end token that the model's files name.
    """

    vocab: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...] = ()


class EngineLoop:
    """Runs steps one after another.

    Args:
        scheduler: Decides what a step computes.
        executor: Computes it.
        clock: The time that requests arrive and steps end by.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Clock, limits: Limits
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.limits = limits
        self.last_step = Step()
        self.last_step_s = 0.0

    def add(
        self,
        request_id: int,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes = b"",
        checkpoints: tuple[int, ...] = (),
    ) -> Sequence:
        """Queue a request.

        Raises:
            RequestError: if the prompt, a checkpoint or a parameter cannot be; nothing was queued.
            CapacityError: if it could never fit.
        """
        sampling.check(self.limits.vocab)
        wrong = next((place for place in checkpoints if not 0 < place <= len(prompt)), None)
        if wrong is not None:
            raise RequestError("a checkpoint lies outside the prompt", seen=wrong)
        request = Request(
            id=request_id,
            prompt=tuple(prompt),
            sampling=sampling,
            max_tokens=self._max_tokens(prompt, sampling),
            eos_token_ids=self.limits.eos_token_ids,
            priority=priority,
            salt=salt,
            arrival_s=self.clock.now(),
            checkpoints=checkpoints,
        )
        return self.scheduler.add(request)

    def _max_tokens(self, prompt: list[int], sampling: SamplingParams) -> int:
        if not prompt:
            raise RequestError("the prompt has no tokens", param="prompt", fix="send at least one")
        wrong = next((t for t in prompt if not 0 <= t < self.limits.vocab), None)
        if wrong is not None:
            raise RequestError(
                f"token ids are 0 to {self.limits.vocab - 1}", seen=wrong, param="prompt"
            )
        pool_tokens = self.scheduler.pages.size * self.scheduler.pages.page_tokens
        room = min(self.limits.max_context_tokens, pool_tokens) - len(prompt)
        if room < max(1, sampling.max_tokens or 1):
            raise ContextOverflowError(
                f"the context holds {room + len(prompt)} tokens, prompt and output together",
                seen=f"{len(prompt)} prompt + {sampling.max_tokens or 1} output tokens",
                param="max_tokens" if room > 0 else "prompt",
                fix="shorten the prompt or lower max_tokens",
            )
        return room if sampling.max_tokens is None else sampling.max_tokens

    def cancel(self, request_id: int) -> bool:
        """End a request now; False if it is not here (any more)."""
        return self.scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """Plan, compute and take one step; empty when there is nothing to do."""
        begin_s = self.clock.now()
        step = self.scheduler.schedule(begin_s)
        if not step:
            return []
        result = self.executor.execute(step)
        now_s = self.clock.now()
        self.last_step, self.last_step_s = step, now_s - begin_s
        return self.scheduler.commit(step, result, now_s)
