"""Models with recurrent state on the CPU: kernels, continuous batching, the price of caching.

    python benchmarks/hybrid.py                      # all of it, some two minutes
    python benchmarks/hybrid.py --only kernels --json

Random weights; numbers are seconds of the computing thread's CPU, so that a busy machine changes
them little, least of repeats for kernels and medians elsewhere. What is compared runs in this
process, one after the other. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hullspeed.arch.load import load_arch
from hullspeed.clock import MonotonicClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.core.sampling import SamplingParams
from hullspeed.kernels.base import AttentionShape, DeltaGates, DeltaShape
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.cpu.backend import CpuKernels
from hullspeed.models.decoder import Decoder
from hullspeed.models.load import load_decoder
from hullspeed.runtime.executor import TorchExecutor
from hullspeed.runtime.sampler import Sampler
from hullspeed.sources.files import from_folder

SHAPE_27B = DeltaShape(k_heads=16, v_heads=48, k_dim=128, v_dim=128, taps=4)
VOCAB = 49152
PAGE_TOKENS = 64
N_PAGES, N_SLOTS = 512, 140


@dataclass(frozen=True)
class Row:
    """One measurement and its bar, if it has one."""

    what: str
    value: float
    unit: str
    bar: str = ""
    met: bool = True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["kernels", "batching", "caching"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "kernels": kernels,
        "batching": lambda: batching(args.requests),
        "caching": lambda: caching(args.repeats),
    }
    rows = []
    for name, measure in parts.items():
        if args.only in (None, name):
            for row in measure():
                rows.append(row)
                if not args.json:
                    verdict = f"{row.bar}  {'met' if row.met else 'MISSED'}" if row.bar else ""
                    print(f"{row.what:<58} {row.value:>9.2f} {row.unit:<9} {verdict}", flush=True)
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0 if all(row.met for row in rows) else 1


def at_most(what: str, value: float, unit: str, bar: float) -> Row:
    return Row(what, value, unit, f"<= {bar:g}", value <= bar)


def at_least(what: str, value: float, unit: str, bar: float) -> Row:
    return Row(what, value, unit, f">= {bar:g}", value >= bar)


def least(call: Callable[[], object], repeats: int) -> float:
    """Least CPU seconds of ``call``, compiled before."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        call()
        times.append(time.thread_time() - begin)
    return min(times)


# -- kernels ---------------------------------------------------------------------------------------


def kernels() -> Iterator[Row]:
    """At the dimensions of a 27B hybrid, one thread; every span has its state in its own slot."""
    cpu = CpuKernels(weight_dtype="fp32", threads=1)
    shape = SHAPE_27B
    states = cpu.allocate_states(shape, 8)
    gates = DeltaGates(torch.rand(shape.v_heads), torch.randn(shape.v_heads))
    weight = torch.randn(shape.taps, shape.channels)

    def layer(n_spans: int, n_tokens: int, repeats: int) -> tuple[float, float]:
        spans = [SpanInput([0] * n_tokens, 0, [0], False, i, i) for i in range(n_spans)]
        plan = cpu.plan(Batch.of(spans))
        x = torch.randn(n_spans * n_tokens, shape.channels)
        ba = torch.randn(n_spans * n_tokens, 2 * shape.v_heads)
        scan = least(lambda: cpu.delta_scan(x, ba, plan, shape, gates, states), repeats)
        conv = least(lambda: cpu.convolve(x, plan, weight, states), repeats)
        return scan, conv

    scan, conv = layer(1, 512, 3)
    yield at_most("gated delta scan, 512 tokens, a token and layer", scan / 512 * 1e6, "us", 150)
    yield Row("short convolution, 512 tokens, a token and layer", conv / 512 * 1e6, "us")
    for n_spans in (1, 8):
        scan, conv = layer(n_spans, 1, 40)
        name = f"gated delta decode, batch {n_spans}, a sequence and layer"
        yield at_most(name, scan / n_spans * 1e3, "ms", 0.15)
    yield at_most("paged attention decode, batch 32 x 2,048, 9/3 x 64", _attention(cpu), "ms", 12)


def _attention(cpu: CpuKernels) -> float:
    shape, context, batch_size = AttentionShape(9, 3, 64), 2048, 32
    each = context // PAGE_TOKENS
    kv = cpu.allocate_kv(shape, batch_size * each, PAGE_TOKENS)
    kv.keys.normal_()
    kv.values.normal_()
    pages = list(range(batch_size * each))
    random.Random(0).shuffle(pages)
    spans = [
        SpanInput([0], context - 1, pages[i * each : (i + 1) * each], True)
        for i in range(batch_size)
    ]
    plan = cpu.plan(Batch.of(spans))
    q = torch.randn(batch_size, 9, 64)
    return least(lambda: cpu.attend(q, plan, shape, kv), 10) * 1e3


