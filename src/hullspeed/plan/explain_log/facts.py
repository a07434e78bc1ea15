"""What a log states, in numbers: the input of consistency checks and inference."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hullspeed.plan.explain_log.reader import ParsedLog

_SPEC_TOKENS = re.compile(r"num_spec(?:ulative)?_tokens['\"]?\s*[=:]\s*(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything stated, ``None`` where the log is silent. Sizes in GiB as printed."""

    engine: str
    version: str | None = None
    model: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    tp: int | None = None
    pp: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    utilization: float | None = None
    kv_dtype: str | None = None
    state_dtype: str | None = None
    prefix_caching: bool | None = None
    state_mode: str | None = None
    draft_tokens: int | None = None
    draft_method: str | None = None
    block_size_flag: int | None = None
    mamba_block_flag: int | None = None
    eager: bool = False
    text_only: bool = False
    kv_gib: float | None = None
    tokens: int | None = None
    concurrency: float | None = None
    concurrency_tokens: int | None = None
    blocks: int | None = None
    block_tokens: int | None = None
    padding_percent: float | None = None
    padding_layers: int | None = None
    gdn_kernel: str | None = None
    weights_gib: float | None = None
    total_gib: float | None = None
    free_gib: float | None = None
    requested_gib: float | None = None
    consumed_gib: float | None = None
    peak_gib: float | None = None
    graph_gib: float | None = None
    graph_estimate_gib: float | None = None
    needed_gib: float | None = None
    longest_tokens: int | None = None
    # SGLang
    slots: int | None = None
    slot_pool_gib: float | None = None
    max_running: int | None = None
    radix_strategy: str | None = None

    @property
    def draft_model(self) -> bool:
        """Whether drafts come from a model of its own, which keeps layers in the pool."""
        own = ("mtp", "qwen3_next_mtp", "qwen3_5_mtp", "ngram", "suffix")
        return self.draft_method is not None and self.draft_method not in own


def _value(text: str, *names: str) -> str | None:
    """``name=value`` of a configuration line or ``'name': value`` of an argument line."""
    for name in names:
        match = re.search(rf"['\"]?\b{name}['\"]?\s*[=:]\s*('[^']*'|\"[^\"]*\"|[\w./+-]+)", text)
        if match and match[1] not in ("None", "auto", "'auto'"):
            return match[1].strip("'\"")
    return None


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    digits = text.replace(",", "")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 16 else None


def _gib(text: str | None) -> float | None:
    """A printed number; ``None`` when it is not one (argument values are free text)."""
    if text is None or not re.fullmatch(r"-?\d{1,15}(?:\.\d{0,9})?", text.rstrip(".")):
        return None
    return float(text.rstrip("."))


def _flag(text: str | None) -> bool | None:
    return None if text is None else text == "True"


def _kv_name(name: str | None) -> str | None:
    if name is None:
        return None
    return name.removeprefix("torch.")


