"""Inversion: hidden settings of public logs, and of logs written by the planner itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hullspeed.arch import catalogue
from hullspeed.memory.layers import cache_layers
from hullspeed.memory.vllm_groups import StateMode, plan_layout
from hullspeed.plan.explain_log.explain import explain_log
from hullspeed.plan.explain_log.facts import Facts, facts_of
from hullspeed.plan.explain_log.infer import infer_vllm
from hullspeed.plan.explain_log.reader import read_log
from hullspeed.units import GIB

Log = Callable[..., str]
M27 = "Qwen/Qwen3.8-27B-FP8"

# model, version, config, GiB, tokens, length, concurrency ->
# KV, state, drafts, prefix mode, TP, block tokens, blocks
PUBLIC = [
    # vLLM 0.20.0 on one RTX 5090 (old token line)
    ("someone/Qwen3.6-27B-Text-NVFP4-MTP", "0.20.0", "", 6.67, "53,312", "32,768", "5.15",
     ("fp8", "fp32", 0, "align", 1, 1568, 139)),
    # report 08: 2x RTX 3090
    (M27, "0.27.1", "tensor_parallel_size=2", 4.99, "302,921", "131,072", "2.31",
     ("fp8", "fp32", 0, "align", 2, 1568, 208)),
    # report 15: 2x RTX 5090, MTP
    (M27, "0.27.1", "tensor_parallel_size=2", 12.52, "705,884", "262,144", "2.69",
     ("fp8", "fp32", 3, "align", 2, 1600, 482)),
    # report 17: no GiB printed
    (M27, "0.27.1", "tensor_parallel_size=2, kv_cache_dtype=fp8", None, "530,081", "262,144",
     "2.02", ("fp8", "fp32", 4, "align", 2, 1616, 366)),
    # report 18: the 35B MoE, 0.24.0
    ("nvidia/Qwen3.6-35B-A3B-NVFP4", "0.24.0", "tensor_parallel_size=1", 5.98, "567,978",
     "131,072", "4.33", ("fp8", "fp32", 0, "align", 1, 2096, 299)),
    # report 27: R9700 with 16-bit state
    ("cyankiwi/Qwen3.8-27B-AWQ-INT4", "0.27.1", "tensor_parallel_size=1", 6.0, "187,945",
     "112,000", "1.68", ("fp8", "bf16", 0, "align", 1, 800, 245)),
    # logs that no rule here was made from
    ("me/Qwen3.8-27B-INT4", "0.28.0", "", 7.08, "222,822", "131,072", "1.70",
     ("fp8", "bf16", 0, "align", 1, 800, 289)),
    ("nvidia/Qwen3.6-27B-NVFP4", "0.23.1rc1.dev531+ga65f93fb2", "tensor_parallel_size=1", 47.84,
     "1,505,068", "262,144", "5.74", ("fp8", "fp32", 0, "align", 1, 1568, 999)),
    ("x/Qwen3.6-35B-A3B-NVFP4", "0.24.0", "", 64.16, "3,274,229", "262,144", "12.49",
     ("bf16", "fp32", 0, "align", 1, 1056, 3185)),
    ("x/Qwen3.6-35B-A3B-NVFP4", "0.25.0", "", 53.84, "4,073,445", "131,072", "31.08",
     ("fp8", "fp32", 3, "align", 1, 2144, 2393)),
    ("RedHatAI/Qwen3.6-35B-A3B-NVFP4", "0.20.0", "", 2.95, "75,456", "65,536", "3.87",
     ("fp8", "fp32", 0, "align", 1, 2096, 147)),
    ("x/Qwen3.6-35B-A3B-NVFP4", "0.24.0", "", 6.01, "569,878", "131,072", "4.35",
     ("fp8", "fp32", 0, "align", 1, 2096, 300)),
    # a prototype with NVFP4 keys and values on an RTX 5090
    ("x/Qwen3.6-27B", "0.24.0", "tensor_parallel_size=1", None, "1,823,372", "1,048,576", "1.74",
     ("nvfp4", "fp32", 2, "align", 1, 2832, 666)),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(PUBLIC)))
def test_hidden_settings_of_public_logs(case: int, vllm_log: Log) -> None:
    model, version, config, gib, tokens, length, concurrency, truth = PUBLIC[case]
    text = vllm_log(
        model, version=version, config=config, gib=gib, tokens=tokens, length=length,
        concurrency=concurrency,
    )  # fmt: skip
    explanation = explain_log(text)
    found = [
        (
            f.kv_dtype,
            f.state_dtype,
            f.draft_tokens,
            f.prefix_cache_mode,
            f.tp,
            f.block_tokens,
            f.blocks,
        )
        for f in explanation.fitted
    ]
    assert truth in found
    # printed GiB, tokens and concurrency leave little choice
    if gib is not None:
        assert explanation.n_fitted <= 3
        assert found[0] == truth
        assert explanation.luck is not None
        assert explanation.luck < 0.01


def test_p07_tokens_that_are_no_pool(vllm_log: Log) -> None:
    """290,864 tokens beside 33.04 x 32k: 784-token blocks, 1,487 of them, 45 a request."""
    text = vllm_log(
        "Qwen/Qwen3.5-27B", version="0.19.0", config="tensor_parallel_size=1",
        tokens="290,864", length="32,768", concurrency="33.04",
    )  # fmt: skip
    explanation = explain_log(text)
    best = explanation.fitted[0]
    assert (best.block_tokens, best.blocks, best.blocks_per_request) == (784, 1487, 45)
    (check,) = (c for c in explanation.checks if c.name.startswith("tokens"))
    assert not check.holds
    assert "trust the concurrency" in check.says


def test_p12_the_line_is_optimistic_under_prefix_caching(vllm_log: Log) -> None:
    """2.02 x 262,144 by the line; two 200k prompts preempt each other; --mamba-block-size helps."""
    text = vllm_log(
        M27, config="tensor_parallel_size=2, kv_cache_dtype=fp8", tokens="530,081",
        length="262,144", concurrency="2.02",
        args="{'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 4}}",
    )  # fmt: skip
    explanation = explain_log(text)
    at = {row.context_tokens: row for row in explanation.served}
    assert at[262_144].by_the_log == 2.02
    assert at[262_144].really == 1
    codes = {finding.code for finding in explanation.findings}
    assert {"MEM003", "EL203"} <= codes  # and drafts with prefix caching corrupted answers
    flags = {remedy.flag: remedy for remedy in explanation.remedies}
    assert flags["--mamba-block-size 8192"].really[262_144] == 2


def test_s30_needs_are_reproduced(vllm_log: Log) -> None:
    """4.76 GiB needed, at most 15,984 tokens: drafts 4 and 16-bit state, which no line said."""
    more = (
        "ValueError: To serve at least one request with the model's max seq len (65536), (4.76 GiB "
        "KV cache is needed, which is larger than the available KV cache memory (1.56 GiB). Based "
        "on the available memory, the estimated maximum model length is 15984."
    )
    explanation = explain_log(vllm_log("Qwen3.8-27B-4bit", version="0.27.1", more=more), tp=1)
    assert not explanation.started
    first = explanation.fitted[0]
    assert (first.draft_tokens, first.state_dtype, first.kv_dtype) == (4, "bf16", "bf16")
    # the only other fit has five drafts and prefix caching off; both agree on the rest
    assert explanation.n_fitted == 2
    assert explanation.certain["state_dtype"] == "bf16"
    assert "draft_tokens" not in explanation.certain
    (finding,) = (f for f in explanation.findings if f.code == "EL102")
    assert "--max-model-len 15984" in finding.fix
    assert "--kv-cache-dtype fp8" in finding.fix


def test_block_lines_settle_kv_and_drafts(vllm_log: Log) -> None:
    """A public log of two RTX 3090: 1,584 tokens, 0.80 % padding, three padding layers. Only int8
    keys and values with per-head scales and three draft tokens give that.
    """
    more = (
        "INFO [interface.py:773] Setting attention block size to 1584 tokens to ensure that "
        "attention page size is >= mamba page size.\n"
        "INFO [interface.py:797] Padding mamba page size by 0.80% to ensure that mamba page size "
        "and attention page size are exactly equal.\n"
        "WARNING [kv_cache_utils.py:1208] Add 3 padding layers, may waste at most 6.25% KV cache "
        "memory"
    )
    facts = facts_of(read_log(vllm_log(M27, config="tensor_parallel_size=2", more=more)))
    assert (facts.block_tokens, facts.padding_percent, facts.padding_layers) == (1584, 0.80, 3)
    found = infer_vllm(replace(facts, blocks=400), catalogue.load(M27)).candidates
    assert {(c.kv_dtype, c.state_dtype, c.draft_tokens) for c in found} == {
        ("int8_per_token_head", "fp32", 3)
    }


def test_dflash_drafter_of_public_logs(vllm_log: Log) -> None:
    """Three reports of one drafter on 2x RTX 5090; what they share is not printed: seven drafts,
    prefix caching on, 16,384 batched tokens.
    """
    for gib, tokens, length, concurrency, kv, blocks in (
        (11.15, "451,603", "147,456", "3.06", "fp8", 1418),
        (11.15, "214,135", "65,536", "3.27", "bf16", 1405),
        (16.01, "374,847", "204,800", "1.83", "bf16", 2017),
    ):
        config = "tensor_parallel_size=2, speculative_config=SpeculativeConfig(method='dflash', "
        text = vllm_log(
            M27, version="0.27.1", config=config + "num_spec_tokens=7)", gib=gib, tokens=tokens,
            length=length, concurrency=concurrency,
        )  # fmt: skip
        explanation = explain_log(text)
        found = {
            (f.kv_dtype, f.state_dtype, f.prefix_cache_mode, f.blocks) for f in explanation.fitted
        }
        assert (kv, "fp32", "align", blocks) in found
        assert "EL202" in {finding.code for finding in explanation.findings}
        assert explanation.served


def test_other_drafters_are_not_guessed(vllm_log: Log) -> None:
    text = vllm_log(
        M27, config="speculative_config=SpeculativeConfig(method='eagle3', num_spec_tokens=3)",
        gib=11.15, tokens="451,603", length="147,456", concurrency="3.06",
    )  # fmt: skip
    explanation = explain_log(text)
    assert explanation.fitted == ()
    assert "external draft model" in explanation.inference_note
    assert "EL202" in {finding.code for finding in explanation.findings}


def test_unknown_models_still_get_meaning_and_checks(vllm_log: Log) -> None:
    text = vllm_log("x/Unheard-7B", gib=6.0, tokens="53,312", length="32,768", concurrency="1.63")
    explanation = explain_log(text)
    assert explanation.shapes is None
    assert "--model" in explanation.inference_note
    assert explanation.checks[0].holds
    assert len(explanation.events) >= 4
    given = explain_log(text, arch=catalogue.load(M27))
    assert given.shapes == "given"


def test_dense_models_invert_too(vllm_log: Log) -> None:
    """LMCache report: Qwen3-8B, 6.37 GiB -> 46,368 tokens, 2.83 x 16,384."""
    text = vllm_log(
        "Qwen/Qwen3-8B", version="0.21.0", config="tensor_parallel_size=1", gib=6.37,
        tokens="46,368", length="16,384", concurrency="2.83",
    )  # fmt: skip
    explanation = explain_log(text)
    assert {f.kv_dtype for f in explanation.fitted} == {"bf16"}
    assert explanation.fitted[0].blocks == 2898
    (fp8,) = (r for r in explanation.remedies if r.flag == "--kv-cache-dtype fp8")
    assert fp8.gain == pytest.approx(2.0, abs=0.6)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kv=st.sampled_from(["bf16", "fp8"]),
    state=st.sampled_from(["fp32", "bf16"]),
    draft=st.integers(0, 4),
    mode=st.sampled_from([StateMode.ALIGN, StateMode.NONE]),
    tp=st.sampled_from([1, 2, 4]),
    gib=st.floats(3, 60),
    length=st.sampled_from([16_384, 40_000, 131_072]),
)
def test_the_truth_is_always_among_the_candidates(
    kv: str, state: str, draft: int, mode: StateMode, tp: int, gib: float, length: int
) -> None:
    """A log computed with known settings must be inverted to a set that holds them."""
    arch = catalogue.load("Qwen/Qwen3.6-27B")
    layers = cache_layers(arch, kv_dtype=kv, state_dtype=state, tp=tp, draft_tokens=draft)
    layout = plan_layout(layers, state_mode=mode, draft_tokens=draft, batched_tokens=2048)
    blocks = int(gib * GIB) // layout.bytes_per_block
    ratio = blocks / layout.blocks_per_request(length)
    facts = Facts(
        engine="vllm",
        version="0.27.1",
        kv_gib=round(gib, 2),
        tokens=int(ratio * length),
        concurrency=float(f"{ratio:.2f}"),
        concurrency_tokens=length,
    )
    found = infer_vllm(facts, arch).candidates
    assert (kv, state, draft, mode.value, tp, blocks) in {
        (c.kv_dtype, c.state_dtype, c.draft_tokens, c.state_mode, c.tp, c.blocks) for c in found
    }
    assert sum(c.share for c in found) == pytest.approx(1.0)
