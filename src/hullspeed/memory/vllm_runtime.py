"""What vLLM uses besides weights and pool: an empirical model with its spread.

``pool = ceil(total x utilization) - consumed - transient - graph estimate`` (gpu_worker.py of
0.33.0). The terms on the right are measured by the engine at start; here they are modelled from
shapes and constants of ``profiles/vllm.toml``, each with the log it came from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hullspeed.arch.mlps import Mlp
from hullspeed.arch.model import ModelArch
from hullspeed.memory.budget import EngineSettings, GpuMemory, MemoryItem, Term, WeightBytes
from hullspeed.memory.layers import keeps_state
from hullspeed.memory.profile import EngineProfile
from hullspeed.units import GIB, MIB

Z90 = 1.645
SM100_CAPTURE_LIMIT = 1024
CAPTURE_LIMIT = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that vLLM fills in by GPU class."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


def resolve_limits(
    arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, profile: EngineProfile
) -> Limits:
    """Flags where given, else the API server's defaults for this GPU."""
    total_gib = gpu.total_bytes / GIB
    row = next(
        row
        for row in profile.rows("gpu_class")
        if total_gib >= row["min_total_gib"]
        and not ("excludes" in row and row["excludes"] in gpu.name)
    )
    return Limits(
        max_num_batched_tokens=settings.max_num_batched_tokens
        or int(row["max_num_batched_tokens"]),
        max_num_seqs=settings.max_num_seqs or int(row["max_num_seqs"]),
        max_model_len=settings.max_model_len or arch.max_context_tokens,
    )


def capture_sizes(largest: int) -> int:
    """How many batch sizes are captured up to ``largest``: 1, 2, 4, then steps of 8 to 256 and of
    16 above (51 for 512, 35 for 256: "Profiling CUDA graph memory" lines).
    """
    small = sum(size <= largest for size in (1, 2, 4))
    return small + min(largest, 256) // 8 + max(0, largest - 256) // 16


def largest_capture(gpu: GpuMemory, seqs: int, draft_tokens: int) -> int:
    """``min(2 x seqs x (1 + draft), 512)``, 1,024 on SM100."""
    limit = SM100_CAPTURE_LIMIT if gpu.compute_capability[0] == 10 else CAPTURE_LIMIT
    return min(2 * seqs * (1 + draft_tokens), limit)


def _mlp_width(mlp: Mlp) -> int:
    """Widest intermediate of one token: all chosen experts at once for MoE."""
    dense = getattr(mlp, "intermediate", 0) * getattr(mlp, "experts_per_token", 1)
    return int(dense + getattr(mlp, "shared_intermediate", 0))


