"""Measure this machine's ceilings with the engine's own kernels, in a few seconds.

Random weights in the shapes of the model: time depends on shapes alone. Linear layers, attention
and the output head are timed by themselves; whole steps of a short decoder then show what a layer
and a step cost beside them.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import psutil
import torch
from torch import Tensor

from hullspeed.arch.mixers import FullAttention
from hullspeed.arch.mlps import DenseMlp
from hullspeed.arch.model import Layer, ModelArch, Rope
from hullspeed.arch.quant import WeightFormat
from hullspeed.arch.tensors import Role
from hullspeed.hardware.ceilings import (
    KERNELS_VERSION,
    Ceilings,
    Curve,
    Overheads,
    timestamp,
)
from hullspeed.hardware.machine import Machine, detect_machine
from hullspeed.kernels.base import AttentionShape, Linear
from hullspeed.kernels.batch import Batch, SpanInput
from hullspeed.kernels.blocks import BLOCK, BlockWeight
from hullspeed.kernels.cpu.backend import CpuKernels
from hullspeed.memory.held import held_dtype
from hullspeed.models.decoder import Decoder
from hullspeed.models.weights import Weights
from hullspeed.perf.step import StepCost
from hullspeed.perf.work import Shape

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_DECODES = ((1, 512), (1, 2048), (4, 1024), (16, 512))
_CHUNKS = ((64, 0), (512, 0), (512, 512), (256, 1792))
_PAGE_TOKENS = 64
_QUIET_SHARE = 0.1
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
        decode, chunk = _attention_curves(short, kernels)
        bare = Ceilings(
            fingerprint=machine.fingerprint(KERNELS_VERSION),
            source="calibrated",
            measured_at=timestamp(),
            threads=threads,
            dram_bytes_per_s=dram,
            linear_flops_per_s=linear,
            head_flops_per_s=head,
            decode_bytes_per_s=decode,
            chunk_flops_per_s=chunk,
            overheads=_no_overheads(),
            relative_error=0.2,
            hidden=arch.hidden,
            notes=(f"shapes of hidden {arch.hidden}, {len(short.layers)} layers timed",),
        )
        progress("whole steps")
        overheads = _fit_overheads(decoder, short, bare, dtype)
    share = foreign.share()
    notes = bare.notes
    if share > _QUIET_SHARE:
        notes += (f"other processes kept {share:.0%} of the cores busy: measure again when quiet",)
    return msgspec.structs.replace(
        bare,
        overheads=overheads,
        relative_error=0.2 + share,
        quiet=share <= _QUIET_SHARE,
        notes=notes,
    )


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


class ForeignLoad:
    """Share of this machine's cores that other processes kept busy since it was made."""

    def __init__(self) -> None:
        self._before = self._busy()

    def _busy(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        own = psutil.Process().cpu_times()
        return sum(times) - idle, sum(times), own.user + own.system

    def share(self) -> float:
        """Between 0 and 1."""
        busy, total, own = (b - a for a, b in zip(self._before, self._busy(), strict=True))
        return max(0.0, (busy - own) / total) if total > 0 else 0.0


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


def _attention_curves(arch: ModelArch, kernels: CpuKernels) -> tuple[Curve, Curve]:
    """Decode: KV bytes/s against sequences x KV heads. Chunk: FLOP/s against visible tokens."""
    mixer = next(m for layer in arch.layers if isinstance(m := layer.mixer, FullAttention))
    shape = AttentionShape(mixer.q_heads, mixer.kv_heads, mixer.head_dim)
    longest = arch.max_context_tokens - 1
    decode: dict[float, list[float]] = {}
    for n, wanted in _DECODES:
        context = min(wanted, longest)
        kv_bytes = n * mixer.kv_bytes(context, "fp32")
        seconds = _attend_seconds(kernels, shape, [(1, context - 1)] * n, kv_bytes)
        decode.setdefault(float(n * mixer.kv_heads), []).append(kv_bytes / seconds)
    chunk: dict[float, float] = {}
    for n_tokens, start in _CHUNKS:
        if n_tokens + start > longest:
            continue
        kv_bytes = mixer.kv_bytes(start + n_tokens, "fp32")
        seconds = _attend_seconds(kernels, shape, [(n_tokens, start)], kv_bytes)
        chunk[float(start + n_tokens)] = mixer.flops(n_tokens, start) / seconds
    return (
        Curve(tuple(sorted(decode)), tuple(float(np.mean(decode[k])) for k in sorted(decode))),
        Curve(tuple(sorted(chunk)), tuple(chunk[k] for k in sorted(chunk))),
    )


def _attend_seconds(
    kernels: CpuKernels, shape: AttentionShape, spans: Sequence[tuple[int, int]], kv_bytes: int
) -> float:
    """Seconds of attention in one layer, each run on another layer's pages: out of the cache."""
    batch, n_pages = synthetic_batch(spans)
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


def synthetic_batch(spans: Sequence[tuple[int, int]], *, sample: bool = True) -> tuple[Batch, int]:
    """A batch of ``(n_tokens, start)`` spans on pages of their own, and how many pages it needs."""
    inputs, page = [], 0
    for n_tokens, start in spans:
        n_pages = -(-(start + n_tokens) // _PAGE_TOKENS)
        inputs.append(SpanInput([1] * n_tokens, start, range(page, page + n_pages), sample))
        page += n_pages
    return Batch.of(inputs), page


def _no_overheads() -> Overheads:
    return Overheads(
        step_s=0.0, layer_s=0.0, layer_token_s=0.0, sequence_s=0.0, request_s=0.0,
        prompt_token_s=0.0, stream_token_s=0.0,
    )  # fmt: skip


_STEPS = ([(1, 511)], [(1, 511)] * 4, [(1, 511)] * 16, [(64, 0)], [(256, 256)], [(512, 0)])


def _fit_overheads(
    decoder: Decoder, arch: ModelArch, bare: Ceilings, weight_dtype: str
) -> Overheads:
    """What whole steps take beyond the kernels timed alone, as a share per layer and per token.

    Least squares on relative residuals, so that short decode steps weigh as much as long chunks.
    """
    cost = StepCost(arch, bare, weight_dtype)
    rows, rest = [], []
    n_layers = len(arch.layers)
    longest = arch.max_context_tokens
    for spans in _STEPS:
        if max(n + start for n, start in spans) > longest:
            continue
        batch, n_pages = synthetic_batch(spans)
        decoder.allocate_kv(n_pages, _PAGE_TOKENS)
        took = best_seconds(functools.partial(decoder.forward, batch))
        known = cost.seconds([Shape(n, start) for n, start in spans])
        n_tokens = sum(n for n, _ in spans)
        rows.append([n_layers / took, n_layers * n_tokens * arch.hidden / 1024 / took])
        rest.append((took - known) / took)
    layer_s, layer_token_s = np.linalg.lstsq(np.array(rows), np.array(rest), rcond=None)[0]
    return Overheads(
        step_s=_STEP_S,
        layer_s=max(float(layer_s), 0.0),
        layer_token_s=max(float(layer_token_s), 0.0),
        sequence_s=_SEQUENCE_S,
        request_s=_REQUEST_S,
        prompt_token_s=_PROMPT_TOKEN_S,
        stream_token_s=_STREAM_TOKEN_S,
    )
