"""FittedCost: seconds of a step from a data sheet's terms, weighted by coefficients that were
fitted to published measurements.

``coefficients.toml`` holds the weights with what they were fitted on, their errors on groups left
out of the fit, and the quantiles of those errors: a prediction carries its own history.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.hardware.gpu import Gpu
from hullspeed.perf.replay import Engine
from hullspeed.perf.terms import StepTerms, Terms
from hullspeed.perf.work import Shape

_COEFFICIENTS = Path(__file__).with_name("coefficients.toml")
_ENGINES = Path(__file__).with_name("engines.toml")
_LARGE_BYTES = 70 * 2**30
ENGINES = ("vllm", "sglang", "trtllm", "vllm-0.7", "vllm-0.7-offline")
ENGINE_TERMS = ("steps", "sequences")
REGIMES = ("alone", "shared", "queued", "process")
_SHARED, _QUEUED = 1.5, 6.0  # times the first token of one request alone
HOST_TERMS = (*ENGINE_TERMS, "eager_layers")  # what a faster or slower host changes


class Coefficients(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one engine's terms.

    Attributes:
        terms: By name of :class:`Terms`; above 1 for a time at peak, seconds for a count.
        first_token_s: From a sampled first token to the client that waits for it, and what a
            request costs before it is scheduled.
        origin: What they rest on.
    """

    terms: dict[str, float]
    first_token_s: float
    origin: str

    def scaled(self, factors: dict[str, float], origin: str) -> Coefficients:
        """With some terms multiplied by what a calibration found."""
        terms = {name: value * factors.get(name, 1.0) for name, value in self.terms.items()}
        first = self.first_token_s * factors.get("first_token_s", 1.0)
        return Coefficients(terms=terms, first_token_s=first, origin=f"{self.origin}; {origin}")


class Spread(NamedTuple):
    """Factors on a prediction that bound the measured value."""

    low: float
    high: float


class FittedParts(NamedTuple):
    """Where a step's time goes, in seconds."""

    linear_s: float
    attention_s: float
    kv_s: float
    state_s: float
    reduce_s: float
    rows_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self)


class Loads(NamedTuple):
    """What a step asks of the hardware: seconds that it would take at bandwidth, at the rate that
    products sustain and at the link's peak, each alone.
    """

    bandwidth_s: float
    compute_s: float
    link_s: float


class FittedCost:
    """Seconds of a step of ``arch`` on ``tp`` GPUs under ``engine``.

    Raises:
        UsageError: for a GPU without known speeds.
    """

    def __init__(
        self,
        arch: ModelArch,
        gpu: Gpu,
        *,
        engine: str = "vllm",
        weight_bytes: int | None = None,
        kv_dtype: str = "bf16",
        state_dtype: str = "fp32",
        tp: int = 1,
        eager: bool = False,
        coefficients: Coefficients | None = None,
    ) -> None:
        self.terms = StepTerms(
            arch, gpu, weight_bytes=weight_bytes, kv_dtype=kv_dtype, state_dtype=state_dtype,
            tp=tp, eager=eager, engine=engine,
        )  # fmt: skip
        self.coefficients = coefficients or coefficients_of(engine)
        weights = self.coefficients.terms
        self._weights = tuple(weights[name] for name in Terms._fields)
        low = self.terms.compute_dtype != "bf16"
        self._mbu = 1 / weights["weights_s"]
        self._mfu = 1 / weights["multiply_low_s" if low else "multiply_s"]

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Seconds of one step that computes all of ``shapes``."""
        return self.batch_seconds(*split(shapes))

    def batch_seconds(self, n_decode: int, context_tokens: int, chunks: Sequence[Shape]) -> float:
        """The same for ``n_decode`` single tokens whose contexts sum to ``context_tokens``."""
        terms = self.terms.of(n_decode, context_tokens, chunks, self._mbu, self._mfu)
        return sum(w * t for w, t in zip(self._weights, terms, strict=True))

    def terms_of(self, n_decode: int, context_tokens: int, chunks: Sequence[Shape]) -> Terms:
        """The step's terms, with what binds decided by these coefficients."""
        return self.terms.of(n_decode, context_tokens, chunks, self._mbu, self._mfu)

    def loads(self, shapes: Sequence[Shape]) -> Loads:
        """Seconds at peak bandwidth, sustained arithmetic and peak link, whichever binds."""
        n_decode, context, chunks = split(shapes)
        # With an endless share of peak on one side, the other side binds: both are read off so.
        read = self.terms.of(n_decode, context, chunks, 1e-9, 1.0)
        done = self.terms.of(n_decode, context, chunks, 1.0, 1e-9)
        return Loads(
            bandwidth_s=read.weights_s + read.kv_s + read.state_s + read.rows_s + read.delta_s,
            compute_s=done.multiply_s + done.multiply_low_s + done.attention_s,
            link_s=read.reduce_s,
        )

    def parts(self, shapes: Sequence[Shape]) -> FittedParts:
        """The step, part by part."""
        terms = self.terms_of(*split(shapes))
        t = Terms(*(w * x for w, x in zip(self._weights, terms, strict=True)))
        return FittedParts(
            linear_s=t.weights_s + t.multiply_s + t.multiply_low_s,
            attention_s=t.attention_s + t.delta_s,
            kv_s=t.kv_s,
            state_s=t.state_s,
            reduce_s=t.reduces + t.reduce_s,
            rows_s=t.rows_s,
            overhead_s=t.layers + t.steps + t.sequences + t.moe_layers + t.eager_layers,
        )