def loaded_weights(
    arch: ModelArch, weights: WeightBytes, settings: EngineSettings, profile: EngineProfile
) -> MemoryItem:
    """Weights of one rank: what is not used is not loaded, what is small is replicated."""
    loaded = weights.decoder - weights.replicated
    if not settings.language_model_only:
        loaded += weights.vision
    if settings.draft_tokens:
        loaded += weights.mtp
    per_rank = -(-loaded // (settings.tp * settings.pp)) + weights.replicated
    spread = round(Z90 * profile.number("weights_sigma_share") * per_rank)
    # Quantized weights are repacked on loading, and sharding replicates what does not divide.
    exact = settings.tp == 1 and settings.pp == 1 and arch.quant == "none"
    return MemoryItem(
        term=Term.WEIGHTS,
        name="weights",
        bytes=per_rank,
        source=f"{weights.source}; {settings.tp * settings.pp} ranks",
        exact=exact,
        interval=None if exact else (per_rank - spread, per_rank + spread),
    )


def graphs_charged(settings: EngineSettings, profile: EngineProfile) -> bool:
    """Whether the graph estimate comes off the pool."""
    asked = settings.estimate_cudagraphs
    return bool(profile.rule("graph_estimate") if asked is None else asked)


def captured_graphs(
    arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, limits: Limits
) -> tuple[int, int]:
    """How many piecewise and full graphs are captured."""
    if settings.enforce_eager:
        return 0, 0
    largest = largest_capture(gpu, limits.max_num_seqs, settings.draft_tokens)
    hybrid = keeps_state(arch)
    # FlashInfer captures no FULL graph with drafts (log line in vLLM 0.20 and later).
    full = 0 if hybrid and settings.draft_tokens else min(limits.max_num_seqs, largest)
    return capture_sizes(largest), capture_sizes(full)


def graph_bytes(
    arch: ModelArch,
    gpu: GpuMemory,
    settings: EngineSettings,
    limits: Limits,
    profile: EngineProfile,
) -> int:
    """What graphs really take, per rank: they share one pool and cost little each."""
    piecewise, full = captured_graphs(arch, gpu, settings, limits)
    if not piecewise:
        return 0
    value = profile.number("graph_base_gib") * GIB
    value += piecewise * profile.number("graph_piecewise_mib") * MIB / settings.tp
    value += full * profile.number("graph_full_mib") * MIB / settings.tp
    return round(value)


def _graph_item(
    arch: ModelArch,
    gpu: GpuMemory,
    settings: EngineSettings,
    limits: Limits,
    profile: EngineProfile,
) -> MemoryItem | None:
    """The graph estimate that is taken off the pool, when it is."""
    value = float(graph_bytes(arch, gpu, settings, limits, profile))
    if not value or not graphs_charged(settings, profile):
        return None
    piecewise, full = captured_graphs(arch, gpu, settings, limits)
    spread = 0.5 * value
    source = f"{piecewise} piecewise and {full} full graphs"
    hybrid = keeps_state(arch)
    if hybrid and full and profile.rule("graph_transient_charged"):
        thousands = limits.max_num_batched_tokens / 1024
        share = full / capture_sizes(CAPTURE_LIMIT)
        extra = profile.number("graph_transient_gib_per_1k_tokens") * thousands * share
        extra *= GIB / settings.tp
        value += extra
        spread += Z90 * profile.number("graph_transient_sigma_share") * extra
        cited = profile.source("graph_transient_charged")
        source += f"; prefill transient charged as graphs ({cited})"
    return MemoryItem(
        term=Term.RUNTIME,
        name="CUDA graph estimate",
        bytes=round(value),
        source=source,
        exact=False,
        interval=(round(max(0.0, value - spread)), round(value + spread)),
    )


def runtime_items(
    arch: ModelArch,
    gpu: GpuMemory,
    settings: EngineSettings,
    limits: Limits,
    weights: WeightBytes,
    profile: EngineProfile,
) -> list[MemoryItem]:
    """Non-torch memory, the profile run's peak and the graph estimate, per rank."""
    tp = settings.tp
    number = profile.number
    width = max(_mlp_width(layer.mlp) for layer in arch.layers)
    parts: list[tuple[str, float, str]] = [
        (
            "CUDA context, communication, libraries",
            (number("non_torch_gib") + number("non_torch_gib_per_doubling") * math.log2(tp)) * GIB,
            "consumed minus loaded in public logs",
        ),
        (
            "activations of one step",
            number("activation_bytes_per_width") * width * limits.max_num_batched_tokens / tp,
            f"{limits.max_num_batched_tokens} tokens x widest MLP {width}",
        ),
        (
            "sampler profile",
            number("sampler_bytes") * limits.max_num_seqs * arch.vocab,
            f"12 B x {limits.max_num_seqs} sequences x {arch.vocab} vocabulary",
        ),
    ]
    if weights.vision and not settings.language_model_only:
        share = 0.5 + 0.5 / tp
        parts.append(
            ("vision profile", number("vision_gib") * GIB * share, "largest image in profile_run")
        )
    if settings.draft_tokens:
        parts.append(("draft model", number("spec_gib") * GIB, "its own activations"))
    total = sum(value for _, value, _ in parts)
    sigma = number("runtime_sigma_gib") * GIB
    items = [
        MemoryItem(
            term=Term.RUNTIME,
            name=name,
            bytes=round(value),
            source=source,
            exact=False,
            interval=_spread(value, Z90 * sigma * value / total),
        )
        for name, value, source in parts
    ]
    graphs = _graph_item(arch, gpu, settings, limits, profile)
    return items if graphs is None else [*items, graphs]


def _spread(value: float, half: float) -> tuple[int, int]:
    return round(max(0.0, value - half)), round(value + half)


def gdn_scratch(
    arch: ModelArch, settings: EngineSettings, limits: Limits, profile: EngineProfile
) -> int:
    """Prefill scratch of gated-delta layers that the profile run does not see, per rank."""
    if not any(layer.mixer.kind == "gated_delta_net" for layer in arch.layers):
        return 0
    per_token = profile.number("gdn_scratch_bytes_per_token") / settings.tp
    return round(per_token * limits.max_num_batched_tokens)
