"""Speed: what requests of the workload see, always with an interval and its source."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from hullspeed.hardware.ceilings import Ceilings
from hullspeed.hardware.gpu import Gpu
from hullspeed.memory.budget import EngineSettings
from hullspeed.perf.calibration import Calibration, spread_on_gpu
from hullspeed.perf.fitted import (
    FittedCost,
    Spread,
    coefficients_of,
    engine_of,
    kinds_of,
    regime_of,
)
from hullspeed.perf.measured_tables import CostModel, TableCost, table_cost
from hullspeed.perf.nearest import PublicPoint, nearest_points
from hullspeed.perf.replay import Ask, Engine, Served, replay
from hullspeed.perf.speculative import MTP_ACCEPT, SpeculativeCost
from hullspeed.perf.steady import Steady, prefill_seconds, steady_state
from hullspeed.perf.step import StepCost
from hullspeed.perf.work import Shape, StepSeconds
from hullspeed.plan.capacity import kv_dtype, memory_of, state_dtype, step_tokens
from hullspeed.plan.model import PlannedModel
from hullspeed.plan.workload import Workload

CPU_STEP_TOKENS = 256
_LEAST_REPLAYED, _LEAST_ARRIVALS = 24, 200
_MOST_REPLAYED = 128  # in flight; a longer queue only waits longer
_APART = 0.1  # lengths vary by as much around the typical ones
_OTHER_SHAPES_ERROR = 0.3  # GEMM rates of a model twice as wide or half as wide differ by as much


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted number with its 90 % interval."""

    name: str
    unit: str
    value: float
    low: float
    high: float


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one limit is used.

    Attributes:
        used: Share of it, 1 at the limit.
        what: The numbers behind it.
    """

    name: str
    used: float
    what: str


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction for ``concurrency`` requests in flight, of which ``running`` run at once; the
    others wait for their ends.

    Attributes:
        ttft_s: Cold, shared prefix computed each time, between settled and burst.
        ttft_cached_s: With the shared prefix found in the cache.
        ttft_p99_s: Slowest of a hundred, the burst at the start left out; with the shared prefix
            found in the cache if there is one, as are ITL and output.
        goodput_per_s: Requests per second that meet the workload's objective; ``None`` without one.
        decode_bound_tokens_per_s: Of one request alone: bandwidth over the bytes that a token
            reads. No engine is faster without speculation.
        limits: Bandwidth, compute and, with several GPUs, the link: how much of each is used.
        nearest: Published measurements that come closest.
        bound: What a decode step spends most of its time on.
        source: What the numbers rest on.
        cost_model: Which cost of a step answered: ``fitted``, ``tables`` or ``measured here``.
    """

    concurrency: int
    running: int
    ttft_s: Quantity
    ttft_settled_s: float
    ttft_burst_s: float
    ttft_cached_s: Quantity | None
    itl_s: Quantity
    prefill_s: Quantity
    output_tokens_per_s: Quantity
    requests_per_s: float
    bound: str
    source: str
    cost_model: str = "fitted"
    ttft_p99_s: Quantity | None = None
    goodput_per_s: float | None = None
    decode_bound_tokens_per_s: float = 0.0
    limits: tuple[Limit, ...] = ()
    nearest: tuple[PublicPoint, ...] = ()

    def quantities(self) -> list[Quantity]:
        """All of them, as a reader wants them listed."""
        cached = [self.ttft_cached_s] if self.ttft_cached_s else []
        tail = [self.ttft_p99_s] if self.ttft_p99_s else []
        return [*cached, self.ttft_s, *tail, self.itl_s, self.prefill_s, self.output_tokens_per_s]


class _Seen(NamedTuple):
    """What requests of a replay saw; ``good`` is the share within the objectives."""

    ttft_s: float
    ttft_p99_s: float
    good: float | None


