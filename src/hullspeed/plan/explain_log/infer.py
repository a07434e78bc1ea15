"""What a log does not print, by inversion: which settings reproduce what it does print.

For each combination of KV dtype, state dtype, draft depth, prefix-cache mode, tensor parallelism
and kernel rule the planner gives bytes per block and blocks per request. A combination fits when
an integer number of blocks yields the printed tokens and concurrency (and the printed GiB, block
size, padding, needed GiB, where there are any). All that fit are returned, likeliest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.memory.drafters import with_dflash
from hullspeed.memory.layers import (
    cache_layers,
    keeps_state,
    kv_dtype_of,
    normal_dtype,
    state_dtype_of,
)
from hullspeed.memory.profile import EngineProfile, engine_profile, parse_version
from hullspeed.memory.vllm_groups import Layout, StateMode, plan_layout
from hullspeed.memory.vllm_pool import VllmPool
from hullspeed.plan.explain_log.blocks import luck, solve
from hullspeed.plan.explain_log.facts import Facts

MAX_DRAFT_TOKENS = 8
DEFAULT_BATCHED_TOKENS = 2048
RARE_KV = ("int8_per_token_head", "nvfp4")
FIRST_GDN_64 = (0, 29, 0)
# How often each setting is met, for ranking what fits equally well. Public logs of 2026, by eye.
DRAFT_PRIOR = {0: 0.5, 1: 0.1, 2: 0.1, 3: 0.15, 4: 0.08}
TP_PRIOR = {1: 0.5, 2: 0.3, 4: 0.12, 8: 0.08}
OFF_DEFAULT_PRIOR = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Settings that reproduce every number the log prints.

    Attributes:
        matched: What was reproduced, e.g. ``("tokens", "concurrency", "GiB")``.
        share: Weight among all candidates, 0..1, from how common each setting is.
        luck: Chance that a wrong combination fits as well.
    """

    kv_dtype: str
    state_dtype: str
    draft_tokens: int
    state_mode: str
    tp: int
    gdn_prefill: bool
    tokens_line: str
    blocks: int
    pool: VllmPool
    matched: tuple[str, ...]
    luck: float
    prior: float
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Inference:
    """Outcome of an inversion.

    Attributes:
        candidates: All that fit, likeliest first.
        reason: Why there are none, or what limits them.
    """

    candidates: tuple[Candidate, ...]
    reason: str = ""

    @property
    def best(self) -> Candidate | None:
        """The likeliest candidate."""
        return self.candidates[0] if self.candidates else None

    def agreed(self, name: str) -> bool:
        """Whether all candidates have the same value of a setting."""
        return len({getattr(candidate, name) for candidate in self.candidates}) == 1


@dataclass(frozen=True, slots=True)
class _Options:
    kv: Sequence[str]
    state: Sequence[str]
    drafts: Sequence[int]
    modes: Sequence[StateMode]
    tps: Sequence[int]
    gdn: Sequence[bool]
    lines: Sequence[str]
    batched: Sequence[int]


def infer_vllm(facts: Facts, arch: ModelArch) -> Inference:
    """Search the settings that reproduce a vLLM log of ``arch``."""
    if facts.draft_model:
        if not (facts.draft_method or "").startswith("dflash"):
            return Inference((), "an external draft model keeps layers of its own in the pool")
        arch = with_dflash(arch)
    if facts.tokens is None and facts.blocks is None and facts.needed_gib is None:
        return Inference((), "the log prints no token count, block count or needed GiB")
    profile = _profile(facts)
    options = _options(facts, arch, profile)
    found = []
    for kv, state, draft, mode, tp, gdn, batched in product(
        options.kv, options.state, options.drafts, options.modes, options.tps, options.gdn,
        options.batched,
    ):  # fmt: skip
        layout = _layout(arch, facts, kv, state, draft, mode, tp, batched, gdn=gdn)
        if layout is None or not _shape_fits(facts, layout, arch, kv, state, draft, tp):
            continue
        for line in options.lines:
            for blocks, matched in solve(facts, layout, line):
                found.append(
                    Candidate(
                        kv_dtype=kv,
                        state_dtype=state if layout.has_state else "",
                        draft_tokens=draft,
                        state_mode=mode.value if layout.has_state else "",
                        tp=tp,
                        gdn_prefill=gdn,
                        tokens_line=line,
                        blocks=blocks,
                        pool=_pool(facts, layout, line, blocks),
                        matched=(*_shape_matches(facts), *matched),
                        luck=luck(facts, layout),
                        prior=_prior(arch, profile, kv, state, draft, mode, tp, gdn=gdn),
                    )
                )
    if not found:
        return Inference((), "no combination of settings reproduces the printed numbers")
    total = sum(candidate.prior for candidate in found)
    ranked = sorted(found, key=lambda candidate: -candidate.prior)
    return Inference(tuple(replace(c, share=c.prior / total) for c in ranked))


def _profile(facts: Facts) -> EngineProfile:
    return engine_profile("vllm", facts.version, extrapolate=True)


