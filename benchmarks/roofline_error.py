"""How far the roofline is from published measurements.

    python benchmarks/roofline_error.py measured_points.csv

The file has a row per published point: model, gpu, n_gpus, precision, engine, isl, osl,
concurrency_or_rate, ttft_ms and itl_ms. Only closed-loop rows of models and GPUs that are known
exactly are used; rows with speculative decoding are left out. Nothing is fitted here.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

from hullspeed.arch import catalogue
from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.perf.roofline import Roofline
from hullspeed.perf.steady import Steady, steady_state
from hullspeed.perf.work import Work

GPUS = {"h100_sxm": "H100-SXM", "h200_sxm": "H200", "b200_sxm": "B200", "h100": "H100-SXM"}
MODELS = (
    ("qwen3-32b", "Qwen/Qwen3-32B"),
    ("llama-3.1-70b", "meta-llama/Llama-3.1-70B"),
    ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
    ("llama-3-8b", "meta-llama/Llama-3.1-8B"),
    ("qwen3.6-27b", "Qwen/Qwen3.6-27B"),
    ("qwen3.8-27b", "Qwen/Qwen3.8-27B"),
)
FORMATS = (("nvfp4", 0.56), ("w4a16", 0.56), ("w8a16", 1.02), ("fp8", 1.0), ("bf16", 2.0))
STEP_TOKENS = 8192
ALL: tuple[str, ...] = ("all",)


def first_number(text: str) -> int:
    """The first whole number in ``text``, 0 if none."""
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0


@cache
def roofline(model: str, quant: str, bytes_per_param: float, gpu: str, tp: int) -> Roofline:
    """Cost model of one model, format and target."""
    arch = replace(catalogue.load(model), quant=quant)
    tables = (1 if arch.tied_embeddings else 2) * 2 * arch.vocab * arch.hidden
    stored = round(Work(arch).body_params * bytes_per_param) + tables
    return Roofline(arch, find_gpu(gpu), weight_bytes=stored, tp=tp)


def predict(row: dict[str, str]) -> Steady | None:
    """The prediction for one row; ``None`` if the row does not say enough."""
    model = next((full for key, full in MODELS if key in row["model"].lower()), None)
    stored = next((f for f in FORMATS if f[0] in row["precision"].lower()), None)
    isl, osl = first_number(row["isl"]), first_number(row["osl"])
    closed = re.match(r"(?:concurrency )?(\d+)\b", row["concurrency_or_rate"])
    speculative = re.search(r"MTP\S* on|EAGLE", row["notes"])
    if not model or not stored or not closed or speculative or isl < 1 or osl < 2:
        return None
    try:
        name = GPUS.get(row["gpu"].lower(), row["gpu"])
        cost = roofline(model, stored[0], stored[1], find_gpu(name).name, int(row["n_gpus"]))
    except UsageError:
        return None
    return steady_state(
        cost,
        isl=isl,
        osl=osl,
        concurrency=int(closed[1]),
        step_tokens=STEP_TOKENS,
        request_s=cost.efficiency.request_s,
    )


def spread(ratios: list[float]) -> str:
    """Percentiles of predicted / measured, and the median of the absolute error."""
    ratios = sorted(ratios)
    if not ratios:
        return "-"
    p5, p50, p95 = (ratios[int(share * (len(ratios) - 1))] for share in (0.05, 0.5, 0.95))
    error = statistics.median(abs(r - 1) for r in ratios)
    return f"p5 {p5:.2f} p50 {p50:.2f} p95 {p95:.2f} median |error| {error:.0%} n {len(ratios)}"


def main(path: str) -> None:
    """Print the error by model, GPU and engine, and of all rows together."""
    ttft: dict[tuple[str, ...], list[float]] = defaultdict(list)
    itl: dict[tuple[str, ...], list[float]] = defaultdict(list)
    with Path(path).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            steady = predict(row)
            if steady is None:
                continue
            group: tuple[str, ...] = (row["model"], row["gpu"], row["engine"])
            for key in (group, ALL):
                if row["ttft_ms"]:
                    ttft[key].append(steady.ttft_s * 1e3 / float(row["ttft_ms"]))
                if row["itl_ms"]:
                    itl[key].append(steady.itl_s * 1e3 / float(row["itl_ms"]))
    for key in sorted(ttft.keys() | itl.keys()):
        print(" ".join(key))
        print(f"  TTFT {spread(ttft[key])}\n  ITL  {spread(itl[key])}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
