"""The planner against an independent closed form and the table of public facts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import product

import pytest

from hullspeed.arch.model import ModelArch
from hullspeed.errors import UsageError
from hullspeed.memory.budget import EngineSettings, GpuMemory
from hullspeed.memory.drafters import with_dflash
from hullspeed.memory.vllm import VllmAllocator
from hullspeed.memory.vllm_groups import GroupKind
from hullspeed.memory.vllm_pool import VllmPool
from hullspeed.units import GIB, MIB

Shapes = Callable[[str], ModelArch]
AMPERE = GpuMemory(name="RTX 3090", total_bytes=24 * GIB, compute_capability=(8, 6))
HOPPER = GpuMemory(name="H100", total_bytes=80 * GIB, compute_capability=(9, 0))


def pool(arch: ModelArch, gpu: GpuMemory, settings: EngineSettings, gib: float = 30) -> VllmPool:
    return VllmAllocator().pool(arch, gpu, settings, round(gib * GIB))


# config -> block tokens, MiB per block, blocks per request at 8k/32k/128k/262144, concurrency there
TABLE = [
    ("align", {}, AMPERE, 784, 49, (17, 48, 174, 341), (36.8, 13.0, 3.6, 1.84)),
    ("none", {}, AMPERE, 784, 49, (14, 45, 171, 338), (44.7, 13.9, 3.66, 1.85)),
    ("align", {"kv_dtype": "fp8"}, AMPERE, 1568, 49, (12, 27, 90, 174), (52.2, 23.2, 6.96, 3.60)),
    ("align", {"kv_dtype": "fp8"}, HOPPER, 1600, 50, (15, 30, 91, 173), (40.9, 20.5, 6.75, 3.55)),
    (
        "align", {"kv_dtype": "fp8", "draft_tokens": 3}, AMPERE, 1600, 53.125,
        (21, 36, 97, 179), (27.5, 16.1, 5.96, 3.23),
    ),
    (
        "align", {"kv_dtype": "fp8", "state_dtype": "bf16"}, AMPERE, 800, 25,
        (17, 47, 170, 334), (72.2, 26.1, 7.22, 3.68),
    ),
    ("align", {"kv_dtype": "fp8", "tp": 2}, AMPERE, 1568, 24.5, (12, 27, 90, 174),
     (104.4, 46.4, 13.92, 7.20)),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(TABLE)))
def test_published_table(case: int, shapes: Shapes) -> None:
    mode, extra, gpu, block, mib, per_request, concurrency = TABLE[case]
    version = "0.29.0" if gpu is HOPPER else "0.27.1"
    settings = EngineSettings(version=version, prefix_caching=mode == "align", **extra)  # type: ignore[arg-type]
    plan = pool(shapes("qwen3.5-27b"), gpu, settings)
    assert plan.block_tokens == block
    assert plan.bytes_per_block == mib * MIB
    contexts = (8192, 32768, 131072, 262144)
    assert tuple(plan.blocks_per_request(m) for m in contexts) == per_request
    for context, expected in zip(contexts, concurrency, strict=True):
        assert plan.concurrency(context) == pytest.approx(expected, rel=0.006)


def straightforward(
    kv_bytes: int,
    ssm_bytes: int,
    tp: int,
    draft: int,
    caching: bool,
    sixty_four: bool,
    context: int,
) -> tuple[int, int, int]:
    """The 27B written out with its numbers, as a person would on paper: block tokens, bytes per
    block, blocks per request.
    """
    token = 2 * math.ceil(4 / tp) * 256 * kv_bytes
    state = 10240 // tp * (3 + draft) * 2 + 48 // tp * 128 * 128 * ssm_bytes
    step = 64 if sixty_four else 16
    block = 0
    while block * token < state:
        block += step
    attention = 16 + (1 if draft else 0)
    gdn = 48
    wide = attention  # 48 is more than 1.5 times 16 or 17
    gdn_groups = math.ceil(gdn / wide)
    per_state = (2 + draft + (1 if sixty_four else 0)) if caching else 1 + draft
    return block, wide * block * token, math.ceil(context / block) + gdn_groups * per_state


CONFIGS = [
    (kv, ssm, tp, draft, caching)
    for kv, ssm, tp, draft, caching in product(
        ("bf16", "fp8"), ("fp32", "bf16"), (1, 2, 4), (0, 1, 3), (True, False)
    )
]


def test_72_configurations_against_the_closed_form(shapes: Shapes) -> None:
    arch = shapes("qwen3.5-27b")
    assert len(CONFIGS) == 72
    for gpu, version, sixty_four in ((AMPERE, "0.27.1", False), (HOPPER, "0.33.0", True)):
        for kv, ssm, tp, draft, caching in CONFIGS:
            settings = EngineSettings(
                version=version, kv_dtype=kv, state_dtype=ssm, tp=tp, draft_tokens=draft,
                prefix_caching=caching, max_model_len=65536,
            )  # fmt: skip
            plan = pool(arch, gpu, settings, 17.3)
            block, per_block, per_request = straightforward(
                2 if kv == "bf16" else 1, 4 if ssm == "fp32" else 2, tp, draft, caching,
                sixty_four, 65536,
            )  # fmt: skip
            blocks = round(17.3 * GIB) // per_block
            assert (plan.block_tokens, plan.bytes_per_block) == (block, per_block)
            assert plan.blocks_per_request(65536) == per_request
            assert plan.printed_tokens == int(blocks / per_request * 65536)


def test_a_model_whose_pages_pad(shapes: Shapes) -> None:
    """MTP makes 17 attention layers against 48: vLLM warns 'Add 3 padding layers'."""
    settings = EngineSettings(version="0.27.1", draft_tokens=1, prefix_caching=True)
    plan = pool(shapes("qwen3.5-27b"), AMPERE, settings)
    assert plan.layout.padding_layers == 3
    assert len(plan.layout.groups) == 4


def test_dense_is_one_group_of_16_token_blocks(shapes: Shapes) -> None:
    plan = pool(shapes("qwen3-32b"), AMPERE, EngineSettings(max_model_len=32768))
    assert (plan.block_tokens, plan.bytes_per_block) == (16, 4 * MIB)
    assert plan.concurrency(32768) == pytest.approx(3.75, abs=0.001)
    assert plan.max_num_seqs is None


def test_sliding_windows_are_grouped_and_bounded(shapes: Shapes) -> None:
    """gpt-oss: 12 full and 12 sliding layers in two groups; a sliding group holds window - 1 +
    chunk tokens, and one block more.
    """
    settings = EngineSettings(version="0.27.1", max_num_batched_tokens=2048, max_model_len=131072)
    plan = pool(shapes("gpt-oss-20b"), AMPERE, settings)
    assert len(plan.layout.groups) == 2
    assert plan.bytes_per_block == 12 * 16 * 2 * 8 * 64 * 2
    assert plan.blocks_per_request(131072) == 8192 + math.ceil((127 + 2048) / 16) + 1


def test_gemma_3_splits_its_sliding_layers(shapes: Shapes) -> None:
    """52 sliding and 10 full layers: six groups of ten, the last sliding one padded by eight."""
    plan = pool(shapes("gemma-3-27b"), AMPERE, EngineSettings(version="0.27.1"))
    assert len(plan.layout.groups) == 7
    assert plan.layout.padding_layers == 8


def test_pipeline_stages_share_the_layers(shapes: Shapes) -> None:
    dense = shapes("qwen3-32b")
    whole = pool(dense, AMPERE, EngineSettings())
    half = pool(dense, AMPERE, EngineSettings(pp=2))
    assert half.bytes_per_block * 2 == whole.bytes_per_block
    hybrid = shapes("qwen3.5-27b")
    stage = pool(hybrid, AMPERE, EngineSettings(version="0.27.1", pp=2))
    assert (
        stage.bytes_per_block * 2
        == pool(hybrid, AMPERE, EngineSettings(version="0.27.1")).bytes_per_block
    )


@pytest.mark.parametrize("tp", [3, 5, 16])
def test_heads_that_do_not_divide_are_refused(tp: int, shapes: Shapes) -> None:
    with pytest.raises(UsageError, match="tensor parallelism"):
        pool(shapes("qwen3.5-27b"), AMPERE, EngineSettings(tp=tp))


def test_explicit_block_size_is_the_base(shapes: Shapes) -> None:
    """A public log: --block-size 816 became 1632 where 832 was set without it."""
    arch = with_dflash(shapes("qwen3.5-27b"))
    settings = EngineSettings(version="0.28.0", draft_tokens=7, prefix_caching=True)
    assert pool(arch, AMPERE, settings).block_tokens == 832
    asked = dataclasses.replace(settings, block_tokens=816)
    assert pool(arch, AMPERE, asked).block_tokens == 1632
    with pytest.raises(UsageError, match="multiple of 16"):
        pool(shapes("qwen3-32b"), AMPERE, EngineSettings(block_tokens=24))


def test_groups_of_a_drafter_as_a_debug_log_lists_them(shapes: Shapes) -> None:
    """15 groups (10 state, 4 full, 1 sliding) of 3,407,872-byte pages; 1,018 blocks print 35,945
    tokens and 8.78 x 4,096.
    """
    arch = with_dflash(shapes("qwen3.5-27b"))
    settings = EngineSettings(
        version="0.28.0",
        draft_tokens=7,
        prefix_caching=True,
        max_model_len=4096,
        max_num_batched_tokens=8192,
    )
    plan = pool(arch, AMPERE, settings)
    kinds = [group.kind for group in plan.layout.groups]
    assert {kind: kinds.count(kind) for kind in GroupKind} == {
        GroupKind.STATE: 10,
        GroupKind.FULL: 4,
        GroupKind.SLIDING: 1,
    }
    assert {group.page_bytes for group in plan.layout.groups} == {3_407_872}
    assert plan.bytes_per_block == 5 * 3_407_872
    logged = dataclasses.replace(plan, pool_bytes=1018 * plan.bytes_per_block)
    assert logged.printed_tokens == 35_945
    assert round(logged.printed_concurrency, 2) == 8.78


def test_old_token_line(shapes: Shapes) -> None:
    """vLLM 0.20.0, public log: 6.67 GiB -> 53,312 tokens but 5.15x at 32,768; and 290,864 tokens
    beside 33.04 x 32,768 (1,487 blocks, 45 per request).
    """
    arch = shapes("qwen3.5-27b")
    first = pool(
        arch, AMPERE,
        EngineSettings(
            version="0.20.0", kv_dtype="fp8", prefix_caching=True, max_model_len=32768
        ),
        6.67,
    )  # fmt: skip
    assert (first.printed_tokens, round(first.printed_concurrency, 2)) == (53_312, 5.15)
    settings = EngineSettings(version="0.19.0", max_model_len=32768)
    second = VllmAllocator().pool(arch, AMPERE, settings, 1487 * 49 * MIB)
    assert (second.printed_tokens, round(second.printed_concurrency, 2)) == (290_864, 33.04)