class Predictor:
    """Speed of one model on one target; keeps the cost model between questions."""

    def __init__(self, cost: StepSeconds, *, step_tokens: int, request_s: float, stream_s: float,
                 spread: Callable[[str, str], Spread], source: str, engine: Engine | None = None,
                 near: Callable[[Workload, int], tuple[PublicPoint, ...]] | None = None,
                 prompt_token_s: float = 0.0, cost_model: str = "fitted") -> None:  # fmt: skip
        self.cost = cost
        self.step_tokens = step_tokens
        self._request_s = request_s
        self._prompt_token_s = prompt_token_s
        self._stream_s = stream_s
        self._spread = spread  # of a metric in a regime
        self._source = source
        self._cost_model = cost_model
        self._engine = (engine or Engine())._replace(
            step_tokens=step_tokens, request_s=request_s, stream_token_s=stream_s
        )
        self._near = near

    @classmethod
    def on_gpu(
        cls,
        model: PlannedModel,
        gpu: Gpu,
        settings: EngineSettings,
        calibration: Calibration | None = None,
        cost_model: CostModel = "fitted",
    ) -> Predictor:
        """By the cost fitted to published measurements, scaled by ``calibration`` if this model
        was measured on this GPU; or by the measured tables, which that cost then guards.

        Raises:
            UsageError: if no speeds are known for ``gpu``, or the tables do not hold the case.
            BrokenStackError: if tables are asked for and not installed.
        """
        coefficients = coefficients_of(settings.engine)
        kinds = kinds_of(model.arch, drafts=settings.draft_tokens > 0)

        def spread(metric: str, regime: str) -> Spread:
            return spread_on_gpu(
                metric, 90, regime, gpu=gpu.name, kinds=kinds, calibration=calibration,
                tables=cost_model == "tables",
            )  # fmt: skip

        if calibration is not None:
            coefficients = calibration.apply(coefficients)
        plain = FittedCost(
            model.arch,
            gpu,
            engine=settings.engine,
            weight_bytes=model.weights.decoder,
            kv_dtype=kv_dtype(model.arch, settings),
            state_dtype=state_dtype(model.arch, settings),
            tp=settings.tp,
            eager=settings.enforce_eager,
            coefficients=coefficients,
        )
        steps: FittedCost | TableCost = plain
        if cost_model == "tables":
            steps = table_cost(
                model.arch, gpu.name, settings.tp, settings.engine, plain,
                kv_dtype(model.arch, settings), model=model.name,
            )  # fmt: skip
        cost: StepSeconds = steps
        source = coefficients.origin
        if settings.draft_tokens:
            accept = min(MTP_ACCEPT, 1 + 0.75 * settings.draft_tokens)
            cost = SpeculativeCost(steps, settings.draft_tokens, accept)
            source += f"; {accept:.1f} tokens a step assumed of {settings.draft_tokens} drafted"
        engine = engine_of(settings.engine, gpu)
        return cls(
            cost,
            step_tokens=step_tokens(model.arch, memory_of(gpu), settings),
            request_s=engine.request_s + coefficients.first_token_s,
            stream_s=0.0,
            spread=spread,
            source=source,
            engine=engine,
            near=_near(model, gpu, settings),
            cost_model=cost_model,
        )

    @classmethod
    def on_machine(
        cls,
        model: PlannedModel,
        ceilings: Ceilings,
        weight_dtype: str,
        step_tokens: int | None,
        kv_dtype: str = "fp32",
    ) -> Predictor:
        """From measured ceilings of this machine."""
        over, error = ceilings.overheads, ceilings.relative_error
        how = {
            "calibrated": f"this machine's kernels, measured {ceilings.measured_at}",
            "quick": "NumPy on this machine for a second; `hullspeed calibrate` narrows it",
        }[ceilings.source]
        widths = (model.arch.hidden, ceilings.hidden or model.arch.hidden)
        if max(widths) > 2 * min(widths):
            error += _OTHER_SHAPES_ERROR
            how += f", on shapes of width {ceilings.hidden:,}"
        if not ceilings.quiet:
            how += ", while other processes disturbed it"
        factors = Spread(1 / (1 + error), 1 + error)
        return cls(
            StepCost(model.arch, ceilings, weight_dtype, kv_dtype),
            step_tokens=step_tokens or CPU_STEP_TOKENS,
            request_s=over.request_s,
            prompt_token_s=over.prompt_token_s,
            stream_s=over.stream_token_s,
            spread=lambda _metric, _regime: factors,
            source=how,
            cost_model="measured here",
        )

    def speed(self, workload: Workload, concurrency: int, most: int | None = None) -> Speed:
        """Speed with ``concurrency`` requests in flight, where memory runs ``most`` at once: all of
        them unless given.
        """
        most = most or concurrency
        running = min(concurrency, most)
        cold = self._steady(workload, running, 0)
        first = self._play(workload, concurrency, most, 0)
        alone_s = cold.prefill_s + self._request_seconds(workload)
        waiting = concurrency > running
        regime = regime_of(first.ttft_s / alone_s)
        name = "TTFT, prefix computed" if workload.shared_prefix else "TTFT"
        ttft = self._ttft(name, cold, regime, first.ttft_s, waiting=waiting)
        usual, seen, cached = cold, first, None
        if workload.shared_prefix:
            usual = self._steady(workload, running, workload.shared_prefix)
            seen = self._play(workload, concurrency, most, workload.shared_prefix)
            name = "TTFT, shared prefix cached"
            cached = self._ttft(name, usual, regime, seen.ttft_s, waiting=waiting)
        low, high = self._spread("tpot", regime)
        slow, fast = self._spread("output", regime)
        per_s = usual.output_tokens_per_s
        if workload.rate is not None:  # no more comes out than goes in
            per_s = min(per_s, workload.rate * workload.osl)
        itl_s = usual.itl_s
        return Speed(
            concurrency=concurrency,
            running=running,
            ttft_s=ttft,
            ttft_p99_s=self._ttft("TTFT p99", usual, regime, seen.ttft_p99_s, waiting=waiting),
            goodput_per_s=None if seen.good is None else seen.good * per_s / workload.osl,
            decode_bound_tokens_per_s=self._decode_bound(workload),
            limits=self._limits(workload, running, cold),
            nearest=self._near(workload, concurrency) if self._near else (),
            ttft_settled_s=cold.ttft_settled_s,
            ttft_burst_s=cold.ttft_burst_s,
            ttft_cached_s=cached,
            itl_s=Quantity(name="ITL", unit="s", value=itl_s, low=itl_s * low, high=itl_s * high),
            prefill_s=self.prefill(workload.isl),
            output_tokens_per_s=Quantity(
                name="output", unit="tok/s", value=per_s, low=per_s * slow, high=per_s * fast
            ),
            requests_per_s=per_s / workload.osl,
            bound=self._bound(workload, running),
            source=self._told(),
            cost_model=self._cost_model,
        )

    def _told(self) -> str:
        """What the numbers rest on; of tables also how many steps the guard answered."""
        steps = self.cost.cost if isinstance(self.cost, SpeculativeCost) else self.cost
        if isinstance(steps, TableCost):
            return f"{steps.source}; requests and the guard: {self._source}"
        return self._source

    def prefill(self, n_tokens: int, cached_tokens: int = 0) -> Quantity:
        """One prompt alone, cold but for ``cached_tokens``."""
        seconds = prefill_seconds(self.cost, n_tokens, cached_tokens, self.step_tokens)
        low, high = self._spread("ttft", "alone")
        return Quantity(
            name=f"prefill of {n_tokens:,} tokens alone",
            unit="s",
            value=seconds,
            low=seconds * low,
            high=seconds * high,
        )

    def concurrency_for(self, workload: Workload, rate: float, most: int) -> int | None:
        """Least number of requests in flight that completes ``rate`` requests per second, or
        ``None`` if not even ``most`` do.
        """
        low, high = 1, 1
        while self._steady(workload, high, workload.shared_prefix).requests_per_s < rate:
            if high >= most:
                return None
            low, high = high, min(2 * high, most)
        while low < high:
            middle = (low + high) // 2
            enough = self._steady(workload, middle, workload.shared_prefix).requests_per_s >= rate
            low, high = (low, middle) if enough else (middle + 1, high)
        return high

    def _request_seconds(self, workload: Workload) -> float:
        return self._request_s + self._prompt_token_s * workload.isl

    def _steady(self, workload: Workload, concurrency: int, cached_tokens: int) -> Steady:
        return steady_state(
            self.cost,
            isl=workload.isl,
            osl=workload.osl,
            concurrency=concurrency,
            cached_tokens=cached_tokens,
            step_tokens=max(self.step_tokens, concurrency + 1),
            request_s=self._request_seconds(workload),
            stream_token_s=self._stream_s,
        )

    def _play(self, workload: Workload, concurrency: int, most: int, cached_tokens: int) -> _Seen:
        """The workload played, lengths a little apart as requests' are: as arrivals of its rate if
        so many are completed, else as a closed loop. Of a queue longer than is worth playing, waits
        grow with its length.
        """
        rng = random.Random(0)  # noqa: S311 - a workload, not a secret
        running = min(concurrency, most)
        in_flight = min(concurrency, max(running, _MOST_REPLAYED))
        n_asks = in_flight + max(_LEAST_REPLAYED, 3 * running)
        rate = workload.rate
        if rate is not None:
            steady = self._steady(workload, running, cached_tokens)
            rate = rate if steady.requests_per_s >= rate else None
        if rate is not None:
            n_asks = in_flight + max(_LEAST_ARRIVALS, 3 * running)
            running = most  # more than usual when they come close together
        asks, at_s = [], 0.0
        for _ in range(n_asks):
            new, osl = (
                max(1, round(n * rng.uniform(1 - _APART, 1 + _APART)))
                for n in (workload.isl - cached_tokens, workload.osl)
            )
            asks.append(Ask(new + cached_tokens, osl, cached_tokens, at_s))
            at_s += rng.expovariate(rate) if rate is not None else 0.0
        engine = self._engine._replace(
            step_tokens=max(self.step_tokens, running + 1), max_running=running,
            first_token_s=0.0, request_s=self._request_seconds(workload),
        )  # fmt: skip
        closed = 0 if rate is not None else in_flight
        served = replay(self.cost, asks, engine, concurrency=closed).served[in_flight:]
        ordered = sorted(one.ttft_s for one in served)
        longer = concurrency / in_flight
        return _Seen(
            ttft_s=longer * statistics.median(ordered),
            ttft_p99_s=longer * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            good=_good(workload, served),
        )

    def _ttft(
        self, name: str, steady: Steady, regime: str, value: float, *, waiting: bool
    ) -> Quantity:
        """With its interval; of requests that do not wait for others' ends at least from settled to
        burst.
        """
        low, high = (value * factor for factor in self._spread("ttft", regime))
        if not waiting:
            low, high = min(steady.ttft_settled_s, low), max(steady.ttft_burst_s, high)
        return Quantity(name=name, unit="s", value=value, low=low, high=high)

    def _decode_bound(self, workload: Workload) -> float:
        """Tokens per second of one request if nothing but its bytes took time."""
        plain = _plain(self.cost)
        if not isinstance(plain, FittedCost):
            return 0.0
        terms = plain.terms.of(1, workload.isl + workload.osl // 2, (), 1e-9, 1.0)
        return 1 / (terms.weights_s + terms.kv_s + terms.state_s)

    def _limits(self, workload: Workload, concurrency: int, steady: Steady) -> tuple[Limit, ...]:
        """Shares of peak over a cycle in which every request computes its prompt and its tokens."""
        plain = _plain(self.cost)
        if not isinstance(plain, FittedCost):
            return ()
        middle = workload.isl + workload.osl // 2
        decode = plain.loads([Shape(1, middle)] * concurrency)
        # A prompt rides on decode steps: what it adds is its arithmetic and the bytes of its rows.
        prompt = plain.loads([Shape(workload.isl, 0)])
        cycle_s = concurrency / steady.requests_per_s
        gpu = plain.terms.gpu
        rows = (
            ("bandwidth", workload.osl * decode.bandwidth_s,
             f"{gpu.bandwidth_bytes_per_s / 1e9:,.0f} GB/s a GPU"),
            ("compute", workload.osl * decode.compute_s + concurrency * prompt.compute_s,
             f"{gpu.peak_flops_per_s(plain.terms.compute_dtype) / 1e12:,.0f} TFLOP/s a GPU"),
            ("interconnect", workload.osl * decode.link_s + concurrency * prompt.link_s,
             f"{gpu.interconnect_bytes_per_s / 2e9:,.0f} GB/s a direction"),
        )  # fmt: skip
        return tuple(
            Limit(name=name, used=min(seconds / cycle_s, 1.0), what=what)
            for name, seconds, what in rows
            if seconds > 0
        )

    def _bound(self, workload: Workload, concurrency: int) -> str:
        """The largest term of a decode step, in words."""
        shapes = [Shape(1, workload.isl + workload.osl // 2)] * concurrency
        cost = _plain(self.cost)
        if isinstance(cost, StepCost | FittedCost):
            parts = cost.parts(shapes)._asdict()
            name = max(parts, key=lambda key: parts[key])
            return f"{_WORDS[name]} ({parts[name] / sum(parts.values()):.0%} of a decode step)"
        return "unknown"


def _plain(cost: StepSeconds) -> StepSeconds:
    """The cost below speculation and tables: the one whose parts are known."""
    if isinstance(cost, SpeculativeCost):
        cost = cost.cost
    return cost.guard if isinstance(cost, TableCost) else cost


def _good(workload: Workload, served: Sequence[Served]) -> float | None:
    """Share of requests within both objectives; ``None`` if there are none."""
    if workload.ttft_s is None and workload.tpot_s is None:
        return None
    good = sum(
        (workload.ttft_s is None or one.ttft_s <= workload.ttft_s)
        and (workload.tpot_s is None or one.tpot_s <= workload.tpot_s)
        for one in served
    )
    return good / len(served)


def _near(
    model: PlannedModel, gpu: Gpu, settings: EngineSettings
) -> Callable[[Workload, int], tuple[PublicPoint, ...]]:
    def find(workload: Workload, concurrency: int) -> tuple[PublicPoint, ...]:
        return nearest_points(
            params=model.arch.params_per_token(), gpu=gpu.name, tp=settings.tp,
            quant=model.arch.quant, engine=settings.engine, isl=workload.isl, osl=workload.osl,
            concurrency=concurrency, speculative=settings.draft_tokens > 0,
        )  # fmt: skip

    return find


_WORDS = {
    "linear_s": "linear layers: reading weights, or multiplying at large batches",
    "head_s": "the output head",
    "attention_s": "attention arithmetic",
    "decode_attention_s": "reading the KV cache",
    "chunk_attention_s": "attention arithmetic",
    "kv_s": "reading the KV cache",
    "state_s": "reading and writing recurrent state",
    "reduce_s": "communication between GPUs",
    "rows_s": "norms and residuals between the products",
    "overhead_s": "launches and scheduling",
    "layer_overhead_s": "calls between kernels",
    "step_overhead_s": "scheduling and sampling",
}
