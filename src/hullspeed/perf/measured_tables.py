"""Measured tables: step times of NVIDIA's aiconfigurator-core, held within reach of physics.

An optional extra (``hullspeed[aiconfigurator]``, pinned to 0.12.0: what is called here is not a
public interface). Some cells of its tables are wrong (a decode step of 79 ms where bf16 takes
12.7), so each value is held against a guard cost: one that is off by more than a factor of three is
replaced by the guard's, and counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from hullspeed.errors import UsageError
from hullspeed.perf.fitted import split
from hullspeed.perf.points import Point
from hullspeed.perf.work import Shape, StepSeconds

VERSION = "0.12.0"
GUARD_FACTOR = 3.0
_PACKAGE = "aiconfigurator_core"
# Name of the system and the newest table of each engine in the 0.12.0 wheel.
_SYSTEMS = {
    "H100-SXM": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm", "B300": "b300_sxm",
    "GB200": "gb200", "GB300": "gb300", "A100-40GB-SXM": "a100_sxm", "A100-80GB-SXM": "a100_sxm",
    "L40S": "l40s", "RTX PRO 6000": "rtx_pro_6000_server",
}  # fmt: skip
_VERSIONS = {"vllm": "0.24.0", "sglang": "0.5.14", "trtllm": "1.3.0rc20"}
_A100_VERSIONS = {"vllm": "0.14.0", "sglang": "0.5.10", "trtllm": "1.0.0"}
_MODELS = {
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen3.6-27B": "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.8-27B": "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
}
_GEMM = {"none": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4", "int8": "sq", "w8a16": "int8_wo",
         "gptq": "int4_wo", "awq": "int4_wo"}  # fmt: skip


class TableCost:
    """Step seconds from the tables, each within a factor of three of ``guard``'s.

    Attributes:
        replaced: Steps whose table value was further off and gave way to the guard's.
        asked: Steps in all.
    """

    def __init__(self, handle: Any, guard: StepSeconds) -> None:
        self._handle = handle
        self._guard = guard
        self.replaced = 0
        self.asked = 0

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Seconds of one step that computes all of ``shapes``."""
        n_decode, context, chunks = split(shapes)
        guard_s = self._guard.seconds(shapes)
        table_s = self._table_s(n_decode, context, chunks)
        self.asked += 1
        if guard_s / GUARD_FACTOR <= table_s <= guard_s * GUARD_FACTOR:
            return table_s
        self.replaced += 1
        return guard_s

    def _table_s(self, n_decode: int, context_tokens: int, chunks: Sequence[Shape]) -> float:
        mean = max(context_tokens // n_decode, 1) if n_decode else 1
        if not chunks:
            return float(self._handle.decode_step_latency(n_decode, mean, 2)) / 1e3
        n_tokens = sum(shape.n_tokens for shape in chunks)
        done = max(shape.context_tokens for shape in chunks)
        if not n_decode:
            each = max(n_tokens // len(chunks), 1)
            ms = self._handle.predict_prefill_latency(len(chunks), each + done, done)
            return float(ms) / 1e3
        isl = max(n_tokens // len(chunks), 1) + done
        return float(self._handle.mixed_step_latency(n_tokens, n_decode, isl, 2, done)) / 1e3


class Tables:
    """The peer's own answer to a point: its mean-field formula, without a scheduler."""

    def steady(self, point: Point) -> tuple[float, float, float] | None:
        """TTFT and TPOT in seconds, output tokens per second; ``None`` where it has no answer."""
        loaded = _load(point.model, point.quant, point.gpu, point.tp, point.engine, point.kv_dtype)
        if loaded is None or point.protocol != "closed" or point.accept != 1.0 or point.osl < 2:
            return None
        model, database, backend = loaded
        config = importlib.import_module(f"{_PACKAGE}.sdk.config")
        asked = config.RuntimeConfig(
            batch_size=point.concurrency, beam_width=1, isl=int(point.isl), osl=int(point.osl)
        )
        try:
            summary = backend.run_agg(model, database, asked, ctx_tokens=max(int(point.isl), 2048))
            row = summary.get_summary_df().to_dict("records")[0]
        except Exception:  # noqa: BLE001 - the peer's own failure on a row is an answer: none
            return None
        return row["ttft"] / 1e3, row["tpot"] / 1e3, row["tokens/s"]


def load_tables() -> Tables | None:
    """The peer, or ``None`` where it is not installed."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    logging.getLogger(_PACKAGE).setLevel(logging.ERROR)
    return Tables()


def table_cost(
    model: str, quant: str, gpu: str, tp: int, engine: str, guard: StepSeconds, kv_dtype: str
) -> TableCost:
    """Step seconds of ``model`` from the tables, guarded by ``guard``.

    Raises:
        UsageError: if the extra is not installed, or its tables do not hold this case.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        raise UsageError(
            "the measured tables are not installed", fix="pip install 'hullspeed[aiconfigurator]'"
        )
    loaded = _load(model, quant, gpu, tp, engine, kv_dtype)
    if loaded is None:
        raise UsageError("the measured tables do not hold this case", seen=f"{model} on {gpu}")
    step = importlib.import_module(f"{_PACKAGE}.sdk.rust_engine_step")
    return TableCost(step._cached_engine_handle(loaded[0], loaded[1]), guard)


@cache
def _load(model: str, quant: str, gpu: str, tp: int, engine: str, kv_dtype: str) -> Any | None:
    """Model, database and backend of the peer for one case; ``None`` where it has none."""
    if gpu not in _SYSTEMS or quant not in _GEMM or engine not in _VERSIONS:
        return None
    common, config, models, database, factory = (
        importlib.import_module(f"{_PACKAGE}.sdk.{name}")
        for name in ("common", "config", "models", "perf_database", "backends.factory")
    )
    version = (_A100_VERSIONS if gpu.startswith("A100") else _VERSIONS)[engine]
    settings = config.ModelConfig(
        tp_size=tp,
        gemm_quant_mode=getattr(common.GEMMQuantMode, _GEMM[quant]),
        kvcache_quant_mode=common.KVCacheQuantMode.fp8
        if kv_dtype == "fp8"
        else common.KVCacheQuantMode.bfloat16,
        fmha_quant_mode=common.FMHAQuantMode.bfloat16,
    )
    try:
        built = models.get_model(_MODELS.get(model, model), settings, engine)
        tables = database.get_database(_SYSTEMS[gpu], engine, version)
    except Exception:  # noqa: BLE001 - the peer raises its own kinds for what it does not hold
        return None
    return None if tables is None else (built, tables, factory.get_backend(engine))
