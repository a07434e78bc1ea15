"""What /metrics says: our names, and vLLM's for the same values so that its dashboards work.

The table ``NAMES`` is the contract (a snapshot test holds it). Names, buckets and meanings of the
``vllm:`` columns follow vLLM 0.33's ``v1/metrics/loggers.py``; finer boundaries are added at the
low end of its latency buckets, none of its own are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hullspeed.runtime.messages import EngineStats, ModelInfo
from hullspeed.server.histogram import Histogram, one_two_five

# fmt: off
TTFT_BUCKETS_S = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
    640, 2560,
)
ITL_BUCKETS_S = (
    .001, .002, .004, .006, .008, .01, .015, .02, .025, .035, .05, .075, .1, .15, .2, .3, .4, .5,
    .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
LATENCY_BUCKETS_S = (
    .001, .005, .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40,
    50, 60, 120, 240, 480, 960, 1920, 7680,
)
HTTP_BUCKETS_S = (.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300)
N_BUCKETS = (1, 2, 5, 10, 20)
MOST_TOKENS = 1_000_000  # one series for every model, so that dashboards can add servers up
# fmt: on


class Name(NamedTuple):
    """One value: the attribute that holds it, our name, vLLM's name if it has one, and help."""

    field: str
    ours: str
    vllm: str | None
    help: str


GAUGES = (
    Name("running", "requests_running", "num_requests_running", "Sequences being computed."),
    Name("waiting", "requests_waiting", "num_requests_waiting", "Sequences that wait."),
    Name("kv_usage", "kv_usage_ratio", "kv_cache_usage_perc", "Share of KV pages in use, 0 to 1."),
    Name("pages_free", "kv_pages_free", None, "KV pages that nobody holds."),
    Name("pages_cached", "kv_pages_cached", None, "KV pages held by the prefix cache alone."),
    Name("pages_used", "kv_pages_used", None, "KV pages held by running sequences."),
    Name("pages_total", "kv_pages_total", None, "KV pages there are."),
    Name(
        "window_pages_used",
        "kv_window_pages_used",
        None,
        "KV pages of layers with a window held by running sequences.",
    ),
    Name(
        "window_pages_total",
        "kv_window_pages_total",
        None,
        "KV pages of layers with a window; 0 where they share the others'.",
    ),
    Name("step_s_last", "step_seconds_last", None, "Duration of the last step."),
    Name("step_tokens_last", "step_tokens_last", None, "Tokens of the last step."),
    Name("heartbeat_age_s", "engine_heartbeat_age_seconds", None, "Since the engine last spoke."),
    Name("ready", "ready", None, "1 while requests are admitted."),
    Name("in_flight", "requests_in_flight", None, "Sequences submitted and not yet ended."),
)

COUNTERS = (
    Name("steps_total", "steps", None, "Engine steps."),
    Name("prefix_queried_total", "prefix_cache_queries", "prefix_cache_queries",
         "Prompt tokens looked up in the prefix cache."),
    Name("prefix_hit_total", "prefix_cache_hits", "prefix_cache_hits",
         "Prompt tokens found in the prefix cache."),
    Name("preemptions_total", "preemptions", "num_preemptions", "Sequences preempted."),
    Name("prompt_tokens", "prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests."),
    Name("cached_tokens", "prompt_tokens_cached", "prompt_tokens_cached",
         "Prompt tokens not computed because they were cached."),
    Name("generation_tokens", "generation_tokens", "generation_tokens", "Output tokens."),
    Name("restarts", "engine_restarts", None, "Times the engine was started again."),
)  # fmt: skip

HISTOGRAMS = (
    Name("ttft_s", "time_to_first_token_seconds", "time_to_first_token_seconds",
         "Arrival to first output token."),
    Name("itl_s", "inter_token_latency_seconds", "inter_token_latency_seconds",
         "Between output tokens."),
    Name("tpot_s", "request_time_per_output_token_seconds",
         "request_time_per_output_token_seconds",
         "Mean time between output tokens of a request."),
    Name("e2e_s", "e2e_request_latency_seconds", "e2e_request_latency_seconds",
         "Arrival to last output token."),
    Name("queue_s", "request_queue_time_seconds", "request_queue_time_seconds",
         "Arrival to first scheduling."),
    Name("prefill_s", "request_prefill_time_seconds", "request_prefill_time_seconds",
         "First scheduling to first output token."),
    Name("decode_s", "request_decode_time_seconds", "request_decode_time_seconds",
         "First to last output token."),
    Name("inference_s", "request_inference_time_seconds", "request_inference_time_seconds",
         "First scheduling to last output token."),
    Name("request_prompt_tokens", "request_prompt_tokens", "request_prompt_tokens",
         "Prompt tokens of a request."),
    Name("request_generation_tokens", "request_generation_tokens", "request_generation_tokens",
         "Output tokens of a request."),
    Name("request_max_tokens", "request_params_max_tokens", "request_params_max_tokens",
         "Output tokens a request allowed."),
    Name("request_n", "request_params_n", "request_params_n", "n of a request."),
)  # fmt: skip