def _options(facts: Facts, arch: ModelArch, profile: EngineProfile) -> _Options:
    hybrid = keeps_state(arch)
    own = kv_dtype_of(arch, None)
    kv = list(dict.fromkeys([own, "bf16", "fp8", *RARE_KV]))
    if facts.kv_dtype:
        kv = [facts.kv_dtype]
    state = [facts.state_dtype] if facts.state_dtype else ["fp32", "bf16"]
    has_mtp = any(extra.layers for extra in arch.extras)
    drafts = list(range(MAX_DRAFT_TOKENS + 1)) if has_mtp else [0]
    if facts.draft_tokens is not None:
        drafts = [facts.draft_tokens]
    lines = [str(profile.rule("tokens_line"))]
    if facts.version is None:
        lines = ["concurrency", "blocks_per_group"]
    return _Options(
        kv=[normal_dtype(name) for name in kv],
        state=[normal_dtype(name) for name in state] if hybrid else ["fp32"],
        drafts=drafts,
        modes=_modes(facts) if hybrid else [StateMode.NONE],
        tps=[facts.tp] if facts.tp else sorted(TP_PRIOR),
        gdn=_gdn(facts) if hybrid else [False],
        lines=lines,
        batched=_batched(facts, arch),
    )


def _batched(facts: Facts, arch: ModelArch) -> list[int]:
    """Chunk sizes to try: they matter only where a window holds a chunk."""
    if facts.max_num_batched_tokens is not None:
        return [facts.max_num_batched_tokens]
    layers = (*arch.layers, *(layer for extra in arch.extras for layer in extra.layers))
    windows = any(hasattr(layer.mixer, "window_tokens") for layer in layers)
    return [2048, 8192, 16384] if windows else [DEFAULT_BATCHED_TOKENS]


def _modes(facts: Facts) -> list[StateMode]:
    if facts.prefix_caching is False:
        return [StateMode.NONE]
    if facts.state_mode in tuple(StateMode):
        return [StateMode(facts.state_mode)]
    if facts.prefix_caching:
        return [StateMode.ALIGN]
    return [StateMode.ALIGN, StateMode.NONE]


def _gdn(facts: Facts) -> list[bool]:
    if facts.version is not None and parse_version(facts.version) < FIRST_GDN_64:
        return [False]
    if facts.gdn_kernel is not None:
        return [facts.gdn_kernel == "FlashInfer"]
    return [False, True]


def _layout(
    arch: ModelArch,
    facts: Facts,
    kv: str,
    state: str,
    draft: int,
    mode: StateMode,
    tp: int,
    batched: int,
    *,
    gdn: bool,
) -> Layout | None:
    try:
        layers = cache_layers(arch, kv_dtype=kv, state_dtype=state, tp=tp, draft_tokens=draft)
        return plan_layout(
            layers,
            state_mode=mode,
            draft_tokens=draft,
            batched_tokens=batched,
            gdn_prefill=gdn,
            block_tokens=facts.block_size_flag,
        )
    except UsageError:  # this TP does not divide the heads: not a candidate
        return None


def _shape_matches(facts: Facts) -> tuple[str, ...]:
    names = ("block_tokens", "padding_layers", "padding_percent")
    return tuple(name.replace("_", " ") for name in names if getattr(facts, name) is not None)


def _shape_fits(
    facts: Facts, layout: Layout, arch: ModelArch, kv: str, state: str, draft: int, tp: int
) -> bool:
    if facts.block_tokens is not None and layout.block_tokens != facts.block_tokens:
        return False
    if facts.padding_layers is not None and layout.padding_layers != facts.padding_layers:
        return False
    if facts.padding_percent is not None and layout.has_state:
        layers = cache_layers(arch, kv_dtype=kv, state_dtype=state, tp=tp, draft_tokens=draft)
        bare = max(layer.state_bytes for layer in layers)
        page = max(group.page_bytes for group in layout.groups)
        return abs(100 * (page - bare) / bare - facts.padding_percent) < 0.006
    return True


def _pool(facts: Facts, layout: Layout, line: str, blocks: int) -> VllmPool:
    return VllmPool(
        layout=layout,
        pool_bytes=blocks * layout.bytes_per_block,
        max_model_len=facts.concurrency_tokens or facts.max_model_len or 1,
        asked_num_seqs=facts.max_num_seqs or 0,
        tokens_line=line,
        mamba_block_tokens=facts.mamba_block_flag,
        graphs=not facts.eager,
    )


def _prior(
    arch: ModelArch,
    profile: EngineProfile,
    kv: str,
    state: str,
    draft: int,
    mode: StateMode,
    tp: int,
    *,
    gdn: bool,
) -> float:
    default_state = state_dtype_of(arch, None)
    default_mode = StateMode.ALIGN if profile.rule("hybrid_prefix_caching") else StateMode.NONE
    weight = 1.0 if kv == kv_dtype_of(arch, None) else 0.7
    weight *= 0.2 if kv in RARE_KV else 1.0
    weight *= 1.0 if state == default_state else OFF_DEFAULT_PRIOR
    weight *= DRAFT_PRIOR.get(draft, 0.02)
    weight *= 1.0 if mode is default_mode else 0.6
    weight *= TP_PRIOR.get(tp, 0.02)
    weight *= 1.0 if not gdn else 0.5
    return weight
