"""The measured ceilings: physical, and adding up to what whole steps take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import msgspec
import pytest

from hullspeed.arch.mixers import FullAttention
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Layer, ModelArch
from hullspeed.clock import VirtualClock
from hullspeed.core.step import Step, StepResult
from hullspeed.errors import UnsupportedModelError
from hullspeed.hardware.ceilings import KERNELS_VERSION, Ceilings, Curve
from hullspeed.hardware.machine import detect_machine
from hullspeed.kernels.cpu.backend import CpuKernels
from hullspeed.models.decoder import Decoder
from hullspeed.perf import step_fit
from hullspeed.perf.step import StepCost
from hullspeed.perf.work import Shape
from hullspeed.runtime import ceilings as measured
from hullspeed.runtime.ceilings import (
    RandomWeights,
    best_seconds,
    default_arch,
    measure_ceilings,
    shortened,
    synthetic_batch,
)
from hullspeed.runtime.executor import TorchExecutor
from hullspeed.runtime.sampler import Sampler
from hullspeed.twin.closed_loop import Simulation, TwinEngine, simulate
from hullspeed.twin.load import Load
from hullspeed.twin.outcome import percentile


def small_arch() -> ModelArch:
    mixer = FullAttention(q_heads=4, kv_heads=2, head_dim=64, rotary_dim=64)
    layer = Layer(mixer, DenseMlp(intermediate=512))
    return replace(
        default_arch(), hidden=256, vocab=512, layers=(layer,) * 4, max_context_tokens=2048
    )


@pytest.fixture(scope="module")
def small() -> Ceilings:
    return measure_ceilings(small_arch(), threads=1)


def test_every_rate_is_measured_and_positive(small: Ceilings) -> None:
    assert small.source == "calibrated"
    assert small.fingerprint == detect_machine().fingerprint(KERNELS_VERSION)
    curves = (
        small.linear_flops_per_s["fp16"],
        small.head_flops_per_s["fp16"],
        small.decode_bytes_per_s,
        small.chunk_flops_per_s,
    )
    for curve in curves:
        assert list(curve.sizes) == sorted(set(curve.sizes))
        assert all(1e6 < value < 1e14 for value in curve.values)
    over = small.overheads
    assert all(0 <= value < 1 for value in (over.layer_s, over.layer_token_s, over.step_s))
    assert small.relative_error >= 0.2


def test_noise_is_said(small: Ceilings) -> None:
    disturbed = any("other processes" in note for note in small.notes)
    assert disturbed == (not small.quiet)


def test_a_model_that_the_engine_does_not_run_is_refused() -> None:
    with pytest.raises(UnsupportedModelError):
        measure_ceilings(replace(small_arch(), family="mamba"))


def test_the_short_model_has_the_layers_of_the_long_one() -> None:
    arch = default_arch()
    short = shortened(arch)
    assert 4 <= len(short.layers) <= len(arch.layers)
    assert short.layers[0] == arch.layers[0]
    per_layer = 2 * sum(t.elements for t in arch.layers[0].tensors(arch.hidden))
    assert len(short.layers) * per_layer >= 192 * 2**20 or len(short.layers) == len(arch.layers)


def test_spans_of_a_synthetic_batch_share_no_pages() -> None:
    batch, n_pages = synthetic_batch([(1, 100), (70, 0), (3, 64)])
    assert n_pages == 2 + 2 + 2
    assert len(batch.tokens) == 74
    used = [set(row[:2].tolist()) for row in batch.page_table]
    assert not used[0] & used[1]
    assert not used[1] & used[2]


def test_sequences_that_share_their_past_share_pages() -> None:
    batch, n_pages = synthetic_batch([(1, 100)] * 3, shared=True)
    assert n_pages == 2
    assert (batch.page_table == batch.page_table[0]).all()


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.2])
def test_whole_steps_are_met_again(small: Ceilings, factor: float) -> None:
    """Layers with known overheads, and steps that are all a little slower than their parts."""
    arch = small_arch()
    dtype = next(iter(small.linear_flops_per_s))
    none = Curve((1.0,), (1.0,))
    over = msgspec.structs.replace(small.overheads, step_s=0.0, sequence_s=0.0)
    bare = msgspec.structs.replace(
        small, decode_factor=none, chunk_factor=none, mixed_factor=none,
        overheads=msgspec.structs.replace(over, layer_s=0.0, layer_token_s=0.0),
    )  # fmt: skip
    truth = msgspec.structs.replace(
        bare, overheads=msgspec.structs.replace(over, layer_s=1e-4, layer_token_s=1e-5)
    )
    cost = StepCost(arch, truth, dtype)

    def seconds(spans: step_fit.Spans) -> float:
        mixed = 1.1 if len(spans) > 1 and spans[-1][0] > 1 else 1.0
        return factor * mixed * cost.seconds([Shape(n, start) for n, start in spans])

    steps = [
        [(1, 511)], [(1, 511)] * 8, [(1, 255)] * 64, [(64, 0)], [(256, 0)], [(256, 256)],
        [*[(1, 511)] * 31, (225, 128)],
    ]  # fmt: skip
    found = step_fit.fit_steps(bare, arch, dtype, [(spans, seconds(spans)) for spans in steps])
    fitted = StepCost(arch, found, dtype)
    unseen: list[step_fit.Spans] = [[(1, 511)] * 4, [(128, 64)], [*[(1, 300)] * 31, (225, 64)]]
    for spans in (*steps, *unseen):
        ours = fitted.seconds([Shape(n, start) for n, start in spans])
        assert ours == pytest.approx(seconds(spans), rel=0.1), spans


def test_attention_is_as_fast_as_whole_steps_show(small: Ceilings) -> None:
    """Decode attention in steps is slower than alone where every sequence has its own past, and
    faster where all share one; what lies far back costs more than what is near.
    """
    arch = small_arch()
    dtype = next(iter(small.linear_flops_per_s))
    none = Curve((1.0,), (1.0,))
    rate = small.decode_bytes_per_s.values[0]
    bare = msgspec.structs.replace(
        small, decode_factor=none, chunk_factor=none, mixed_factor=none,
        decode_bytes_per_s=Curve((1.0,), (rate,)), shared_bytes_per_s=Curve((1.0,), (2 * rate,)),
        overheads=msgspec.structs.replace(
            small.overheads, step_s=0.0, sequence_s=0.0, layer_s=0.0, layer_token_s=0.0
        ),
    )  # fmt: skip
    truth = msgspec.structs.replace(
        bare, decode_bytes_per_s=Curve((1.0,), (0.7 * rate,)),
        shared_bytes_per_s=Curve((1.0,), (2.5 * rate,)), decode_factor=Curve((1.0,), (1.1,)),
        far_decode_bytes_per_s=Curve((1.0,), (0.6 * rate,)),
        far_shared_bytes_per_s=Curve((1.0,), (1.2 * rate,)),
    )  # fmt: skip

    def shapes(n: int, context: int, *, shared: bool) -> list[Shape]:
        others = context if shared else 0
        return [Shape(1, context), *[Shape(1, context, True, others)] * (n - 1)]

    cost = StepCost(arch, truth, dtype)
    own, shared = (
        [([(1, c)] * n, cost.seconds(shapes(n, c, shared=alike))) for n in (1, 4, 32) for c in cs]
        for alike, cs in ((False, (63, 511, 2047)), (True, (511, 2047)))
    )
    found = StepCost(arch, step_fit.fit_steps(bare, arch, dtype, own, shared[2:]), dtype)
    for n in (1, 4, 32):
        for alike in (False, True):
            for context in (400, 1200):
                unseen = shapes(n, context, shared=alike)
                assert found.seconds(unseen) == pytest.approx(cost.seconds(unseen), rel=0.06), n


def test_the_best_of_many_runs_is_taken() -> None:
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            time.sleep(0.004)

    assert best_seconds(run, enough_s=0.02, most_s=60) < 0.003
    assert calls >= 4


class ThreadTime:
    """The processor time of this thread: what others do to the machine counts less."""

    perf_counter = staticmethod(time.thread_time)


@pytest.fixture(scope="module")
def own_time() -> Iterator[Ceilings]:
    """SmolLM2's shapes on one thread, in its own processor time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "time", ThreadTime)
        yield measure_ceilings(default_arch(), threads=1)


