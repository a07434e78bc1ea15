"""Terms: what a step would take at a data sheet's peaks, and what it counts besides.

Each term is a time at 100 % of one peak (bandwidth, FLOP/s, link) or a count (layers, sequences,
all-reduces). A step's seconds are their weighted sum; the weights are what ``coefficients.toml``
holds. Matrix products overlap reading their weights once with multiplying (``gemm.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hullspeed.arch.mixers import GatedDeltaNet, Mamba2
from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.hardware.gpu import Gpu
from hullspeed.perf.activations import layer_launches, recurrent_bytes, row_bytes
from hullspeed.perf.gemm import overlapped, padded_rows, sustained_share, wave_factor
from hullspeed.perf.work import Shape, Work

# GPTQ's exllama kernels (vLLM csrc/quantization/gptq/q_gemm.cu): up to 50 rows in blocks of 8, each
# of which reads the weights, without tensor cores; above, the weights are first written out in 16
# bit.
_EXLLAMA_ROWS, _EXLLAMA_BLOCK = 50, 8
# Weights expanded on the way to 16 bit cost their products tensor-core time (AccelMark: W8A16 and
# FP8 on Ampere serve 100 sequences no faster than BF16 does, though they read half).
_EXPANDING = 1.4
# Grouped products of routed experts reach this share of what dense 16-bit products sustain, in
# whatever format their weights are, and their reading hides none of it (NVIDIA's measurements per
# operation: 0.4 to 0.5 of the 16-bit peak on H100 and H200).
_EXPERT_SHARE = 0.6
# FA3 on Hopper reads 8-bit KV at 0.48 to 0.63 of the bandwidth where 16 bit reaches 0.85 (same
# source; TensorRT-LLM's kernels 0.7 to 0.78 of either): less memory, hardly less time.
_HOPPER_FP8_KV = 1.45
# One-shot all-reduces up to here; beyond, two-shot ones start slower the more GPUs there are.
_ONE_SHOT_BYTES = 2**18


class Terms(NamedTuple):
    """One step; seconds at peak unless said otherwise.

    Attributes:
        weights_s: Reading the layers' and the head's weights, as far as multiplying hides none of
            it.
        multiply_s: Multiplying in 16 bit at the rate that such products sustain, likewise; rows in
            whole tiles and waves.
        multiply_low_s: The same in the format's own 8 or 4 bit.
        attention_s: Attention arithmetic of prompt chunks, 16 bit.
        delta_s: What recurrent layers move for the tokens of prompt chunks.
        kv_s: Reading the KV of single tokens.
        state_s: Reading and writing recurrent state.
        rows_s: Norms, rotations, residuals: activations through memory.
        layers: Layers launched, in those of attention and 16-bit products.
        steps: 1.
        sequences: Sequences in the step.
        reduces: All-reduces, two a layer; long ones count more among four and eight GPUs.
        reduce_s: Their bytes over the link.
        moe_layers: Layers with routed experts.
        eager_layers: Layers launched one kernel after another, outside CUDA graphs: those of a
            step with prompt chunks, or of any step with ``enforce_eager``.
    """

    weights_s: float = 0.0
    multiply_s: float = 0.0
    multiply_low_s: float = 0.0
    attention_s: float = 0.0
    delta_s: float = 0.0
    kv_s: float = 0.0
    state_s: float = 0.0
    rows_s: float = 0.0
    layers: float = 0.0
    steps: float = 0.0
    sequences: float = 0.0
    reduces: float = 0.0
    reduce_s: float = 0.0
    moe_layers: float = 0.0
    eager_layers: float = 0.0


class StepTerms:
    """Terms of steps of ``arch`` on ``tp`` GPUs under ``engine``.

    Raises:
        UsageError: for a GPU without bandwidth or FLOP/s.
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
        eager: bool = False,
        engine: str = "vllm",
    ) -> None:
        if gpu.bandwidth_bytes_per_s <= 0 or gpu.flops_per_s.get("bf16", 0.0) <= 0:
            raise UsageError(
                "no speeds are known for this GPU",
                seen=gpu.name,
                fix="describe it: --gpu custom:memory=48GiB,bandwidth=864,bf16=362",
            )
        self.gpu = gpu
        self.tp = tp
        self.eager = eager
        self.work = work = Work(
            arch, weight_bytes=weight_bytes, kv_dtype=kv_dtype, state_dtype=state_dtype
        )
        self.compute_dtype = compute_dtype(arch.quant, gpu)
        self._bandwidth = gpu.bandwidth_bytes_per_s * tp
        self._peak16 = gpu.flops_per_s["bf16"] * tp
        self._rate = (
            gpu.peak_flops_per_s(self.compute_dtype)
            * tp
            * sustained_share(gpu.compute_capability, self.compute_dtype)
        )
        self._rate16 = self._peak16 * sustained_share(gpu.compute_capability, "bf16")
        self._low = self.compute_dtype != "bf16"
        self._exllama = arch.quant == "gptq-exllama"
        # 16 bit outside tensor cores: twice the rate of 32 bit, four times on A100 (data sheets).
        fp32 = gpu.flops_per_s.get("fp32", gpu.flops_per_s["bf16"] / 4)
        self._half = fp32 * (4 if gpu.name.startswith("A100") else 2) * tp
        plain = self._low or self._exllama or arch.quant == "none"
        self._expanding = 1.0 if plain else _EXPANDING
        self._dense_flops = work.body_flops(1) - work.expert_flops(1)
        self._head_bytes = 2.0 * work.head_params
        self._row_bytes = row_bytes(arch, tp)
        self._launches = layer_launches(arch, self.compute_dtype)
        self._moe_layers = sum(hasattr(layer.mlp, "experts") for layer in arch.layers)
        self._link = gpu.interconnect_bytes_per_s / 2
        self._reduce_bytes = 2 * work.n_layers * 2.0 * arch.hidden * 2 * (tp - 1) / tp
        self._delta_per_token = sum(
            layer.mixer.flops(1, 0)
            for layer in arch.layers
            if isinstance(layer.mixer, GatedDeltaNet | Mamba2)
        )
        self._delta_bytes = sum(recurrent_bytes(layer.mixer) for layer in arch.layers)
        slow = kv_dtype.startswith("fp8") and gpu.compute_capability == "9.0"
        self._kv_slow = _HOPPER_FP8_KV if slow and engine != "trtllm" else 1.0
        self._kv_slope = work.kv_bytes(2**17) / 2**17 if not self._bounded() else 0.0
        self._wave = wave_factor(gpu, arch, tp)

    def _bounded(self) -> bool:
        """Some layers keep only a window: KV is then not proportional to the context."""
        return self.work.kv_bytes(2**18) != 2 * self.work.kv_bytes(2**17)

    def decode_kv_bytes(self, n_decode: int, context_tokens: int) -> float:
        """KV bytes that ``n_decode`` sequences of ``context_tokens`` in all read."""
        if self._kv_slope:
            return self._kv_slope * (context_tokens + n_decode)
        return n_decode * self.work.kv_bytes(context_tokens // n_decode + 1) if n_decode else 0.0

    def _reduces(self, n_tokens: int) -> float:
        """All-reduces of a step, in short ones."""
        if self.tp == 1:
            return 0.0
        short = 2.0 * self.work.arch.hidden * n_tokens <= _ONE_SHOT_BYTES
        return 2.0 * self.work.n_layers * (1.0 if short else 0.5 * (1.0 + math.log2(self.tp)))

    def _reading(self, n_tokens: int) -> tuple[float, float]:
        """Seconds of reading the layers' weights, and of unpacking them first if need be."""
        stored = self.work.body_bytes(n_tokens) / self._bandwidth
        if not self._exllama:
            return stored, 0.0
        if n_tokens <= _EXLLAMA_ROWS:
            return stored * -(-n_tokens // _EXLLAMA_BLOCK), self.work.body_flops(
                n_tokens
            ) / self._half
        unpacked = stored * 2.0 / self.work.bytes_per_param
        return unpacked, stored + unpacked

    def of(
        self,
        n_decode: int,
        context_tokens: int,
        chunks: Sequence[Shape],
        mbu: float = 0.75,
        mfu: float = 0.6,
    ) -> Terms:
        """Terms of a step of ``n_decode`` single tokens, whose contexts sum to
        ``context_tokens``, and prompt ``chunks``. ``mbu`` and ``mfu`` are the shares of bandwidth
        and of the sustained rate that say how much of reading and multiplying overlaps.
        """
        work, tp = self.work, self.tp
        n_tokens, n_logits, attention, delta_bytes = n_decode, n_decode, 0.0, 0.0
        for shape in chunks:
            n_tokens += shape.n_tokens
            n_logits += shape.sample
            delta_bytes += self._delta_bytes * shape.n_tokens
            attention += work.attention_flops(shape) - self._delta_per_token * shape.n_tokens
        reading, unpacking = self._reading(n_tokens)
        expert_reading = expert_multiplying = 0.0
        if self._moe_layers:
            expert_reading = work.expert_bytes(n_tokens) / self._bandwidth
            expert_multiplying = work.expert_flops(n_tokens) / (self._rate16 * _EXPERT_SHARE)
            reading -= expert_reading
        rows = padded_rows(n_tokens)
        multiplying = self._dense_flops * rows * self._wave(rows) / self._rate * self._expanding
        read, done = overlapped(reading / mbu, multiplying / mfu)
        weights_s = reading * read + unpacking + expert_reading
        low_s = multiplying * done if self._low else 0.0
        multiply_s = expert_multiplying + (0.0 if self._low else multiplying * done)
        if n_logits:
            head_read = self._head_bytes / self._bandwidth
            head_flops = 2.0 * work.head_params * padded_rows(n_logits) / self._rate16
            read, done = overlapped(head_read / mbu, head_flops / mfu)
            weights_s += head_read * read
            multiply_s += head_flops * done
        sequences = n_decode + len(chunks)
        return Terms(
            weights_s=weights_s,
            multiply_s=multiply_s,
            multiply_low_s=low_s,
            attention_s=attention / self._peak16,
            delta_s=delta_bytes / self._bandwidth,
            kv_s=self._kv_slow * self.decode_kv_bytes(n_decode, context_tokens) / self._bandwidth,
            state_s=2.0 * sequences * work.state_bytes / self._bandwidth,
            # Norms and residuals are computed by every rank: no share of them is saved.
            rows_s=self._row_bytes * n_tokens / self.gpu.bandwidth_bytes_per_s,
            layers=self._launches,
            steps=1.0,
            sequences=sequences,
            reduces=self._reduces(n_tokens),
            reduce_s=self._reduce_bytes * n_tokens / self._link if tp > 1 else 0.0,
            moe_layers=self._moe_layers,
            eager_layers=work.n_layers if chunks or self.eager else 0.0,
        )


def compute_dtype(quant: str, gpu: Gpu) -> str:
    """The format in which ``gpu`` multiplies weights of format ``quant``: their own where both
    sides of the product are quantized and the hardware can, else 16 bit with weights expanded on
    the way (Marlin W8A16, AWQ, GPTQ).
    """
    if quant.startswith("fp8") and gpu.has("fp8"):
        return "fp8"
    if quant.startswith("nvfp4") and gpu.has("fp4"):
        return "fp4"
    if quant.startswith("int8") and gpu.has("int8"):
        return "int8"
    return "bf16"
