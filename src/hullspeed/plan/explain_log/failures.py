"""Why a start-up failed: the cause behind the last error, and the change that helps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hullspeed.findings import Finding, Severity
from hullspeed.plan.explain_log.facts import Facts
from hullspeed.plan.explain_log.infer import Inference
from hullspeed.plan.explain_log.reader import LogEvent, ParsedLog

CUDA_13_DRIVER = "580.65.06"
FIRST_CUDA_13_VLLM = "0.20"


@dataclass(frozen=True, slots=True)
class Failure:
    """One error line in its log."""

    event: LogEvent
    log: ParsedLog
    facts: Facts
    inference: Inference


def failures(log: ParsedLog, facts: Facts, inference: Inference) -> list[Finding]:
    """One finding for each distinct error, the root cause first (errors are printed in order)."""
    found: dict[str, Finding] = {}
    for event in log.errors:
        finding = _EXPLAIN[event.name](Failure(event, log, facts, inference))
        found.setdefault(finding.code, finding)
    return list(found.values())


def _error(code: str, what: str, why: str, fix: str, **evidence: object) -> Finding:
    return Finding(
        code=code,
        severity=Severity.ERROR,
        what=what,
        why=why,
        fix=fix,
        evidence={name: str(value) for name, value in evidence.items() if value is not None},
    )


def _too_many_seqs(at: Failure) -> Finding:
    blocks, seqs = int(at.event.fields["blocks"]), int(at.event.fields["max_num_seqs"])
    best = at.inference.best
    size = best.pool.bytes_per_block / 2**20 if best else None
    fix = f"--max-num-seqs {blocks}"
    why = (
        "a hybrid model needs one block for each decoding sequence, and FULL graphs are captured "
        "for all of them; the check comes after loading"
    )
    if at.facts.total_gib and at.facts.utilization and size:
        missing = (seqs - blocks) * size / 1024
        top = at.facts.utilization + missing / at.facts.total_gib
        why += (
            f". Raising the utilization does not rescue it: {top:.2f} would be needed"
            if top > 0.98
            else f". A utilization of {top:.2f} would also do"
        )
    else:
        why += ". The hint to raise the utilization rarely rescues it: a block is tens of MiB"
    return _error(
        "EL101",
        "more sequences asked for than the pool has state blocks",
        why,
        fix,
        max_num_seqs=seqs,
        blocks=blocks,
        block_mib=None if size is None else f"{size:.4g}",
    )


def _too_long(at: Failure) -> Finding:
    longest = at.facts.longest_tokens
    fixes = [f"--max-model-len {longest}"] if longest else []
    needed, pool = float(at.event.fields["needed_gib"]), float(at.event.fields["kv_gib"])
    if at.facts.total_gib and at.facts.utilization:
        share = at.facts.utilization + (needed - pool) / at.facts.total_gib
        if share <= 0.98:
            fixes.append(f"--gpu-memory-utilization {math.ceil(share * 1000) / 1000:.3f}")
    best = at.inference.best
    if best is not None and not best.kv_dtype.startswith("fp8"):
        fixes.append("--kv-cache-dtype fp8")
    if best is not None and best.draft_tokens:
        fixes.append("no speculative decoding (each draft token holds a state block per group)")
    if not at.facts.text_only:
        fixes.append("--language-model-only when no images are served")
    return _error(
        "EL102",
        "one request of the longest context does not fit the pool",
        "the engine refuses to start unless a whole request of max_model_len fits at once",
        "; or ".join(fixes) or "lower --max-model-len",
        needed_gib=at.event.fields["needed_gib"],
        pool_gib=at.event.fields["kv_gib"],
        max_model_len=at.event.fields["max_model_len"],
        reproduced="yes" if best and "needed GiB" in best.matched else None,
    )


def _no_pool(at: Failure) -> Finding:
    if at.log.engine == "sglang":
        return _error(
            "EL103",
            "weights leave nothing for the pools",
            "--mem-fraction-static is a share of total memory for weights and pools together",
            "raise --mem-fraction-static, quantize, or use more GPUs",
            weights_gib=at.facts.weights_gib,
        )
    estimate = at.facts.graph_estimate_gib
    large = estimate is not None and estimate > 1.0
    return _error(
        "EL103",
        "nothing is left for the pool",
        "weights, activations and the graph estimate exceed utilization x total"
        + (f"; the graph estimate alone is {estimate:.2f} GiB" if large else ""),
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0, or --enforce-eager"
        if large
        else "raise --gpu-memory-utilization, lower --max-num-batched-tokens and --max-num-seqs, "
        "quantize, or use more GPUs",
        weights_gib=at.facts.weights_gib,
        graph_estimate_gib=estimate,
    )


def _not_free(at: Failure) -> Finding:
    free, total = float(at.event.fields["free_gib"]), float(at.event.fields["total_gib"])
    return _error(
        "EL104",
        "the GPU is partly in use before the engine starts",
        "utilization is a share of the whole GPU, whoever uses it",
        f"stop the other process (nvidia-smi), or --gpu-memory-utilization "
        f"{math.floor(free / max(total, 0.001) * 1000) / 1000:.3f}",
        free_gib=at.event.fields["free_gib"],
        asked_gib=at.event.fields["requested_gib"],
    )


def _oom(at: Failure) -> Finding:
    size = f"{at.event.fields['size']} {at.event.fields['unit']}"
    before = [e.name for e in at.log.events if e.line <= at.event.line]
    capturing = "capturing" in before and "captured" not in before
    ready = "ready" in before
    if capturing:
        return _error(
            "EL105",
            "out of memory while capturing graphs",
            "graphs are captured after the pool is allocated, outside it: a higher utilization "
            "makes it worse",
            "--enforce-eager, or a shorter capture list "
            "(--compilation-config '{\"max_cudagraph_capture_size\": 16}')",
            tried=size,
        )
    if ready:
        return _error(
            "EL106",
            "out of memory while serving",
            "the profile run does not see everything: prefill scratch of gated-delta layers is "
            "about 72 KiB per token of a chunk",
            "--max-num-batched-tokens 2048, or a lower --gpu-memory-utilization",
            tried=size,
        )
    if "weights" in before:
        return _error(
            "EL107",
            "out of memory in the profile run",
            "activations of max_num_batched_tokens, the sampler for max_num_seqs, or the largest "
            "image do not fit beside the weights",
            "lower --max-num-batched-tokens and --max-num-seqs; --language-model-only without "
            "images",
            tried=size,
        )
    return _error(
        "EL108",
        "out of memory while loading weights",
        "the weights of one rank exceed the GPU",
        "a quantized checkpoint, or --tensor-parallel-size 2",
        tried=size,
    )


def _driver(at: Failure) -> Finding:
    found = int(at.event.fields["found"])
    has = f"{found // 1000}.{found % 1000 // 10}"
    return _error(
        "EL109",
        "the driver is older than the CUDA build of torch",
        f"the driver offers CUDA {has}; PyPI wheels of vLLM are CUDA 13 builds since "
        f"{FIRST_CUDA_13_VLLM}. A driver of one major version runs any build of that major",
        f"update the driver to {CUDA_13_DRIVER} or newer; or install the CUDA 12 wheel "
        "(cu129, from wheels.vllm.ai) or vLLM 0.19.1; cuda-compat works on data-center GPUs only",
        driver_cuda=has,
    )


def _cudart(at: Failure) -> Finding:
    major = at.event.fields["cuda_major"]
    return _error(
        "EL110",
        f"the engine is a CUDA {major} build and that runtime is missing",
        "engine and torch were installed for different CUDA versions",
        "install both from the same index, in an environment of their own "
        "(pip install vllm pulls the torch it was built for)",
        library=f"libcudart.so.{major}",
    )


def _no_kernel(at: Failure) -> Finding:
    return _error(
        "EL111",
        "the build has no kernels for this GPU",
        "its compute capability is older or newer than the build's list (CUDA 13 drops below 7.5, "
        "Blackwell needs CUDA 12.8)",
        "a build for this capability: hullspeed preflight names it",
        quantization=at.facts.quantization,
    )


def _illegal(at: Failure) -> Finding:
    drafts = at.facts.draft_tokens
    return _error(
        "EL112",
        "a kernel accessed memory it does not own",
        "not a matter of memory size; MTP on long sequences did this in vLLM 0.19.1 to 0.20.2"
        if drafts
        else "not a matter of memory size",
        "upgrade vLLM, or leave speculative decoding off"
        if drafts
        else "upgrade the engine; CUDA_LAUNCH_BLOCKING=1 names the kernel",
        version=at.log.version,
    )


def _tp(at: Failure) -> Finding:
    heads = int(at.event.fields["heads"])
    divisors = [n for n in (1, 2, 4, 8, 16) if heads % n == 0]
    return _error(
        "EL113",
        "the GPUs do not divide the heads",
        "tensor parallelism splits attention by heads",
        f"--tensor-parallel-size one of {', '.join(map(str, divisors))}",
        heads=heads,
        tp=at.event.fields["tp"],
    )


def _flag(at: Failure) -> Finding:
    return _error(
        "EL114",
        "a flag that this release does not know",
        "flags come and go between releases",
        'hullspeed launch --check "<the command>" prints today\'s form',
        flags=at.event.fields["flags"],
    )


_EXPLAIN: dict[str, Callable[[Failure], Finding]] = {
    "too_many_seqs": _too_many_seqs,
    "too_long": _too_long,
    "no_pool": _no_pool,
    "not_free": _not_free,
    "oom": _oom,
    "driver_old": _driver,
    "cudart_missing": _cudart,
    "no_kernel": _no_kernel,
    "illegal_access": _illegal,
    "tp_heads": _tp,
    "bad_flag": _flag,
}
