"""Service: an engine loop that speaks messages; the same in its own process and in a thread."""

from __future__ import annotations

from hullspeed.core.engine import EngineLoop
from hullspeed.core.scheduler import Output
from hullspeed.core.step import Sampled
from hullspeed.errors import HullspeedError
from hullspeed.runtime.messages import (
    Cancel,
    ClearCache,
    Delta,
    EngineStats,
    Shutdown,
    Submit,
    ToEngine,
)


class Service:
    """Takes messages between steps and turns what a step gives into deltas.

    Whatever one request asks, only that request fails: a bad one is answered with a delta whose
    ``finish`` is ``"error"``.

    Attributes:
        stopping: A ``Shutdown`` has come.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self.stopping = False
        self._loop = loop
        self._queue_s: dict[int, float] = {}  # of requests that have started, not yet answered

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._loop.has_work

    def handle(self, message: ToEngine) -> list[Delta]:
        """Take one message; deltas only for requests that it ends."""
        match message:
            case Submit():
                return self._submit(message)
            case Cancel(ids):
                return [delta for i in ids for delta in self._cancel(i)]
            case ClearCache():
                self._loop.scheduler.cache.clear()
            case Shutdown():
                self.stopping = True
        return []

    def step(self) -> list[Delta]:
        """Run one step; empty when there is nothing to do.

        Raises:
            EngineError: if the step failed as a whole; the engine cannot go on.
        """
        before = self._loop.last_step
        outputs = self._loop.step()
        step = self._loop.last_step
        if step is before:
            return []
        begin_s = self._loop.clock.now() - self._loop.last_step_s
        for span in step.spans:
            sequence = span.sequence
            # Its first token is still to come, or came just now.
            if sequence.output_tokens <= span.sample:
                self._queue_s.setdefault(sequence.id, begin_s - sequence.request.arrival_s)
        return [self._delta(output) for output in outputs]

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        scheduler = self._loop.scheduler
        counters, pages = scheduler.counters, scheduler.pages
        used = len({page for sequence in scheduler.running for page in sequence.pages})
        in_windows = len({page for sequence in scheduler.running for page in sequence.window_pages})
        windows = scheduler.windows
        return EngineStats(
            steps_total=counters.steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_free=pages.n_free,
            pages_cached=pages.size - pages.n_free - used,
            pages_used=used,
            pages_total=pages.size,
            preemptions_total=counters.preemptions,
            prefix_queried_total=counters.prompt_tokens,
            prefix_hit_total=counters.cached_tokens,
            prompt_tokens_total=counters.prompt_tokens,
            generated_tokens_total=counters.generated_tokens,
            step_tokens_last=self._loop.last_step.n_tokens,
            step_s_last=self._loop.last_step_s,
            window_pages_used=in_windows,
            window_pages_total=0 if windows is None else windows.pool.size,
        )

    def _submit(self, message: Submit) -> list[Delta]:
        try:
            self._loop.add(
                message.id,
                message.prompt,
                message.sampling,
                priority=message.priority,
                salt=message.salt,
                checkpoints=message.checkpoints,
            )
        except HullspeedError as error:
            return [_failed(message.id, error)]
        # The boundary of one request: what it holds may break what we never thought of, and must
        # not end the others.
        except Exception as error:  # noqa: BLE001
            return [_failed(message.id, HullspeedError("internal error", seen=repr(error)))]
        return []

    def _cancel(self, request_id: int) -> list[Delta]:
        self._queue_s.pop(request_id, None)
        if not self._loop.cancel(request_id):
            return []
        return [Delta(request_id, [], finish="cancelled")]

    def _delta(self, output: Output) -> Delta:
        sequence, sampled = output.sequence, output.sampled
        finish = None if output.finish is None else output.finish.value
        queue_s = self._queue_s.pop(sequence.id, None)
        if sampled is None or sampled.error is not None:
            error = None if sampled is None else sampled.error
            return Delta(sequence.id, [], finish=finish, error=error, error_type="HullspeedError")
        return Delta(
            sequence.id,
            [sampled.token],
            logprobs=_logprobs(sampled),
            cached_tokens=None if queue_s is None else sequence.cached_tokens,
            finish=finish,
            queue_s=queue_s,
        )


def _logprobs(
    sampled: Sampled,
) -> list[tuple[float, tuple[tuple[int, float], ...]]] | None:
    if sampled.logprob is None:
        return None
    return [(sampled.logprob, tuple((top.token, top.logprob) for top in sampled.top))]


def _failed(request_id: int, error: HullspeedError) -> Delta:
    return Delta(request_id, [], finish="error", error=str(error), error_type=type(error).__name__)
