"""How far the terms of a step are from NVIDIA's published measurements, operation by operation.

    python benchmarks/operations.py

Reads the tables that come with aiconfigurator-core 0.12.0 (Apache-2.0; `pip install
'hullspeed[aiconfigurator]' pyarrow`): matrix products, attention of prompts and of decoding,
all-reduces, the gated delta rule and routed experts, on the GPUs that are judged and others.
Nothing is fitted here; shapes are those of layers of 3B to 120B models. Printed: the median of
|predicted / measured - 1|, the median of predicted / measured, and rows.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hullspeed.arch.mixers import GatedDeltaNet
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.perf.activations import recurrent_bytes
from hullspeed.perf.fitted import coefficients_of
from hullspeed.perf.gemm import overlapped, padded_rows, sustained_share

GPUS = {
    "H100-SXM": "h100_sxm", "H200": "h200_sxm", "A100-80GB-SXM": "a100_sxm", "L40S": "l40s",
    "B200": "b200_sxm", "RTX PRO 6000": "rtx_pro_6000_server",
}  # fmt: skip
FORMATS = {"bfloat16": ("bf16", 2.0), "fp8": ("fp8", 1.0), "nvfp4": ("fp4", 0.5625)}
EXPERT_BYTES = {"bfloat16": 2.0, "fp8_block": 1.0, "w4a16_mxfp4": 0.53}
LAUNCH_S = {"bf16": 4e-6, "fp8": 7e-6, "fp4": 9e-6}  # of one product, inside a graph
KERNEL_S = 10e-6  # of one attention or expert kernel
SAMPLE = 4000
Found = Iterator[tuple[str, str, float, float]]


def tables(gpu: str, family: str, name: str) -> Any:
    """All engines' measurements of one operation, a column each; newest versions alone."""
    import pandas as pd

    package = importlib.util.find_spec("aiconfigurator_core")
    if package is None or not package.submodule_search_locations:
        sys.exit("install aiconfigurator-core==0.12.0 and pyarrow first")
    root = Path(package.submodule_search_locations[0], "systems/data", GPUS[gpu], family)
    newest = {path.parent.parent: path for path in sorted(root.glob(f"*/*/{name}_perf.parquet"))}
    frames = [pd.read_parquet(path) for path in newest.values()]
    return pd.concat(frames) if frames else pd.DataFrame()


def products(gpu: str) -> Found:
    """Layers' matrix products."""
    card, weights = find_gpu(gpu), coefficients_of("vllm").terms
    rows = tables(gpu, "gemm", "gemm")
    rows = rows[(rows.n.between(768, 16384)) & (rows.k.between(768, 16384)) & (rows.m <= 16384)]
    for row in rows.sample(min(SAMPLE, len(rows)), random_state=0).itertuples():
        if row.gemm_dtype not in FORMATS or not card.has(FORMATS[row.gemm_dtype][0]):
            continue
        dtype, size = FORMATS[row.gemm_dtype]
        rate = card.flops_per_s[dtype] * sustained_share(card.compute_capability, dtype)
        read = weights["weights_s"] * row.n * row.k * size / card.bandwidth_bytes_per_s
        key = "multiply_s" if dtype == "bf16" else "multiply_low_s"
        multiply = weights[key] * 2.0 * padded_rows(row.m) * row.n * row.k / rate
        reading, multiplying = overlapped(read, multiply)
        said = LAUNCH_S[dtype] + read * reading + multiply * multiplying
        yield (
            f"products {dtype}",
            "few rows" if row.m <= 64 else "many rows",
            said,
            row.latency / 1e3,
        )


def attention(gpu: str) -> Found:
    """Prompts' and decoding attention with grouped heads, 16-bit KV."""
    card, weights = find_gpu(gpu), coefficients_of("vllm").terms
    for name, prompts in (("context_attention", True), ("generation_attention", False)):
        rows = tables(gpu, "attention", name)
        groups = rows.num_heads / rows.num_key_value_heads
        rows = rows[
            (rows.window_size == 0) & rows.head_dim.isin([128, 256]) & groups.between(4, 16)
            & (rows.kv_cache_dtype == "bfloat16") & (rows.batch_size <= 256)
        ]  # fmt: skip
        length = rows.isl if prompts else rows.step
        rows = rows[length.between(512, 32768)]
        for row in rows.sample(min(SAMPLE, len(rows)), random_state=0).itertuples():
            width = row.batch_size * row.head_dim
            if prompts:
                flops = 2.0 * width * row.num_heads * row.isl**2
                said = weights["attention_s"] * flops / card.flops_per_s["bf16"]
                moved = 4.0 * width * row.isl * (row.num_heads + row.num_key_value_heads)
                said += weights["rows_s"] * moved / card.bandwidth_bytes_per_s
            else:
                moved = 4.0 * width * row.num_key_value_heads * (row.step + 1)
                said = weights["kv_s"] * moved / card.bandwidth_bytes_per_s
            yield "attention", name.partition("_")[0], said + KERNEL_S, row.latency / 1e3