def split(shapes: Sequence[Shape]) -> tuple[int, int, list[Shape]]:
    """Single tokens as a number and the sum of their contexts, and the chunks."""
    single = [shape for shape in shapes if shape.n_tokens == 1 and shape.sample]
    chunks = [shape for shape in shapes if shape.n_tokens != 1 or not shape.sample]
    return len(single), sum(shape.context_tokens for shape in single), chunks


def coefficients_of(engine: str, machine: str = "") -> Coefficients:
    """The committed fit for ``engine``; an engine it has not seen is taken as vLLM. ``machine``
    names a host that points of the fit were measured on, if its speed is to be taken into account.
    """
    data = _load()
    own = data["engine"][engine if engine in ENGINES else "vllm"]
    terms = {name: float(row["value"]) for name, row in data["terms"].items()}
    terms |= {name: float(own[name]) for name in ENGINE_TERMS}
    host = float(data["machine"].get(machine, 1.0))
    terms |= {name: terms[name] * host for name in HOST_TERMS}
    fit = data["fit"]
    origin = (
        f"not measured here: {fit['coefficients']} coefficients on the data sheet and "
        f"{fit['host_constants']} of hosts, fitted to {fit['points']:,} published points; on "
        f"groups left out of the fit their median error was {fit['cv']['ttft']:.0%} for TTFT, "
        f"{fit['cv']['tpot']:.0%} for TPOT"
    )
    first_token_s = float(own["first_token_s"]) * host
    return Coefficients(terms=terms, first_token_s=first_token_s, origin=origin)


def regime_of(waited: float, *, in_process: bool = False) -> str:
    """What kind of load a prediction is of: ``waited`` is its time to first token over that of one
    such request alone; ``in_process`` without a server in front.
    """
    if in_process:
        return "process"
    return "alone" if waited < _SHARED else "shared" if waited < _QUEUED else "queued"


def kinds_of(arch: ModelArch, *, drafts: bool = False) -> tuple[str, ...]:
    """What of a case the fit has not seen: ``moe`` for routed experts, ``drafts``."""
    moe = any(layer.mlp.kind == "moe" for layer in arch.layers)
    return ("moe",) * moe + ("drafts",) * drafts


def spread_of(
    metric: str,
    share: int = 80,
    regime: str = "",
    *,
    seen: bool = True,
    kinds: Sequence[str] = (),
) -> Spread:
    """Factors that hold ``share`` % of the measured values of left-out groups: ``metric`` is
    ``ttft``, ``tpot`` or ``output``; 80 and 90 are kept. ``regime`` as :func:`regime_of` says it;
    a GPU that no point was measured on (not ``seen``) is at least as uncertain as those that were
    left out whole, experts and drafts (``kinds``, as :func:`kinds_of` says them) as their own rows.
    """
    known = _load()["interval"][metric]
    low, high = known.get(regime, known["all"])[f"p{share}"]
    for name in (*kinds, *(() if seen else ("unseen",))):
        wide = known.get(name, known["all"])[f"p{share}"]
        low, high = min(low, wide[0]), max(high, wide[1])
    return Spread(float(low), float(high))


def measured_gpus() -> frozenset[str]:
    """GPUs that points of the fit were measured on."""
    return frozenset(_load()["fit"]["gpus"])


def training_groups() -> frozenset[str]:
    """Groups of points that the fit has seen."""
    return frozenset(_load()["fit"]["groups"])


def engine_of(engine: str, gpu: Gpu, *, in_process: bool = False, drafts: bool = False) -> Engine:
    """What the replay knows of ``engine`` at its defaults on ``gpu``; ``in_process`` without a
    server in front; ``drafts`` with speculation.
    """
    rows, fit = _engines(), _load()["fit"]
    row = rows.get(engine, rows["vllm"])
    small = gpu.memory_bytes < _LARGE_BYTES or gpu.name.startswith("A100")
    first_token_s = coefficients_of(engine).first_token_s
    running = int(row["max_running_small" if small else "max_running"])
    if drafts:
        running = min(running, int(row.get("max_running_drafts", running)))
    return Engine(
        step_tokens=row["step_tokens_small" if small else "step_tokens"],
        max_running=running,
        policy=row["policy"],
        reserve_output=row["reserve_output"],
        request_s=0.0 if in_process else float(fit["request_s"]),
        first_token_s=float(fit["in_process_first_token_s"]) if in_process else first_token_s,
    )


@cache
def _load() -> dict[str, Any]:
    return tomllib.loads(_COEFFICIENTS.read_text(encoding="utf-8"))


@cache
def _engines() -> dict[str, Any]:
    return tomllib.loads(_ENGINES.read_text(encoding="utf-8"))