def vllm_facts(log: ParsedLog) -> Facts:
    """Facts of a vLLM log; the argument line wins over defaults in the configuration line."""
    args = log.last("args", "args") or ""
    config = log.last("config", "config") or ""
    both = f"{args} {config}"
    drafts = _SPEC_TOKENS.search(both)
    speculative = "speculative_config=None" not in config and ("speculative_config" in both)
    method = _value(both, "method")
    caching = _flag(_value(args, "enable_prefix_caching"))
    if caching is None:
        caching = _flag(_value(config, "enable_prefix_caching"))
    off = 0 if "speculative_config=None" in config else None
    draft_tokens = _number(drafts[1]) if drafts else off
    return Facts(
        engine="vllm",
        version=log.rules_version,
        model=_value(args, "model", "model_tag") or _value(config, "model"),
        dtype=_kv_name(_value(config, "dtype")),
        quantization=_value(config, "quantization"),
        tp=_number(_value(both, "tensor_parallel_size")) or (log.ranks if log.ranks > 1 else None),
        pp=_number(_value(both, "pipeline_parallel_size")),
        max_model_len=_number(
            _value(args, "max_model_len")
            or log.last("too_long", "max_model_len")
            or log.last("max_model_len", "max_model_len")
            or _value(config, "max_seq_len")
            or log.last("concurrency", "concurrency_tokens")
        ),
        max_num_seqs=_number(_value(args, "max_num_seqs"))
        or _number(log.last("too_many_seqs", "max_num_seqs")),
        max_num_batched_tokens=_number(_value(args, "max_num_batched_tokens")),
        utilization=_gib(_value(args, "gpu_memory_utilization"))
        or _gib(log.last("requested", "utilization"))
        or _gib(log.last("graph_charged", "utilization")),
        kv_dtype=_kv_name(_value(args, "kv_cache_dtype") or _value(config, "kv_cache_dtype"))
        or log.last("kv_dtype", "kv_dtype"),
        state_dtype=_kv_name(_value(both, "mamba_ssm_cache_dtype")),
        prefix_caching=caching,
        state_mode=log.last("state_mode", "state_mode"),
        draft_tokens=draft_tokens,
        draft_method=method if speculative else None,
        block_size_flag=_number(_value(args, "block_size")),
        mamba_block_flag=_number(_value(args, "mamba_block_size")),
        eager=bool(log.named("eager")) or _value(args, "enforce_eager") == "True",
        text_only=bool(log.named("text_only")) or _value(args, "language_model_only") == "True",
        kv_gib=_gib(
            log.last("too_long", "kv_gib") or log.least("kv_gib", "kv_gib", after="weights")
        ),
        tokens=_number(log.last("tokens", "tokens")),
        concurrency=_gib(log.last("concurrency", "concurrency")),
        concurrency_tokens=_number(log.last("concurrency", "concurrency_tokens")),
        blocks=_number(log.last("blocks", "blocks") or log.last("too_many_seqs", "blocks")),
        block_tokens=_number(log.last("block_tokens", "block_tokens")),
        padding_percent=_gib(log.last("state_padding", "padding_percent")),
        padding_layers=_number(log.last("padding_layers", "padding_layers")),
        gdn_kernel=log.last("gdn_kernel", "kernel"),
        weights_gib=_gib(log.last("weights", "weights_gib") or log.last("usage", "weights_gib")),
        total_gib=_gib(_total(log)),
        free_gib=_gib(log.last("free_at_start", "free_gib") or log.last("not_free", "free_gib")),
        requested_gib=_gib(
            log.last("requested", "requested_gib") or log.last("not_free", "requested_gib")
        ),
        consumed_gib=_gib(log.last("usage", "consumed_gib")),
        peak_gib=_gib(log.last("usage", "peak_gib")),
        graph_gib=_gib(log.last("graph_pool", "graph_gib") or log.last("captured", "graph_gib")),
        graph_estimate_gib=_gib(
            log.last("graph_pool", "graph_estimate_gib")
            or log.last("graph_estimate", "graph_estimate_gib")
        ),
        needed_gib=_gib(log.last("too_long", "needed_gib")),
        longest_tokens=_number(log.last("longest", "longest_tokens")),
    )


def _total(log: ParsedLog) -> str | None:
    for name in ("free_at_start", "not_free", "memory_profile", "oom_state"):
        if (value := log.last(name, "total_gib")) is not None:
            return value
    return None


def sglang_facts(log: ParsedLog) -> Facts:
    """Facts of an SGLang log (its GB are GiB)."""
    args = log.last("args", "args") or ""
    k_gib, v_gib = log.last("tokens", "k_gib"), log.last("tokens", "v_gib")
    kv_gib = float(k_gib) + float(v_gib) if k_gib and v_gib else None
    conv, ssm = log.last("slots", "conv_gib"), log.last("slots", "ssm_gib")
    steps = _number(_value(args, "speculative_num_draft_tokens"))
    radix_off = _value(args, "disable_radix_cache")
    return Facts(
        engine="sglang",
        version=log.rules_version,
        model=_value(args, "model_path"),
        tp=_number(_value(args, "tp_size")) or (log.ranks if log.ranks > 1 else None),
        pp=_number(_value(args, "pp_size")),
        max_model_len=_number(
            log.last("summary", "max_model_len") or _value(args, "context_length")
        ),
        max_num_seqs=_number(_value(args, "max_running_requests")),
        utilization=_gib(_value(args, "mem_fraction_static")),
        kv_dtype=_kv_name(_value(args, "kv_cache_dtype") or log.last("kv_dtype", "kv_dtype")),
        state_dtype=_kv_name(_value(args, "mamba_ssm_dtype")),
        prefix_caching=None if radix_off is None else radix_off != "True",
        draft_tokens=steps if steps is not None else (0 if args else None),
        radix_strategy=_value(args, "mamba_radix_cache_strategy", "mamba_scheduler_strategy"),
        kv_gib=kv_gib if kv_gib is not None else _gib(log.last("tokens", "kv_gib")),
        tokens=_number(log.last("summary", "tokens") or log.last("tokens", "tokens")),
        weights_gib=_gib(log.last("weights", "weights_gib")),
        free_gib=_gib(log.last("load_begin", "free_gib")),
        graph_gib=_gib(log.last("captured", "graph_gib")),
        slots=_number(log.last("slots", "slots")),
        slot_pool_gib=float(conv) + float(ssm) if conv and ssm else None,
        max_running=_number(log.last("summary", "max_running")),
    )


def facts_of(log: ParsedLog) -> Facts:
    """Facts of either engine's log."""
    return sglang_facts(log) if log.engine == "sglang" else vllm_facts(log)
