"""Remedies: what would help, each tried on the planner itself, ranked by what it brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec

from hullspeed.arch.model import ModelArch
from hullspeed.errors import HullspeedError
from hullspeed.hardware.catalogue import gpus
from hullspeed.plan.capacity import make_capacity
from hullspeed.plan.case import Case

_SMALL_CHUNK_TOKENS = 2048
_LARGEST_TP = 8


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """One change and its effect on the workload.

    Attributes:
        flags: How the engine is told, if it is a setting.
        served_before: Requests of the workload's length that run at once now.
        longest_before: Longest context one request can have now.
        output_before: Output tokens per second at the workload's concurrency now; 0 if unknown.
        tradeoff: What it costs.
    """

    change: str
    flags: str
    served_before: int
    served_after: int
    longest_before: int
    longest_after: int
    output_before: float
    output_after: float
    tradeoff: str


class _Candidate(NamedTuple):
    change: str
    flags: str
    case: Case
    tradeoff: str


class _Effect(NamedTuple):
    served: int
    longest: int
    output: float


def find_remedies(case: Case, *, most: int = 8) -> tuple[Remedy, ...]:
    """Changes that raise concurrency, context or throughput, largest effect first."""
    before = _effect(case)
    found = []
    for candidate in _candidates(case):
        try:
            after = _effect(candidate.case)
        except HullspeedError:  # the engine does not run this variant: then it is no remedy
            continue
        gain = _gain(before, after)
        if gain > 1.02:
            found.append((gain, candidate, after))
    found.sort(key=lambda item: -item[0])
    return tuple(
        Remedy(
            change=candidate.change,
            flags=candidate.flags,
            served_before=before.served,
            served_after=after.served,
            longest_before=before.longest,
            longest_after=after.longest,
            output_before=before.output,
            output_after=after.output,
            tradeoff=candidate.tradeoff,
        )
        for _, candidate, after in found[:most]
    )


def _effect(case: Case) -> _Effect:
    _, pool, capacity = make_capacity(
        case.model, case.memory(), case.settings, case.workload, tables=False
    )
    longest = min(pool.max_context_tokens(1), case.model.arch.max_context_tokens)
    predictor = case.predictor()
    running = min(case.workload.concurrency, capacity.served)
    if predictor is None or running < 1:
        return _Effect(capacity.served, longest, 0.0)
    speed = predictor.speed(case.workload, running)  # queues change waits, not the output
    return _Effect(capacity.served, longest, speed.output_tokens_per_s.value)


def _gain(before: _Effect, after: _Effect) -> float:
    """The largest improvement as a factor; going from nothing to something counts as large."""
    pairs = zip(before, after, strict=True)
    return max((b + 1e-9) / (a + 1e-9) if a > 0 else 1e6 * (b > 0) for a, b in pairs)


def _candidates(case: Case) -> Iterator[_Candidate]:
    if case.gpu is None:
        yield from _on_cpu(case)
        return
    for make in (_weights, _caches, _limits, _parts, _hardware):
        yield from make(case)


def _weights(case: Case) -> Iterator[_Candidate]:
    if case.model.arch.quant == "none":
        model = case.model.with_fp8_weights()
        native = case.gpu is not None and case.gpu.has("fp8")
        yield _Candidate(
            "FP8 weights",
            "an FP8 checkpoint of the model",
            replace(case, model=model),
            "below 1 % on most tasks; verify yours"
            if native
            else "this GPU has no FP8 units: weights are expanded on the way (Marlin), prefill "
            "gains nothing",
        )


def _caches(case: Case) -> Iterator[_Candidate]:
    arch, settings = case.model.arch, case.settings
    kv = settings.kv_dtype or arch.weight_format.kv_dtype or "auto"
    if "fp8" not in kv:
        yield _Candidate(
            "FP8 KV cache",
            _flag(case, vllm="--kv-cache-dtype fp8", sglang="--kv-cache-dtype fp8_e4m3"),
            case.with_settings(kv_dtype="fp8"),
            "slower than 16 bit at depth on some Hopper kernels: bench at your context",
        )
    if _has_state(arch) and settings.state_dtype not in ("bf16", "fp16"):
        yield _Candidate(
            "16-bit recurrent state",
            _flag(
                case,
                vllm="--mamba-ssm-cache-dtype bfloat16",
                sglang="--mamba-ssm-dtype bfloat16",
            ),
            case.with_settings(state_dtype="bf16"),
            "the model asks for 32 bit: compare answers of long outputs",
        )
    if _has_state(arch) and settings.prefix_caching is not False and settings.engine == "vllm":
        yield _Candidate(
            "prefix caching off",
            "--no-enable-prefix-caching",
            case.with_settings(prefix_caching=False),
            "every prompt is computed in full",
        )


def _limits(case: Case) -> Iterator[_Candidate]:
    settings = case.settings
    if settings.engine == "vllm" and settings.max_num_batched_tokens != _SMALL_CHUNK_TOKENS:
        yield _Candidate(
            f"chunks of {_SMALL_CHUNK_TOKENS:,} tokens",
            f"--max-num-batched-tokens {_SMALL_CHUNK_TOKENS}",
            case.with_settings(max_num_batched_tokens=_SMALL_CHUNK_TOKENS),
            "prompts take more steps; tokens of others come more evenly",
        )
    if settings.engine == "vllm" and not settings.enforce_eager:
        yield _Candidate(
            "no CUDA graphs",
            "--enforce-eager",
            case.with_settings(enforce_eager=True),
            "slower at small batches (not in the predicted speed)",
        )


def _parts(case: Case) -> Iterator[_Candidate]:
    settings = case.settings
    if case.model.weights.vision and not settings.language_model_only:
        yield _Candidate(
            "text only",
            _flag(case, vllm="--language-model-only"),
            case.with_settings(language_model_only=True),
            "no images",
        )
    if settings.draft_tokens:
        yield _Candidate(
            "no speculative tokens",
            "drop --speculative-config",
            case.with_settings(draft_tokens=0),
            "single streams get slower",
        )


def _hardware(case: Case) -> Iterator[_Candidate]:
    gpu, settings = case.gpu, case.settings
    if gpu is None:
        return
    if settings.tp * 2 <= _LARGEST_TP:
        tp = settings.tp * 2
        yield _Candidate(
            f"{tp} GPUs",
            _flag(case, vllm=f"--tensor-parallel-size {tp}", sglang=f"--tp {tp}"),
            case.with_settings(tp=tp),
            f"{tp // settings.tp} x the price",
        )
    larger = [
        g
        for g in gpus()
        if g.vendor == gpu.vendor
        and not g.unified
        and g.memory_bytes > 1.05 * gpu.memory_bytes
        and g.memory_bytes < 3 * gpu.memory_bytes
        and g.price is not None
    ]
    for other in sorted(larger, key=lambda g: g.price.usd_per_hour if g.price else 0.0)[:2]:
        price = other.price.usd_per_hour if other.price else 0.0
        yield _Candidate(
            f"{other.name} instead of {gpu.name}",
            "",
            replace(case, gpu=other),
            f"${price:.2f} an hour each",
        )


def _on_cpu(case: Case) -> Iterator[_Candidate]:
    if case.weight_dtype == "fp32":
        yield _Candidate(
            "fp16 weights",
            "--weight-dtype fp16",
            replace(case, weight_dtype="fp16"),
            "KL divergence 3e-6 on SmolLM2",
        )


def _has_state(arch: ModelArch) -> bool:
    return arch.state_bytes("fp32", "bf16") > 0


def _flag(case: Case, **by_engine: str) -> str:
    return by_engine.get(case.settings.engine, "")