@pytest.mark.deep
def test_kernels_timed_alone_add_up_to_whole_steps(own_time: Ceilings) -> None:
    """Median error within 10 %, none beyond 30 %, on steps that the fit did not see."""
    arch = default_arch()
    cost = StepCost(arch, own_time)
    decoder = Decoder(arch, RandomWeights(arch), CpuKernels(threads=1))
    steps = (
        [(1, 1500)],
        [(1, 200)] * 8,
        [(1, 1500)] * 8,
        [(1, 512)] * 32,
        [(300, 700)],
        [(512, 1024)],
        [(100, 0)],
        [*[(1, 500)] * 8, (500, 0)],
    )
    errors = []
    for spans in steps:
        batch, n_pages = synthetic_batch(spans)
        decoder.allocate_kv(n_pages, 64)

        def run(batch: object = batch) -> None:
            decoder.forward(batch)  # type: ignore[arg-type]

        parts = cost.parts([Shape(n, start) for n, start in spans])
        errors.append((parts.total_s - parts.step_overhead_s) / best_seconds(run) - 1)
    assert median(abs(error) for error in errors) < 0.10, errors
    assert max(abs(error) for error in errors) < 0.30, errors


class TimedExecutor:
    """A real executor under the twin's clock: each step takes the thread's own processor time."""

    def __init__(self, executor: TorchExecutor, clock: VirtualClock) -> None:
        self._executor = executor
        self._clock = clock

    def execute(self, step: Step) -> StepResult:
        start = time.thread_time()
        result = self._executor.execute(step)
        self._clock.advance(time.thread_time() - start)
        return result


@pytest.mark.deep
@pytest.mark.parametrize(
    "load",
    [
        Load(isl_tokens=300, osl_tokens=24, requests=2, concurrency=1),
        Load(isl_tokens=300, osl_tokens=24, requests=16, concurrency=8),
        Load(isl_tokens=300, osl_tokens=24, requests=16, concurrency=8, cache="cached"),
    ],
    ids=["one", "eight", "eight cached"],
)
def test_the_twin_predicts_what_the_real_executor_takes(load: Load, own_time: Ceilings) -> None:
    """The same load on the same scheduler, once with step costs and once with torch: medians of
    TTFT and ITL within 20 %.
    """
    arch = default_arch()
    decoder = Decoder(arch, RandomWeights(arch), CpuKernels(threads=1))
    decoder.allocate_kv(100, 64)
    engine = TwinEngine(vocab=arch.vocab, max_context_tokens=2048, n_pages=100)
    cost = StepCost(arch, own_time)
    predicted = simulate(engine, cost, load)

    def real(clock: VirtualClock) -> TimedExecutor:
        return TimedExecutor(TorchExecutor(decoder, Sampler(arch.vocab)), clock)

    seen = Simulation(engine, cost, load, executor=real).run()
    assert (seen.steps, seen.cached_tokens) == (predicted.steps, predicted.cached_tokens)
    errors = {
        name: percentile(getattr(predicted, name), 0.5) / percentile(getattr(seen, name), 0.5) - 1
        for name in ("ttft_s", "itl_s")
    }
    assert all(abs(error) < 0.2 for error in errors.values()), errors
