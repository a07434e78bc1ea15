"""Measured tables: step times of NVIDIA's aiconfigurator-core, held within reach of physics.

An optional extra (``hullspeed[aiconfigurator]``, pinned to 0.12.0: what is called here is not a
public interface). Some cells of its tables are wrong (a decode step of 79 ms where bf16 takes
12.7), so each value is held against a guard cost: one that is off by more than a factor of three is
replaced by the guard's, and counted.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hullspeed.arch.load import arch_from_config
from hullspeed.arch.model import ModelArch
from hullspeed.errors import BrokenStackError, ModelError, UsageError
from hullspeed.perf.fitted import Coefficients, FittedCost, split
from hullspeed.perf.points import Point
from hullspeed.perf.terms import StepTerms
from hullspeed.perf.work import Shape

CostModel = Literal["fitted", "tables"]
"""Which cost of a step a plan or a simulation on a GPU asks."""

VERSION = "0.12.0"
GUARD_FACTOR = 3.0
_PACKAGE = "aiconfigurator_core"
_INSTALL = "pip install 'hullspeed[aiconfigurator]', or leave out --cost tables"
# Name of the system and the newest table of each engine in the 0.12.0 wheel.
_SYSTEMS = {
    "H100-SXM": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm", "B300": "b300_sxm",
    "GB200": "gb200", "GB300": "gb300", "A100-40GB-SXM": "a100_sxm", "A100-80GB-SXM": "a100_sxm",
    "L40S": "l40s", "RTX PRO 6000": "rtx_pro_6000_server",
}  # fmt: skip
_VERSIONS = {"vllm": "0.24.0", "sglang": "0.5.14", "trtllm": "1.3.0rc20"}
_A100_VERSIONS = {"vllm": "0.14.0", "sglang": "0.5.10", "trtllm": "1.0.0"}
# Its names of models that published points are of.
_MODELS = {
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen3.6-27B": "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.8-27B": "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
}
# Its names of a weight format, for dense layers ("": in 16 bit beside such experts) and for experts
# ("": no table of such).
_FORMATS = {
    "none": ("bfloat16", "bfloat16"), "fp8": ("fp8", "fp8"), "fp8_block": ("fp8_block",) * 2,
    "fp8_tensor": ("fp8_static", "fp8"), "compressed_fp8": ("fp8", "fp8"),
    "nvfp4": ("nvfp4", "nvfp4"), "int8": ("sq", ""), "compressed_int8": ("sq", ""),
    "w8a16": ("int8_wo", ""),
    "gptq": ("int4_wo", "int4_wo"), "awq": ("int4_wo", "int4_wo"),
    "mxfp4": ("", "w4a16_mxfp4"),
}  # fmt: skip


class TableCost:
    """Step seconds from the tables, each within a factor of three of ``guard``'s.

    Attributes:
        guard: The fitted cost of the same case.
        what: Which tables these are.
        replaced: Steps whose table value was further off, or that the tables have no value for, and
            that are the guard's.
        asked: Steps in all.
    """

    def __init__(self, handle: Any, guard: FittedCost, what: str = "") -> None:
        self._handle = handle
        self.guard = guard
        self.what = what
        self.replaced = 0
        self.asked = 0

    @property
    def terms(self) -> StepTerms:
        """The guard's: what a step asks of the hardware."""
        return self.guard.terms

    @property
    def coefficients(self) -> Coefficients:
        """The guard's."""
        return self.guard.coefficients

    @property
    def source(self) -> str:
        """Which tables answered, and how often the guard did so far."""
        return (
            f"{self.what}; {self.replaced:,} of {self.asked:,} steps asked of them were absent or "
            f"more than a factor of {GUARD_FACTOR:g} from the fitted cost, which stood in"
        )

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Seconds of one step that computes all of ``shapes``."""
        return self.batch_seconds(*split(shapes))

    def batch_seconds(self, n_decode: int, context_tokens: int, chunks: Sequence[Shape]) -> float:
        """The same for ``n_decode`` single tokens whose contexts sum to ``context_tokens``."""
        guard_s = self.guard.batch_seconds(n_decode, context_tokens, chunks)
        self.asked += 1
        try:
            table_s = self._table_s(n_decode, context_tokens, chunks)
        except (RuntimeError, ValueError):  # no such cell, nor one near enough to go by
            table_s = 0.0
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
        loaded = _load(
            _MODELS.get(point.model, point.model),
            point.quant,
            point.gpu,
            point.tp,
            point.engine,
            point.kv_dtype,
            experts=False,
        )
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


def require_tables() -> None:
    """Check that the extra is there, in the version that this module was written for.

    Raises:
        BrokenStackError: if it is not.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        raise BrokenStackError("the measured tables are not installed", fix=_INSTALL)
    try:
        found = importlib.metadata.version("aiconfigurator-core")
    except importlib.metadata.PackageNotFoundError:
        found = "a version that does not say"
    if found != VERSION:
        raise BrokenStackError(
            f"the measured tables are read from aiconfigurator-core {VERSION}",
            seen=found,
            fix=_INSTALL,
        )
    logging.getLogger(_PACKAGE).setLevel(logging.ERROR)


