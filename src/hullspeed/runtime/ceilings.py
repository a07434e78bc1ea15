"""Measure this machine's ceilings with the engine's own kernels, in a few seconds.

Random weights in the shapes of the model: time depends on shapes alone. Linear layers, attention
and the output head are timed by themselves; whole steps of a short decoder then show what a layer
and a step cost beside them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from hullspeed.arch.mixers import FullAttention
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Layer, ModelArch, Rope
from hullspeed.arch.quant import WeightFormat
from hullspeed.arch.tensors import Role
from hullspeed.hardware.ceilings import (
    KERNELS_ERROR,
    KERNELS_VERSION,
    Ceilings,
    Curve,
    Interruptions,
    Overheads,
    disturbed,
    timestamp,
)
from hullspeed.hardware.foreign import ForeignLoad
from hullspeed.hardware.machine import Machine, detect_machine
from hullspeed.kernels.base import AttentionShape, Linear
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.blocks import BLOCK, BlockWeight
from hullspeed.kernels.cpu.backend import CpuKernels
from hullspeed.memory.held import held_dtype
from hullspeed.memory.ours_room import page_size
from hullspeed.models.decoder import Decoder
from hullspeed.models.weights import Weights
from hullspeed.perf.step_fit import (
    FAR_TOKENS,
    LONG_TOKENS,
    MIXED_TOKENS,
    SHORT_TOKENS,
    Spans,
    Timed,
    fit_steps,
)

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_DECODES = ((1, 512), (1, 2048), (4, 1024), (16, 512), (32, 512))
_CHUNKS = ((64, 0), (512, 0), (512, 512), (256, 1792))
_PAGE_TOKENS = 64
_WEIGHTS_BEYOND_CACHE = 192 * 2**20  # more than the last-level cache of most machines
_FEW_LAYERS = 4  # enough where a step computes more than it reads
_FEW_LAYERS_FROM_ROWS = 32
_KV_BEYOND_CACHE = 48 * 2**20

# What requests cost outside the kernels. A cached prompt's time to first token over HTTP, less one
# decode step, was 1.9, 2.9, 4.7 and 9.6 ms at 64, 512, 2,048 and 6,000 tokens (SmolLM2, two quiet
# cores at 2.6 GHz). The API process spends 0.4 ms a streamed token alone and 0.12 ms at eight
# streams, most of it once a step.
_REQUEST_S = 2e-3
_PROMPT_TOKEN_S = 1.3e-6
_STREAM_TOKEN_S = 1.2e-4
_STEP_S = 9e-4
_SEQUENCE_S = 1e-4


def default_arch() -> ModelArch:
    """Shapes and number formats of SmolLM2-135M in Q4_1, the model that ships as default."""
    mixer = FullAttention(q_heads=9, kv_heads=3, head_dim=64, rotary_dim=64)
    layer = Layer(mixer, DenseMlp(intermediate=1536))
    arch = ModelArch(
        family="llama",
        hidden=576,
        vocab=49152,
        layers=(layer,) * 30,
        tied_embeddings=True,
        norm_eps=1e-5,
        rope=Rope(theta=100_000.0),
        max_context_tokens=8192,
    )
    types = {
        spec.name: "Q8_0" if spec.role is Role.EMBEDDING else "Q4_1"
        for spec in arch.tensors(extras=False)
        if len(spec.shape) == 2
    }
    stored = WeightFormat(name="gguf", stored_types=types)
    return dataclasses.replace(arch, quant="gguf", weight_format=stored)


def measure_ceilings(
    arch: ModelArch | None = None,
    *,
    machine: Machine | None = None,
    threads: int | None = None,
    weight_dtype: str = "native",
    progress: Callable[[str], None] = lambda _: None,
) -> Ceilings:
    """Ceilings for models of ``arch``'s shapes (SmolLM2's unless given).

    Where ``native`` holds codes, linear layers are timed in fp16 too, for models without.
    ``progress`` is told what is being timed. Takes a few seconds, more on the very first run while
    kernels compile.

    Raises:
        UnsupportedModelError: if the embedded engine does not run ``arch``.
    """
    arch = arch or default_arch()
    machine = machine or detect_machine()
    threads = threads or machine.cores
    short = shortened(arch)
    foreign = ForeignLoad()
    dtype = held_dtype(arch, weight_dtype, machine.isa)
    kernels = CpuKernels(weight_dtype=dtype, threads=threads)
    decoder = Decoder(short, RandomWeights(short), kernels)
    dtypes = ("native", "fp16") if dtype == "native" else (dtype,)
    with torch.inference_mode():
        progress("memory bandwidth")
        dram = _dram_bytes_per_s()
        progress("linear layers")
        linear = {d: _linear_curve(short, kernels, d) for d in dtypes}
        progress("output head")
        head = {d: _head_curve(short, kernels, d) for d in dtypes}
        progress("attention")
        decode, shared, chunk = _attention_curves(short, kernels)
        bare = Ceilings(
            fingerprint=machine.fingerprint(KERNELS_VERSION),
            source="calibrated",
            measured_at=timestamp(),
            threads=threads,
            dram_bytes_per_s=dram,
            linear_flops_per_s=linear,
            head_flops_per_s=head,
            decode_bytes_per_s=decode,
            shared_bytes_per_s=shared,
            chunk_flops_per_s=chunk,
            overheads=_no_overheads(),
            relative_error=KERNELS_ERROR,
            hidden=arch.hidden,
            notes=(f"shapes of hidden {arch.hidden}, {len(short.layers)} layers timed",),
        )
        progress("whole steps")
        steps, shared_steps, interruptions = _whole_steps(decoder, short, machine)
        fitted = fit_steps(bare, short, dtype, steps, shared_steps)
    share = foreign.share()
    stand_ins = msgspec.structs.replace(
        fitted.overheads, step_s=_STEP_S, sequence_s=_SEQUENCE_S, request_s=_REQUEST_S,
        prompt_token_s=_PROMPT_TOKEN_S, stream_token_s=_STREAM_TOKEN_S,
        work_token_s=_PROMPT_TOKEN_S,
    )  # fmt: skip
    fitted = msgspec.structs.replace(fitted, overheads=stand_ins, interruptions=interruptions)
    return disturbed(fitted, share)


def shortened(arch: ModelArch) -> ModelArch:
    """``arch`` with as few layers as still exceed the processor's caches, at least four."""
    per_layer = 2 * sum(t.elements for t in arch.layers[0].tensors(arch.hidden))
    n_layers = min(len(arch.layers), max(4, -(-_WEIGHTS_BEYOND_CACHE // per_layer)))
    return dataclasses.replace(arch, layers=arch.layers[:n_layers], extras=())


class RandomWeights(Weights):
    """Weights of an architecture's shapes, drawn small so that nothing overflows."""

    def __init__(self, arch: ModelArch) -> None:
        self._shapes = {spec.name: spec.shape for spec in arch.tensors(extras=False)}
        self._types = arch.weight_format.stored_types or {}
        self._generator = torch.Generator().manual_seed(0)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the architecture."""
        return self._shapes

    def tensor(self, name: str) -> Tensor:
        """Fresh values each time."""
        return 0.02 * torch.randn(self._shapes[name], generator=self._generator)

    def blocks(self, name: str) -> BlockWeight | None:
        """Random codes where the architecture stores codes."""
        kind = self._types.get(name)
        rows, columns = self._shapes[name]
        return _random_blocks(rows, columns, kind) if kind in _CODES else None


_CODES = ("Q4_0", "Q4_1", "Q8_0")


def _random_blocks(rows: int, columns: int, kind: str) -> BlockWeight:
    """A weight drawn small, with codes of the width of the GGUF type ``kind``."""
    generator = np.random.default_rng(0)
    shape = (rows, columns // BLOCK)
    if kind == "Q8_0":
        scales = np.full(shape, 0.02 / 74, np.float16)  # 74: deviation of the codes
        return BlockWeight(generator.integers(-128, 128, (*shape, BLOCK), np.int8), scales)
    codes = generator.integers(0, 256, (*shape, BLOCK // 2), np.uint8)
    scales = np.full(shape, 0.02 / 4.6, np.float16)
    return BlockWeight(codes, scales, np.float16(-7.5) * scales)


def _weight(rows: int, columns: int, kind: str | None) -> Tensor | BlockWeight:
    if kind in _CODES and columns % BLOCK == 0:
        return _random_blocks(rows, columns, kind)
    return 0.02 * torch.randn(rows, columns)


def best_seconds(run: Callable[[], object], *, enough_s: float = 0.1, most_s: float = 0.6) -> float:
    """The least time of ``run`` after one run to warm up.

    The least, since what disturbs a run only makes it longer. Stops once ``enough_s`` were spent
    and four runs brought no improvement above 3 %, or ``most_s`` were spent on two runs or more.
    """
    run()
    best, spent, idle, n = float("inf"), 0.0, 0, 0
    while n < 2 or (spent < most_s and (spent < enough_s or idle < 4)):
        start = time.perf_counter()
        run()
        took = time.perf_counter() - start
        idle = 0 if took < 0.97 * best else idle + 1
        best, spent, n = min(best, took), spent + took, n + 1
    return best


def _dram_bytes_per_s() -> float:
    data = torch.ones(32 * 2**20)
    return data.nbytes / best_seconds(data.sum)


def _linear_curve(arch: ModelArch, kernels: CpuKernels, dtype: str) -> Curve:
    """All linear layers of the short model, one after the other, as a step runs them."""
    kind = _stored_type(arch, f"{arch.prefix}layers.0.mlp.down_proj.weight", dtype)
    shapes = _packed_shapes(arch.layers[0], arch.hidden)
    layers: list[list[tuple[Linear, int]]] = [
        [(kernels.linear(_weight(n, k, kind)), k) for n, k in shapes] for _ in arch.layers
    ]
    layer_params = sum(n * k for n, k in shapes)
    rates = []
    for m in _ROWS:
        inputs = {k: torch.randn(m, k) for _, k in shapes}
        used = layers if m < _FEW_LAYERS_FROM_ROWS else layers[:_FEW_LAYERS]

        def run(
            inputs: dict[int, Tensor] = inputs, used: list[list[tuple[Linear, int]]] = used
        ) -> None:
            for layer in used:
                for linear, k in layer:
                    linear(inputs[k])

        rates.append(2.0 * m * layer_params * len(used) / best_seconds(run))
    return Curve(tuple(map(float, _ROWS)), tuple(rates))


def _packed_shapes(layer: Layer, hidden: int) -> list[tuple[int, int]]:
    """The layer's linear weights as the decoder packs them: qkv together, gate and up together."""
    shapes = {spec.name: spec.shape for spec in layer.tensors(hidden)}
    qkv = sum(shapes[f"self_attn.{name}_proj.weight"][0] for name in "qkv")
    gate_up = sum(shapes[f"mlp.{name}_proj.weight"][0] for name in ("gate", "up"))
    output, down = shapes["self_attn.o_proj.weight"], shapes["mlp.down_proj.weight"]
    return [(qkv, hidden), (output[0], output[1]), (gate_up, hidden), (down[0], down[1])]


def _stored_type(arch: ModelArch, name: str, dtype: str) -> str | None:
    """GGUF type of a weight, if weights are held as they are stored."""
    return (arch.weight_format.stored_types or {}).get(name) if dtype == "native" else None


def _head_curve(arch: ModelArch, kernels: CpuKernels, dtype: str) -> Curve:
    tied = f"{arch.prefix}{arch.embedding_name}"
    name = tied if arch.tied_embeddings else arch.head_name
    kind = _stored_type(arch, f"{name}.weight", dtype)
    head = kernels.linear(_weight(arch.vocab, arch.hidden, kind))
    rows = tuple(m for m in _ROWS if m <= 64)
    rates = []
    for m in rows:
        x = torch.randn(m, arch.hidden)
        flops = 2.0 * m * arch.vocab * arch.hidden
        rates.append(flops / best_seconds(functools.partial(head, x)))
    return Curve(tuple(map(float, rows)), tuple(rates))


def _attention_curves(arch: ModelArch, kernels: CpuKernels) -> tuple[Curve, Curve, Curve]:
    """Decode, each sequence with its own past and all with one: KV bytes/s against sequences x KV
    heads. Chunk: FLOP/s against visible tokens.
    """
    mixer = next(m for layer in arch.layers if isinstance(m := layer.mixer, FullAttention))
    shape = AttentionShape(mixer.q_heads, mixer.kv_heads, mixer.head_dim)
    longest = arch.max_context_tokens - 1
    decode: dict[float, list[float]] = {}
    shared: dict[float, list[float]] = {}
    for n, wanted in _DECODES:
        context = min(wanted, longest)
        kv_bytes = n * mixer.kv_bytes(context, "fp32")
        seconds = _attend_seconds(kernels, shape, [(1, context - 1)] * n, kv_bytes)
        decode.setdefault(float(n * mixer.kv_heads), []).append(kv_bytes / seconds)
        seconds = _attend_seconds(kernels, shape, [(1, context - 1)] * n, kv_bytes, shared=True)
        shared.setdefault(float(n * mixer.kv_heads), []).append(kv_bytes / seconds)
    chunk: dict[float, float] = {}
    for n_tokens, start in _CHUNKS:
        if n_tokens + start > longest:
            continue
        kv_bytes = mixer.kv_bytes(start + n_tokens, "fp32")
        seconds = _attend_seconds(kernels, shape, [(n_tokens, start)], kv_bytes)
        chunk[float(start + n_tokens)] = mixer.flops(n_tokens, start) / seconds
    return (
        Curve(tuple(sorted(decode)), tuple(float(np.mean(decode[k])) for k in sorted(decode))),
        Curve(tuple(sorted(shared)), tuple(float(np.mean(shared[k])) for k in sorted(shared))),
        Curve(tuple(sorted(chunk)), tuple(chunk[k] for k in sorted(chunk))),
    )


def _attend_seconds(
    kernels: CpuKernels,
    shape: AttentionShape,
    spans: Sequence[tuple[int, int]],
    kv_bytes: int,
    *,
    shared: bool = False,
) -> float:
    """Seconds of attention in one layer, each run on another layer's pages: out of the cache."""
    batch, n_pages = synthetic_batch(spans, shared=shared)
    n_layers = int(min(24, max(2, _KV_BEYOND_CACHE // kv_bytes)))
    caches = [kernels.allocate_kv(shape, n_pages, _PAGE_TOKENS) for _ in range(n_layers)]
    for cache in caches:
        cache.keys.fill_(0.01)
        cache.values.fill_(0.01)
    q = torch.randn(len(batch.tokens), shape.q_heads, shape.head_dim)
    plan = kernels.plan(batch)

    def run() -> None:
        for cache in caches:
            kernels.attend(q, plan, shape, cache)

    return best_seconds(run) / n_layers


def synthetic_batch(
    spans: Sequence[tuple[int, int]], *, sample: bool = True, shared: bool = False
) -> tuple[Batch, int]:
    """A batch of ``(n_tokens, start)`` spans on pages of their own (or all on the same, to be read
    only), and how many pages it needs.
    """
    inputs, page, most = [], 0, 0
    for n_tokens, start in spans:
        n_pages = -(-(start + n_tokens) // _PAGE_TOKENS)
        inputs.append(SpanInput([1] * n_tokens, start, range(page, page + n_pages), sample))
        most = max(most, page + n_pages)
        page += 0 if shared else n_pages
    return Batch.of(inputs), most


def _no_overheads() -> Overheads:
    return Overheads(
        step_s=0.0, layer_s=0.0, layer_token_s=0.0, sequence_s=0.0, request_s=0.0,
        prompt_token_s=0.0, stream_token_s=0.0,
    )  # fmt: skip


_DECODE_STEPS: tuple[Spans, ...] = (
    *([(1, SHORT_TOKENS)] * n for n in (1, 2, 4, 8, 16, 32, 64)),
    *([(1, LONG_TOKENS)] * n for n in (1, 4, 8, 16, 32)),
    *([(1, FAR_TOKENS)] * n for n in (1, 4)),
)
_SHARED_STEPS: tuple[Spans, ...] = (
    *([(1, LONG_TOKENS)] * n for n in (4, 8, 16, 32)),
    *([(1, FAR_TOKENS)] * n for n in (8, 32)),
)
_CHUNK_STEPS: tuple[Spans, ...] = (
    [(64, 0)], [(128, 0)], [(256, 0)], [(256, 256)], [(256, 1280)],
)  # fmt: skip
_MIXED_STEPS: tuple[Spans, ...] = tuple(
    [*[(1, LONG_TOKENS)] * n, (MIXED_TOKENS - n, 128)] for n in (7, 31)
)
_ROUNDS = (3, 12)  # at least and at most
_ROUNDS_S = 14.0
_DECODES_A_ROUND = 3  # of each kind; the first finds caches as another kind has left them
_ALONE_S = 4.0
_INTERRUPTED = 1.25
_ONE_INTERRUPTION_S = 0.1
_LEAST_LOST = 0.01


def _whole_steps(
    decoder: Decoder, arch: ModelArch, machine: Machine
) -> tuple[list[Timed], list[Timed], Interruptions | None]:
    """Seconds of whole steps in rounds of all of them, those that decode some times in a row as
    they come when serving; the median, since serving sees the usual case and not the best. Then
    those whose sequences have one past. And what interrupts a step that is repeated for some
    seconds.
    """
    page_bytes, room_bytes = page_size(arch, _PAGE_TOKENS), machine.available_bytes // 8
    batches = []
    for spans, shared in (
        *((spans, False) for spans in (*_DECODE_STEPS, *_CHUNK_STEPS, *_MIXED_STEPS)),
        *((spans, True) for spans in _SHARED_STEPS),
    ):
        if max(n + start for n, start in spans) <= arch.max_context_tokens:
            batch, n_pages = synthetic_batch(spans, shared=shared)
            if n_pages * page_bytes <= room_bytes:
                batches.append((spans, batch, n_pages, shared))
    most_pages = max(n_pages for _, _, n_pages, _ in batches)
    decoder.allocate_kv(most_pages, _PAGE_TOKENS)
    # Memory that was never written is all one page of zeros, and in the cache.
    decoder.copy_pages([0] * (most_pages - 1), list(range(1, most_pages)))
    took: list[list[float]] = [[] for _ in batches]
    until_s = time.perf_counter() + _ROUNDS_S
    for n in range(_ROUNDS[1] + 1):
        if n > _ROUNDS[0] and time.perf_counter() > until_s:
            break
        for (spans, batch, _, _), seconds in zip(batches, took, strict=True):
            decodes = all(n_tokens == 1 for n_tokens, _ in spans)
            if decodes:
                decoder.forward(batch)
            for _ in range(_DECODES_A_ROUND - 1 if decodes else 1):
                start_s = time.perf_counter()
                decoder.forward(batch)
                seconds.append(time.perf_counter() - start_s)
    alone, until_s = [], time.perf_counter() + _ALONE_S
    while time.perf_counter() < until_s:
        start_s = time.perf_counter()
        decoder.forward(batches[0][1])
        alone.append(time.perf_counter() - start_s)
    decoder.allocate_kv(0, _PAGE_TOKENS)
    # The first round warms up.
    medians: dict[bool, list[Timed]] = {False: [], True: []}
    for (spans, _, _, shared), seconds in zip(batches, took, strict=True):
        medians[shared].append((spans, float(np.median(seconds[1:]))))
    return medians[False], medians[True], interruptions_of(alone)


def interruptions_of(steps_s: Sequence[float]) -> Interruptions | None:
    """Of equal steps, one after the other: those that took a quarter more than the median, where
    delays within a tenth of a second of one another are one.
    """
    if not steps_s:
        return None
    usual, now_s, last_s = float(np.median(steps_s)), 0.0, -math.inf
    lost_s, count = 0.0, 0
    for took in steps_s:
        if took > _INTERRUPTED * usual:
            lost_s += took - usual
            count += now_s - last_s > _ONE_INTERRUPTION_S
            last_s = now_s + took
        now_s += took
    clean_s = usual * len(steps_s)
    if lost_s < _LEAST_LOST * clean_s:
        return None
    return Interruptions(every_s=clean_s / count, lost_s=lost_s / count)