# -- a small hybrid --------------------------------------------------------------------------------


def small_model(kind: str) -> tuple[Decoder, Any]:
    """8 layers, hidden 512: hybrid (three gated delta to one attention) or dense; fp32. Returns
    our decoder and transformers' module.
    """
    import transformers

    hf: Any = transformers
    hf.logging.set_verbosity_error()
    common = {
        "vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1536,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "hybrid":
        config = hf.Qwen3_5TextConfig(
            **common, linear_num_key_heads=4, linear_num_value_heads=8,
            linear_key_head_dim=128, linear_value_head_dim=128,
        )  # fmt: skip
        module = hf.Qwen3_5ForCausalLM(config).float().eval()
    else:
        module = hf.Qwen3ForCausalLM(hf.Qwen3Config(**common)).float().eval()
    with tempfile.TemporaryDirectory() as name:
        module.save_pretrained(name)
        files = from_folder(Path(name), source=name)
        decoder = load_decoder(
            files.weights, load_arch(files), weight_dtype="fp32", max_context_tokens=4096
        )
    decoder.allocate_kv(N_PAGES, PAGE_TOKENS)
    decoder.allocate_states(N_SLOTS)
    return decoder, module


def engine_of(decoder: Decoder, cache: str) -> EngineLoop:
    scheduler = build_scheduler(
        n_pages=N_PAGES,
        page_tokens=PAGE_TOKENS,
        max_running=32,
        step_tokens=512,
        max_context_tokens=4096,
        n_state_slots=N_SLOTS if decoder.is_recurrent else 0,
        state_bytes=1,
        cache=cache,
    )
    limits = Limits(vocab=VOCAB, max_context_tokens=4096)
    executor = TorchExecutor(decoder, Sampler(VOCAB))
    return EngineLoop(scheduler, executor, MonotonicClock(), limits)


def complete(loop: EngineLoop, prompts: list[list[int]], n_output: int) -> float:
    """CPU seconds for all of ``prompts`` together, checkpoints as a server sets them."""
    params = SamplingParams(temperature=0.0, max_tokens=n_output)
    begin = time.thread_time()
    for i, prompt in enumerate(prompts):
        loop.add(i, prompt, params, checkpoints=(len(prompt) // 3, len(prompt) - 1))
    while loop.has_work:
        loop.step()
    return time.thread_time() - begin


def random_prompts(n: int, low: int, high: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(VOCAB), k=rng.randint(low, high)) for _ in range(n)]


def batching(n_requests: int) -> Iterator[Row]:
    """Together in our engine, one by one in transformers, which cannot batch hybrids
    continuously. Output tokens by CPU second, prompts included.
    """
    decoder, module = small_model("hybrid")
    n_output = 64
    prompts = random_prompts(n_requests, 32, 160, seed=1)
    complete(engine_of(decoder, "segment"), prompts[:2], 4)
    ours = complete(engine_of(decoder, "segment"), prompts, n_output)
    sample = prompts[:: max(1, n_requests // 6)]
    module.generate(torch.tensor([prompts[0]]), max_new_tokens=2, do_sample=False)
    begin = time.thread_time()
    for prompt in sample:
        given = torch.tensor([prompt])
        module.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=n_output,
            do_sample=False,
            pad_token_id=0,
        )
    theirs = time.thread_time() - begin
    our_rate, their_rate = n_requests * n_output / ours, len(sample) * n_output / theirs
    yield Row(f"hybrid, {n_requests} requests together", our_rate, "tokens/s")
    yield Row(f"transformers, one by one ({len(sample)} of them)", their_rate, "tokens/s")
    yield at_least("continuous batching against one by one", our_rate / their_rate, "x", 5)


def caching(repeats: int) -> Iterator[Row]:
    """A trace in which no prompt begins like another: what the prefix cache costs for nothing."""
    for kind in ("hybrid", "dense"):
        decoder, _ = small_model(kind)
        prompts = random_prompts(12, 150, 400, seed=2)
        complete(engine_of(decoder, "segment"), prompts[:2], 4)
        times: dict[str, list[float]] = {"segment": [], "none": []}
        for i in range(repeats):
            # In turns, each first as often as the other.
            for cache in sorted(times, reverse=bool(i % 2)):
                times[cache].append(complete(engine_of(decoder, cache), prompts, 16))
        with_cache, without = (statistics.median(times[c]) for c in ("segment", "none"))
        cost = 100 * (with_cache / without - 1)
        yield at_most(f"prefix cache on a trace without reuse, {kind}", cost, "%", 3)


if __name__ == "__main__":
    sys.exit(main())