def table_cost(
    arch: ModelArch, gpu: str, tp: int, engine: str, guard: FittedCost, kv_dtype: str,
    *, model: str = "",
) -> TableCost:  # fmt: skip
    """Step seconds of ``arch`` from the tables, guarded by ``guard``. The tables are those of a
    model with the same layers, whatever its name.

    Args:
        arch: The model's layers and weight format.
        gpu: Name in the catalogue.
        tp: GPUs that split each layer.
        engine: Whose kernels.
        guard: The fitted cost of the same case.
        kv_dtype: Of the KV cache.
        model: Its name, for errors.

    Raises:
        BrokenStackError: if the extra is not installed.
        UsageError: if its tables do not hold this case; says what they hold.
    """
    require_tables()
    for what, value, held in (("GPU", gpu, _SYSTEMS), ("engine", engine, _VERSIONS)):
        if value not in held:
            raise _not_held(what, value, held)
    name = _same_layers(arch)
    if name is None:
        raise _not_held("model", model or f"{len(arch.layers)} layers", sorted(set(_names())))
    known = _formats(arch)
    handle = _handle(name, arch.quant, gpu, tp, engine, kv_dtype) if arch.quant in known else None
    if handle is None:
        there = [q for q in known if _handle(name, q, gpu, tp, engine, kv_dtype) is not None]
        case = f"weight format for {name} on {tp} x {gpu} with {engine}, {kv_dtype} KV cache"
        raise _not_held(case, arch.quant, there)
    what = (
        f"measured tables: aiconfigurator-core {VERSION}, {engine} {_version(engine, gpu)} on "
        f"{tp} x {gpu}, layers of {name}, {known[arch.quant]} products"
    )
    return TableCost(handle, guard, what)


def _not_held(what: str, seen: str, held: Sequence[str] | dict[str, str]) -> UsageError:
    there = ", ".join(held) or "none"
    return UsageError(
        f"the measured tables do not hold this {what}",
        seen=seen,
        fix=f"there: {there}; or leave out --cost tables",
    )


def _version(engine: str, gpu: str) -> str:
    return (_A100_VERSIONS if gpu.startswith("A100") else _VERSIONS)[engine]


def _formats(arch: ModelArch) -> dict[str, str]:
    """Weight formats that such layers can have here, and what their products are in."""
    experts = any(layer.mlp.kind == "moe" for layer in arch.layers)
    return {
        quant: sparse if experts else dense
        for quant, (dense, sparse) in _FORMATS.items()
        if (sparse if experts else dense)
    }


def _same_layers(arch: ModelArch) -> str | None:
    """The peer's name of a model with the layers of ``arch``."""
    for name, other in _peers():
        same = (other.layers, other.hidden, other.vocab) == (arch.layers, arch.hidden, arch.vocab)
        if same:
            return name
    return None


def _names() -> list[str]:
    return [name for name, _ in _peers()]


@cache
def _peers() -> tuple[tuple[str, ModelArch], ...]:
    """Models that come with the tables and that are understood here, 16-bit ones first."""
    package = importlib.util.find_spec(_PACKAGE)
    roots = package.submodule_search_locations if package else None
    found = []
    for root in roots or ():
        for path in sorted(Path(root, "model_configs").glob("*_config.json")):
            if path.name.endswith("_hf_quant_config.json"):
                continue
            try:
                arch = arch_from_config(json.loads(path.read_text(encoding="utf-8")))
            except ModelError:  # of a family that is not planned for either
                continue
            name = path.name.removesuffix("_config.json").replace("--", "/", 1)
            found.append((name, arch))
    return tuple(sorted(found, key=lambda pair: pair[1].quant != "none"))


@cache
def _handle(name: str, quant: str, gpu: str, tp: int, engine: str, kv_dtype: str) -> Any | None:
    """The peer's engine for one case; ``None`` where its tables lack a part of a step."""
    loaded = _load(name, quant, gpu, tp, engine, kv_dtype, experts=True)
    if loaded is None:
        return None
    step = importlib.import_module(f"{_PACKAGE}.sdk.rust_engine_step")
    try:
        handle = step._cached_engine_handle(loaded[0], loaded[1])
        handle.decode_step_latency(8, 2048, 2)
        handle.predict_prefill_latency(1, 2048, 0)
    except Exception:  # noqa: BLE001 - the peer raises its own kinds for what it does not hold
        return None
    return handle


@cache
def _load(
    name: str, quant: str, gpu: str, tp: int, engine: str, kv_dtype: str, *, experts: bool
) -> Any | None:
    """Model, database and backend of the peer for one case; ``None`` where it has none, or where
    it has ``experts`` and they are not asked for: they are split as everything else is.
    """
    if gpu not in _SYSTEMS or quant not in _FORMATS or engine not in _VERSIONS:
        return None
    common, config, models, database, factory = (
        importlib.import_module(f"{_PACKAGE}.sdk.{name}")
        for name in ("common", "config", "models", "perf_database", "backends.factory")
    )
    dense, sparse = _FORMATS[quant]
    settings = config.ModelConfig(
        tp_size=tp,
        moe_tp_size=tp if experts else None,
        moe_ep_size=1 if experts else None,
        gemm_quant_mode=common.GEMMQuantMode[dense or "bfloat16"],
        moe_quant_mode=common.MoEQuantMode[sparse] if experts and sparse else None,
        kvcache_quant_mode=common.KVCacheQuantMode.fp8
        if kv_dtype.startswith("fp8")
        else common.KVCacheQuantMode.bfloat16,
        fmha_quant_mode=common.FMHAQuantMode.bfloat16,
    )
    try:
        built = models.get_model(name, settings, engine)
        tables = database.get_database(_SYSTEMS[gpu], engine, _version(engine, gpu))
    except Exception:  # noqa: BLE001 - the peer raises its own kinds for what it does not hold
        return None
    return None if tables is None else (built, tables, factory.get_backend(engine))
