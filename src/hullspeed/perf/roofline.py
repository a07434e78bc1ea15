"""Roofline: seconds of a step on any GPU from its data sheet. An estimate, labelled as one."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.hardware.gpu import Gpu
from hullspeed.perf.terms import compute_dtype
from hullspeed.perf.work import Shape, Work

_FILE = Path(__file__).with_name("roofline.toml")


class Efficiency(NamedTuple):
    """Shares of peak and fixed costs; see ``roofline.toml`` for the source of each."""

    mfu_linear: float
    mfu_attention: float
    mbu_weights: float
    mbu_kv: float
    layer_s: float
    step_s: float
    sequence_s: float
    request_s: float
    reduce_s: float
    link_share: float


class Interval(NamedTuple):
    """A 90 % interval as factors on the prediction."""

    low: float
    high: float


class RooflineParts(NamedTuple):
    """Where a step's time goes, in seconds."""

    linear_s: float
    attention_s: float
    kv_s: float
    state_s: float
    reduce_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self)


class Roofline:
    """Seconds of a step of ``arch`` on ``tp`` GPUs.

    Linear layers take what is longer, reading their weights once or multiplying; attention its
    FLOPs for chunks and its KV bytes for single tokens; recurrent state is read and written once a
    step; two all-reduces a layer when tensor-parallel.

    Raises:
        UsageError: for a GPU without bandwidth or FLOP/s (found by its driver, not in the
            catalogue).
    """

    def __init__(
        self,
        arch: ModelArch,
        gpu: Gpu,
        *,
        weight_bytes: int | None = None,
        kv_dtype: str = "bf16",
        state_dtype: str = "fp32",
        tp: int = 1,
    ) -> None:
        if gpu.bandwidth_bytes_per_s <= 0 or gpu.flops_per_s.get("bf16", 0.0) <= 0:
            raise UsageError(
                "no speeds are known for this GPU",
                seen=gpu.name,
                fix="describe it: --gpu custom:memory=48GiB,bandwidth=864,bf16=362",
            )
        self.gpu = gpu
        self.tp = tp
        self.work = Work(
            arch, weight_bytes=weight_bytes, kv_dtype=kv_dtype, state_dtype=state_dtype
        )
        self.compute_dtype = compute_dtype(arch.quant, gpu)
        self.efficiency, self.ttft_interval, self.itl_interval, self.history = _load()

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Seconds of one step that computes all of ``shapes``."""
        return self.parts(shapes).total_s

    def parts(self, shapes: Sequence[Shape]) -> RooflineParts:
        """The same, term by term."""
        work, gpu, eff, tp = self.work, self.gpu, self.efficiency, self.tp
        n_tokens = sum(shape.n_tokens for shape in shapes)
        n_logits = sum(shape.sample for shape in shapes)
        bandwidth = gpu.bandwidth_bytes_per_s
        reading = work.body_bytes(n_tokens) / (bandwidth * eff.mbu_weights)
        peak = gpu.peak_flops_per_s(self.compute_dtype)
        multiplying = work.body_flops(n_tokens) / (peak * eff.mfu_linear)
        head_s = 0.0
        if n_logits:
            head_s = max(
                2.0 * work.head_params / (bandwidth * eff.mbu_weights),
                2.0 * work.head_params * n_logits / (gpu.flops_per_s["bf16"] * eff.mfu_linear),
            )
        chunk_flops, kv_bytes = 0.0, 0.0
        for shape in shapes:
            if shape.n_tokens == 1:
                kv_bytes += work.read_kv_bytes(shape)
            else:
                chunk_flops += work.attention_flops(shape)
        reduced = 2.0 * n_tokens * work.arch.hidden * 2 * (tp - 1) / tp
        link = gpu.interconnect_bytes_per_s / 2 * eff.link_share
        return RooflineParts(
            linear_s=max(reading, multiplying) / tp + head_s / tp,
            attention_s=chunk_flops / (gpu.flops_per_s["bf16"] * eff.mfu_attention) / tp,
            kv_s=kv_bytes / (bandwidth * eff.mbu_kv) / tp,
            state_s=2.0 * len(shapes) * work.state_bytes / (bandwidth * eff.mbu_kv) / tp,
            reduce_s=2 * work.n_layers * (eff.reduce_s + reduced / link) if tp > 1 else 0.0,
            overhead_s=work.n_layers * eff.layer_s + eff.step_s + eff.sequence_s * len(shapes),
        )


@cache
def _load() -> tuple[Efficiency, Interval, Interval, str]:
    data = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    values = {name: float(row["value"]) for name, row in data["efficiency"].items()}
    interval, error = data["interval"], data["error"]
    return (
        Efficiency(**values),
        Interval(interval["ttft"]["low"], interval["ttft"]["high"]),
        Interval(interval["itl"]["low"], interval["itl"]["high"]),
        f"roofline of the data sheet, not measured; on {error['points']} published points its "
        f"median error was {error['ttft']['median']:.0%} for TTFT, {error['itl']['median']:.0%} "
        "for ITL",
    )