def reduces(gpu: str) -> Found:
    """All-reduces inside graphs, message sizes of 8 tokens to 8,192."""
    card, weights = find_gpu(gpu), coefficients_of("vllm").terms
    rows = tables(gpu, "comm", "custom_allreduce")
    rows = rows[rows.message_size.between(2**15, 2**26)]
    rows = rows[~rows.kernel_source.str.contains("eager")]
    for row in rows.itertuples():
        bytes_, n = 2.0 * row.message_size, int(row.num_gpus)
        times = 1.0 if bytes_ <= 2**18 else 0.5 * (1 + np.log2(n))
        link = card.interconnect_bytes_per_s / 2
        said = weights["reduces"] * times + weights["reduce_s"] * bytes_ * 2 * (n - 1) / n / link
        yield "all-reduce", f"{n} GPUs", said, row.latency / 1e3


def recurrent(gpu: str) -> Found:
    """The gated delta rule of Qwen3.5-27B: prompts' chunk kernels and decoding state."""
    card, weights = find_gpu(gpu), coefficients_of("vllm").terms
    rows = tables(gpu, "linear_attention", "gdn")
    if not len(rows):
        return
    rows = rows[(rows.num_v_heads == 48) & rows.kernel_source.str.contains("delta")]
    mixer = GatedDeltaNet(k_heads=16, v_heads=48, k_dim=128, v_dim=128, conv_kernel=4)
    state = 8.0 * 48 * 128 * 128
    for row in rows.itertuples():
        tokens = row.batch_size * row.seq_len
        if row.phase == "context" and 1024 <= tokens <= 16384:
            moved, key = recurrent_bytes(mixer) * tokens, "delta_s"
        elif row.phase == "generation" and 8 <= row.batch_size <= 256:
            moved, key = state * row.batch_size, "state_s"
        else:
            continue
        said = KERNEL_S / 2 + weights[key] * moved / card.bandwidth_bytes_per_s
        yield "delta rule", row.phase, said, row.latency / 1e3


def experts(gpu: str) -> Found:
    """Grouped products of routed experts, all on one GPU."""
    card, weights = find_gpu(gpu), coefficients_of("vllm").terms
    rows = tables(gpu, "moe", "moe")
    if not len(rows):
        return
    rows = rows[
        (rows.moe_tp_size == 1) & (rows.moe_ep_size == 1) & rows.moe_dtype.isin(EXPERT_BYTES)
        & (rows.hidden_size * rows.inter_size * rows.num_experts).between(2**26, 2**31)
    ]  # fmt: skip
    rate = card.flops_per_s["bf16"] * sustained_share(card.compute_capability, "bf16") * 0.6
    for row in rows.sample(min(SAMPLE, len(rows)), random_state=0).itertuples():
        each = 3.0 * row.hidden_size * row.inter_size
        share = 1 - (1 - row.topk / row.num_experts) ** row.num_tokens
        read = share * row.num_experts * each * EXPERT_BYTES[row.moe_dtype]
        said = 2 * KERNEL_S + weights["weights_s"] * read / card.bandwidth_bytes_per_s
        said += weights["multiply_s"] * 2.0 * row.num_tokens * row.topk * each / rate
        yield "experts", row.moe_dtype, said, row.latency / 1e3


def main() -> None:
    print(f"{'GPU':14} {'operation':16} {'':12} error  said/measured  rows")
    for gpu in GPUS:
        found: dict[tuple[str, str], list[float]] = {}
        for family in (products, attention, reduces, recurrent, experts):
            for name, part, said, measured in family(gpu):
                found.setdefault((name, part), []).append(said / measured)
        for (name, part), ratios in sorted(found.items()):
            error = statistics.median(abs(ratio - 1) for ratio in ratios)
            middle = statistics.median(ratios)
            print(f"{gpu:14} {name:16} {part:12} {error:5.0%}  {middle:13.2f}  {len(ratios):4}")


if __name__ == "__main__":
    main()
