from __future__ import annotations

from collections.abc import Callable

import pytest

from hullspeed.clock import VirtualClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.core.sampling import SamplingParams
from hullspeed.core.step import Sampled, Step, StepResult, TokenLogprob
from hullspeed.errors import (
    CapacityError,
    ContextOverflowError,
    EngineError,
    HullspeedError,
    RequestError,
)
from hullspeed.runtime.messages import Cancel, ClearCache, Delta, Shutdown, Submit
from hullspeed.runtime.process import delta_error
from hullspeed.runtime.service import Service

EOS = 9


class Scripted:
    """Answers every sampling span; each step takes a second."""

    def __init__(self, clock: VirtualClock, answer: Callable[[int, int], Sampled]) -> None:
        self._clock = clock
        self._answer = answer

    def execute(self, step: Step) -> StepResult:
        self._clock.advance(1.0)
        sampling = [span.sequence for span in step.spans if span.sample]
        return StepResult([self._answer(s.id, s.output_tokens) for s in sampling])


def service(
    answer: Callable[[int, int], Sampled] = lambda _, n: Sampled(n), *, max_running: int = 4
) -> Service:
    clock = VirtualClock()
    scheduler = build_scheduler(
        n_pages=16, page_tokens=4, max_running=max_running, step_tokens=8, max_context_tokens=48
    )
    limits = Limits(vocab=10, max_context_tokens=48, eos_token_ids=(EOS,))
    return Service(EngineLoop(scheduler, Scripted(clock, answer), clock, limits))


def submit(id_: int, prompt: list[int] | None = None, **sampling: object) -> Submit:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, **sampling})  # type: ignore[arg-type]
    return Submit(id=id_, prompt=[1, 2, 3] if prompt is None else prompt, sampling=params)


def drain(service: Service) -> list[Delta]:
    deltas = []
    while service.has_work:
        deltas += service.step()
    return deltas


def test_a_requests_deltas_from_first_to_last() -> None:
    engine = service()
    assert engine.handle(submit(1)) == []
    assert drain(engine) == [
        Delta(1, [0], cached_tokens=0, queue_s=0.0),
        Delta(1, [1]),
        Delta(1, [2], finish="length"),
    ]
    assert engine.step() == []
    assert engine.stats().generated_tokens_total == 3


def test_the_first_delta_tells_of_waiting_and_of_the_cache() -> None:
    engine = service(max_running=1)
    engine.handle(submit(1))
    engine.handle(submit(2, [1, 2, 3, 4, 5]))
    first = {d.id: d for d in drain(engine) if d.queue_s is not None}
    assert first[1].queue_s == 0.0
    assert first[2].queue_s == 3.0
    assert first[2].cached_tokens == 3
    engine.handle(submit(3, list(range(8)) * 3))  # a prompt of three steps
    (delta,) = [d for d in drain(engine) if d.queue_s is not None]
    assert delta.queue_s == 0.0


def test_logprobs_pass() -> None:
    engine = service(lambda _, n: Sampled(n, -0.5, (TokenLogprob(n, -0.5), TokenLogprob(7, -2.0))))
    engine.handle(submit(1, max_tokens=1))
    assert drain(engine)[0].logprobs == [(-0.5, ((0, -0.5), (7, -2.0)))]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (submit(5, []), RequestError),
        (submit(5, [99]), RequestError),
        (submit(5, [1] * 48), ContextOverflowError),
        (submit(5, max_tokens=100), ContextOverflowError),
        (submit(5, temperature=-3.0), RequestError),
        (submit(5, stop_token_ids=(55,)), RequestError),
        (submit(5, ["x"]), HullspeedError),  # type: ignore[list-item]
        (Submit(id=5, prompt=[1], sampling=None), HullspeedError),  # type: ignore[arg-type]
    ],
)
def test_a_bad_request_ends_alone(message: Submit, error: type[HullspeedError]) -> None:
    engine = service()
    engine.handle(submit(1))
    engine.step()
    (delta,) = engine.handle(message)
    assert (delta.id, delta.finish, delta.tokens) == (5, "error", [])
    assert isinstance(delta_error(delta), error)
    assert drain(engine)[-1] == Delta(1, [2], finish="length")


def test_a_row_that_fails_ends_alone() -> None:
    engine = service(lambda id_, n: Sampled(-1, error="NaN") if id_ == 2 else Sampled(n))
    engine.handle(submit(1))
    engine.handle(submit(2))
    deltas = drain(engine)
    (failed,) = [d for d in deltas if d.id == 2]
    assert (failed.finish, failed.error) == ("error", "NaN")
    assert [d.tokens for d in deltas if d.id == 1] == [[0], [1], [2]]


def test_cancel_frees_at_once_and_ignores_strangers() -> None:
    engine = service()
    engine.handle(submit(1, max_tokens=30))
    engine.handle(submit(2, max_tokens=30))
    engine.step()
    assert engine.handle(Cancel([1, 77])) == [Delta(1, [], finish="cancelled")]
    assert engine.handle(Cancel([1])) == []
    assert engine.stats().running == 1
    engine.handle(Cancel([2]))
    stats = engine.stats()
    assert (stats.pages_used, stats.running, stats.waiting) == (0, 0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert stats.pages_cached > 0
    engine.handle(ClearCache())
    assert engine.stats().pages_free == stats.pages_total


def test_ids_can_come_again_after_they_ended() -> None:
    engine = service()
    for _ in range(2):
        engine.handle(submit(1))
        engine.step()
        engine.handle(Cancel([1]))
    engine.handle(submit(1))
    assert [d.queue_s for d in drain(engine)] == [0.0, None, None]


def test_a_step_that_fails_is_the_engines_end() -> None:
    def broken(id_: int, n: int) -> Sampled:
        raise EngineError("broken")

    engine = service(broken)
    engine.handle(submit(1))
    with pytest.raises(EngineError):
        engine.step()


def test_shutdown() -> None:
    engine = service()
    engine.handle(Shutdown())
    assert engine.stopping


def test_capacity_is_its_own_error() -> None:
    delta = Delta(1, [], finish="error", error="too big", error_type="CapacityError")
    assert isinstance(delta_error(delta), CapacityError)
    assert isinstance(delta_error(Delta(1, [], finish="error", error_type="os")), EngineError)