class EngineView(Protocol):
    """What the collector reads from the engine when it is asked."""

    @property
    def info(self) -> ModelInfo | None:
        """What was loaded."""
        ...

    @property
    def stats(self) -> EngineStats | None:
        """The last heartbeat."""
        ...

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last spoke."""
        ...

    @property
    def in_flight(self) -> int:
        """Sequences submitted and not yet ended."""
        ...

    @property
    def restarts(self) -> int:
        """Times the engine was started again."""
        ...

    @property
    def admitting(self) -> bool:
        """Whether requests are admitted."""
        ...


class Metrics:
    """Everything counted in the API process; the engine's own counters come from its stats."""

    def __init__(self) -> None:
        tokens = one_two_five(MOST_TOKENS)
        self.ttft_s = Histogram(TTFT_BUCKETS_S)
        self.itl_s = Histogram(ITL_BUCKETS_S)
        self.tpot_s = Histogram(ITL_BUCKETS_S)
        self.e2e_s = Histogram(LATENCY_BUCKETS_S)
        self.queue_s = Histogram(LATENCY_BUCKETS_S)
        self.prefill_s = Histogram(LATENCY_BUCKETS_S)
        self.decode_s = Histogram(LATENCY_BUCKETS_S)
        self.inference_s = Histogram(LATENCY_BUCKETS_S)
        self.request_prompt_tokens = Histogram(tokens)
        self.request_generation_tokens = Histogram(tokens)
        self.request_max_tokens = Histogram(tokens)
        self.request_n = Histogram(N_BUCKETS)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.http_requests: Counter[tuple[str, str, str]] = Counter()
        self.http_seconds: dict[tuple[str, str], Histogram] = {}

    def observe_http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count one HTTP request; ``handler`` is a route, never a client's own path."""
        self.http_requests[method, handler, f"{status // 100}xx"] += 1
        key = (method, handler)
        histogram = self.http_seconds.get(key)
        if histogram is None:
            histogram = self.http_seconds[key] = Histogram(HTTP_BUCKETS_S)
        histogram.observe(seconds)


class Exposition(Collector):
    """prometheus-client collector over :class:`Metrics` and the engine, with its own registry."""

    def __init__(self, metrics: Metrics, engine: EngineView, model_name: str) -> None:
        self._metrics = metrics
        self._engine = engine
        self._labels = ("model_name", "engine")
        self._values = (model_name, "0")
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every family, in the order of the tables."""
        for name in GAUGES:
            for full in _full_names(name):
                gauge = GaugeMetricFamily(full, name.help, labels=self._labels)
                gauge.add_metric(self._values, self._gauge(name.field))
                yield gauge
        for name in COUNTERS:
            for full in _full_names(name):
                counter = CounterMetricFamily(full, name.help, labels=self._labels)
                counter.add_metric(self._values, self._count(name.field))
                yield counter
        for name in HISTOGRAMS:
            histogram: Histogram = getattr(self._metrics, name.field)
            for full in _full_names(name):
                yield _family(full, name.help, self._labels, {self._values: histogram})
        yield from self._by_reason()
        yield from self._http()
        yield from self._cache_config()

    def _gauge(self, field: str) -> float:
        stats, engine = self._engine.stats, self._engine
        match field:
            case "heartbeat_age_s":
                return engine.heartbeat_age_s
            case "ready":
                return float(engine.admitting)
            case "in_flight":
                return float(engine.in_flight)
            case "kv_usage":
                return stats.kv_usage if stats else 0.0
            case _:
                return float(getattr(stats, field)) if stats else 0.0

    def _count(self, field: str) -> float:
        if field == "restarts":
            return float(self._engine.restarts)
        if field in ("prompt_tokens", "cached_tokens", "generation_tokens"):
            return float(getattr(self._metrics, field))
        stats = self._engine.stats
        return float(getattr(stats, field)) if stats else 0.0

    def _by_reason(self) -> Iterator[Metric]:
        for prefix in ("hullspeed:", "vllm:"):
            finished = CounterMetricFamily(
                f"{prefix}request_success",
                "Sequences that ended, by reason.",
                labels=(*self._labels, "finished_reason"),
            )
            for reason in ("stop", "length", "abort", "error"):
                finished.add_metric((*self._values, reason), self._metrics.finished[reason])
            yield finished
            rejected = CounterMetricFamily(
                f"{prefix}admission_rejections",
                "Requests refused before they reached the engine, by reason.",
                labels=("model_name", "reason"),
            )
            for reason in ("queue_full", "draining", "loading", "engine_down"):
                rejected.add_metric((self._values[0], reason), self._metrics.rejected[reason])
            yield rejected

    def _http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests.", labels=("method", "handler", "status")
        )
        for key, count in self._metrics.http_requests.items():
            requests.add_metric(key, count)
        yield requests
        yield _family(
            "http_request_duration_seconds",
            "HTTP requests, from headers to the end of the answer.",
            ("method", "handler"),
            self._metrics.http_seconds,
        )

    def _cache_config(self) -> Iterator[Metric]:
        info = self._engine.info
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "KV page size and count.",
            labels=("block_size", "num_gpu_blocks", "engine"),
        )
        if info is not None:
            config.add_metric((str(info.page_tokens), str(info.n_pages), "0"), 1.0)
        yield config


def _full_names(name: Name) -> list[str]:
    return [f"hullspeed:{name.ours}", *([f"vllm:{name.vllm}"] if name.vllm else [])]


def _family(
    name: str,
    text: str,
    labels: tuple[str, ...],
    values: dict[tuple[str, str], Histogram],
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, histogram in values.items():
        family.add_metric(key, histogram.cumulative(), histogram.total)
    return family
