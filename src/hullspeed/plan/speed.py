"""Speed: what requests of the workload see, always with an interval and its source."""

from __future__ import annotations

import msgspec

from hullspeed.hardware.ceilings import Ceilings
from hullspeed.hardware.gpu import Gpu
from hullspeed.memory.budget import EngineSettings
from hullspeed.perf.roofline import Roofline
from hullspeed.perf.steady import Steady, prefill_seconds, steady_state
from hullspeed.perf.step import StepCost
from hullspeed.perf.work import Shape, StepSeconds
from hullspeed.plan.capacity import kv_dtype, memory_of, state_dtype, step_tokens
from hullspeed.plan.model import PlannedModel
from hullspeed.plan.workload import Workload

CPU_STEP_TOKENS = 512
_OTHER_SHAPES_ERROR = 0.3  # GEMM rates of a model twice as wide or half as wide differ by as much


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted number with its 90 % interval."""

    name: str
    unit: str
    value: float
    low: float
    high: float


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction for ``concurrency`` requests in flight.

    Attributes:
        ttft_s: Cold, shared prefix computed each time, between settled and burst.
        ttft_cached_s: With the shared prefix found in the cache.
        bound: What a decode step spends most of its time on.
        source: What the numbers rest on.
    """

    concurrency: int
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

    def quantities(self) -> list[Quantity]:
        """All of them, as a reader wants them listed."""
        cached = [self.ttft_cached_s] if self.ttft_cached_s else []
        return [self.ttft_s, *cached, self.itl_s, self.prefill_s, self.output_tokens_per_s]


class Predictor:
    """Speed of one model on one target; keeps the cost model between questions."""

    def __init__(self, cost: StepSeconds, *, step_tokens: int, request_s: float, stream_s: float,
                 ttft_factors: tuple[float, float], itl_factors: tuple[float, float],
                 source: str) -> None:  # fmt: skip
        self.cost = cost
        self.step_tokens = step_tokens
        self._request_s = request_s
        self._stream_s = stream_s
        self._ttft_factors = ttft_factors
        self._itl_factors = itl_factors
        # Prompts are bound by arithmetic, whose share of peak varies more with kernels than
        # bandwidth's does: at least a factor of two upwards where nothing was measured here.
        self._prefill_factors = (itl_factors[0], max(itl_factors[1], ttft_factors[1] ** 0.5))
        self._source = source

    @classmethod
    def on_gpu(cls, model: PlannedModel, gpu: Gpu, settings: EngineSettings) -> Predictor:
        """By roofline.

        Raises:
            UsageError: if no speeds are known for ``gpu``.
        """
        roofline = Roofline(
            model.arch,
            gpu,
            weight_bytes=model.weights.decoder,
            kv_dtype=kv_dtype(model.arch, settings),
            state_dtype=state_dtype(model.arch, settings),
            tp=settings.tp,
        )
        return cls(
            roofline,
            step_tokens=step_tokens(model.arch, memory_of(gpu), settings),
            request_s=roofline.efficiency.request_s,
            stream_s=0.0,
            ttft_factors=roofline.ttft_interval,
            itl_factors=roofline.itl_interval,
            source=roofline.history,
        )

    @classmethod
    def on_machine(
        cls, model: PlannedModel, ceilings: Ceilings, weight_dtype: str, step_tokens: int | None
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
        factors = (1 / (1 + error), 1 + error)
        return cls(
            StepCost(model.arch, ceilings, weight_dtype),
            step_tokens=step_tokens or CPU_STEP_TOKENS,
            request_s=over.request_s,
            stream_s=over.stream_token_s,
            ttft_factors=factors,
            itl_factors=factors,
            source=how,
        )

    def speed(self, workload: Workload, concurrency: int) -> Speed:
        """Speed with ``concurrency`` requests in flight."""
        cold = self._steady(workload, concurrency, 0)
        cached = None
        if workload.shared_prefix:
            warm = self._steady(workload, concurrency, workload.shared_prefix)
            cached = self._ttft("TTFT, shared prefix cached", warm, concurrency)
        low, high = self._itl_factors
        per_s = (warm if workload.shared_prefix else cold).output_tokens_per_s
        return Speed(
            concurrency=concurrency,
            ttft_s=self._ttft("TTFT", cold, concurrency),
            ttft_settled_s=cold.ttft_settled_s,
            ttft_burst_s=cold.ttft_burst_s,
            ttft_cached_s=cached,
            itl_s=Quantity(
                name="ITL", unit="s", value=cold.itl_s, low=cold.itl_s * low, high=cold.itl_s * high
            ),
            prefill_s=self.prefill(workload.isl),
            output_tokens_per_s=Quantity(
                name="output", unit="tok/s", value=per_s, low=per_s / high, high=per_s / low
            ),
            requests_per_s=per_s / workload.osl,
            bound=self._bound(workload, concurrency),
            source=self._source,
        )

    def prefill(self, n_tokens: int, cached_tokens: int = 0) -> Quantity:
        """One prompt alone, cold but for ``cached_tokens``."""
        seconds = prefill_seconds(self.cost, n_tokens, cached_tokens, self.step_tokens)
        low, high = self._prefill_factors
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

    def _steady(self, workload: Workload, concurrency: int, cached_tokens: int) -> Steady:
        return steady_state(
            self.cost,
            isl=workload.isl,
            osl=workload.osl,
            concurrency=concurrency,
            cached_tokens=cached_tokens,
            step_tokens=max(self.step_tokens, concurrency + 1),
            request_s=self._request_s,
            stream_token_s=self._stream_s,
        )

    def _ttft(self, name: str, steady: Steady, concurrency: int) -> Quantity:
        # Alone, nothing queues: only the prompt's own computation is uncertain.
        low, high = self._ttft_factors if concurrency > 1 else self._prefill_factors
        return Quantity(
            name=name,
            unit="s",
            value=steady.ttft_s,
            low=min(steady.ttft_settled_s, steady.ttft_s * low),
            high=max(steady.ttft_burst_s, steady.ttft_s * high),
        )

    def _bound(self, workload: Workload, concurrency: int) -> str:
        """The largest term of a decode step, in words."""
        shapes = [Shape(1, workload.isl + workload.osl // 2)] * concurrency
        cost = self.cost
        if isinstance(cost, StepCost | Roofline):
            parts = cost.parts(shapes)._asdict()
            name = max(parts, key=lambda key: parts[key])
            return f"{_WORDS[name]} ({parts[name] / sum(parts.values()):.0%} of a decode step)"
        return "unknown"


_WORDS = {
    "linear_s": "linear layers: reading weights, or multiplying at large batches",
    "head_s": "the output head",
    "attention_s": "attention arithmetic",
    "decode_attention_s": "reading the KV cache",
    "chunk_attention_s": "attention arithmetic",
    "kv_s": "reading the KV cache",
    "state_s": "reading and writing recurrent state",
    "reduce_s": "communication between GPUs",
    "overhead_s": "launches and scheduling",
    "layer_overhead_s": "calls between kernels",
    "step_overhead_s": "scheduling and sampling",
}
