"""Field cases of sizing: the kind of fault each stands for, and the answer that avoids it."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest

from hullspeed.arch import catalogue
from hullspeed.cli.main import run
from hullspeed.findings import Severity
from hullspeed.plan.plan import Plan, make_plan
from hullspeed.units import GIB, MIB

from .conftest import MakeCase

FP8 = "Qwen/Qwen3.8-27B-FP8"


def codes(plan: Plan) -> dict[str, Severity]:
    return {finding.code: finding.severity for finding in plan.findings}


@pytest.mark.parametrize(
    ("model", "gpu", "fraction"),
    [
        (FP8, "h100-sxm", 0.90),  # S01: 1,024 asked, 969 blocks
        (FP8, "rtx pro 6000", 0.92),  # S02: 939
        ("Inferact/Qwen3.8-27B-NVFP4", "rtx pro 6000", 0.92),  # S02: 1,011
        ("Qwen/Qwen3.8-27B", "rtx pro 6000", 0.95),  # S02: 556
    ],
)
def test_s01_s02_defaults_that_do_not_start_are_said_before_loading(
    make_case: MakeCase, model: str, gpu: str, fraction: float
) -> None:
    case = make_case(model, gpu, context=132_000, concurrency=2, memory_fraction=fraction)
    plan = make_plan(case)
    assert plan.ok
    assert codes(plan)["MEM002"] is Severity.WARNING
    finding = next(f for f in plan.findings if f.code == "MEM002")
    assert int(finding.evidence["blocks"]) < int(finding.evidence["max_num_seqs"]) == 1024
    # The plan's own flags start.
    assert int(plan.flags["--max-num-seqs"]) <= int(plan.capacity.max_num_seqs or 0)


def test_s01_asked_for_by_hand_it_is_an_error(make_case: MakeCase) -> None:
    case = make_case(FP8, "h100-sxm", context=132_000, concurrency=2, max_num_seqs=1024)
    plan = make_plan(case.with_settings(memory_fraction=0.9))
    assert codes(plan)["MEM002"] is Severity.ERROR


def test_s06_scratch_that_the_engine_does_not_profile_is_held_back(make_case: MakeCase) -> None:
    """5090 at .93 with chunks of 8,192: starts, then dies at a 6k prompt; 2,048 survives."""
    big, small = (
        make_plan(
            make_case(
                "Inferact/Qwen3.8-27B-NVFP4", "rtx 5090", context=32768, concurrency=1,
                kv_dtype="fp8", memory_fraction=0.99, max_num_batched_tokens=chunk,
                language_model_only=True,
            )
        )
        for chunk in (8192, 2048)
    )  # fmt: skip
    scratch = [
        next(i.bytes for i in plan.stack.items if "scratch" in i.name) for plan in (big, small)
    ]
    assert scratch[0] == pytest.approx(0.56 * GIB, rel=0.02)
    assert scratch[1] == scratch[0] // 4
    assert "MEM005" in codes(big)
    assert "MEM005" not in codes(small)


def test_p01_only_attention_layers_keep_kv_and_state_is_apart() -> None:
    """262,144 tokens: 16,384 MiB of KV; 598.5 MiB of state for four sequences (kept in fp32)."""
    arch = catalogue.load("Qwen/Qwen3.6-27B")
    assert arch.kv_bytes(262_144, "bf16") == 16_384 * MIB
    assert 4 * arch.state_bytes("fp32", "fp32") / MIB == pytest.approx(598.5, abs=0.1)


def test_p02_sliding_layers_hold_their_window() -> None:
    arch = catalogue.load("google/gemma-3-27b-it")
    assert arch.kv_bytes(131_072, "bf16") / GIB == pytest.approx(10.4, abs=0.05)


def test_p03_latent_attention_keeps_the_compressed_kv() -> None:
    arch = catalogue.load("deepseek-ai/DeepSeek-V3.1")
    assert arch.kv_bytes(163_840, "bf16") / GIB == pytest.approx(10.7, abs=0.05)


def test_p04_head_dim_is_a_field_not_a_quotient() -> None:
    arch = catalogue.load("Qwen/Qwen3-0.6B")
    assert arch.kv_bytes_per_token("bf16") == 28 * 2 * 8 * 128 * 2


def test_p05_alternate_layers_are_bounded_not_left_out() -> None:
    arch = catalogue.load("openai/gpt-oss-20b")
    full_only = 12 * 2 * 8 * 64 * 2
    assert arch.kv_bytes_per_token("bf16") == full_only
    assert arch.kv_bytes(10_000, "bf16") > 10_000 * full_only  # the windows, too


def test_p06_the_verdict_names_its_context_and_the_largest_that_fits(make_case: MakeCase) -> None:
    plan = make_plan(make_case("Qwen/Qwen3.8-27B", "h100-sxm", context=8192, concurrency=4))
    assert plan.ok
    assert "longest 8,192" in plan.summary
    too_long = make_plan(make_case(FP8, "a40", context=262_144, concurrency=1))
    assert too_long.verdict == "does not fit"
    longest = too_long.capacity.by_concurrency[0].max_context_tokens
    assert 100_000 < longest < 262_144
    assert f"{longest:,}" in too_long.summary
    # Without a context, the model's own 262,144 is not taken for what the user needs.
    short = make_plan(make_case("Qwen/Qwen3.8-27B", "h100-sxm"))
    assert short.ok
    assert any("not the model's own 262,144" in line for line in short.assumptions)


def test_p08_speeds_carry_an_interval_and_the_error_history(make_case: MakeCase) -> None:
    plan = make_plan(make_case("Qwen/Qwen3-32B", "h100-sxm", context=4096, concurrency=1))
    assert plan.speed is not None
    for quantity in plan.speed.quantities():
        assert quantity.low < quantity.value < quantity.high
    assert "not measured" in plan.speed.source
    assert "published points" in plan.speed.source


def test_p10_a_missing_field_is_refused_and_no_command_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = deepcopy(catalogue.lookup("Qwen/Qwen3.6-27B") or {})
    del config["text_config"]["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["plan", str(tmp_path), "--gpu", "h100-sxm"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "num_hidden_layers" in err


def test_p11_a_gpu_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "Qwen/Qwen3-32B", "--gpu", "A4"]) == 2
    assert "A40" in capsys.readouterr().err


def test_p12_the_logs_concurrency_is_optimistic_under_prefix_caching(make_case: MakeCase) -> None:
    plan = make_plan(make_case(FP8, "h100-sxm", context=32768, isl=32000, concurrency=4))
    row = next(r for r in plan.capacity.by_context if r.context_tokens == 32768)
    assert row.served < 0.9 * row.engine
    assert "MEM003" in codes(plan)


def test_s14_the_granularity_of_hits_is_printed(make_case: MakeCase) -> None:
    plan = make_plan(make_case(FP8, "a40", context=8192, concurrency=1))
    assert plan.capacity.hit_granularity_tokens == 784


def test_s08_speculation_with_prefix_caching_on_a_hybrid_is_refused_by_version(
    make_case: MakeCase,
) -> None:
    case = make_case(
        FP8, "h100-sxm", context=32768, concurrency=2, draft_tokens=3, version="0.28.0"
    )
    plan = make_plan(case)
    assert plan.verdict == "refused by a finding"
    assert not plan.ok
    assert "corrupts answers" in plan.summary
    assert make_plan(case.with_settings(prefix_caching=False)).ok
    assert make_plan(case.with_settings(draft_tokens=0)).ok


def test_s07_the_pool_is_set_in_bytes_not_left_to_an_estimate(make_case: MakeCase) -> None:
    plan = make_plan(make_case(FP8, "h100-sxm", context=32768, concurrency=2))
    assert int(plan.flags["--kv-cache-memory-bytes"]) == plan.capacity.pool_bytes


def test_s31_graphs_off_is_offered_where_memory_is_short(make_case: MakeCase) -> None:
    case = make_case(
        "Inferact/Qwen3.8-27B-NVFP4", "rtx 5090", context=32768, isl=32000, concurrency=8,
        kv_dtype="fp8", max_num_seqs=64,
    )  # fmt: skip
    remedies = {remedy.flags for remedy in make_plan(case).remedies}
    assert "--enforce-eager" in remedies


def test_sglang_bounds_requests_by_state_slots_not_by_tokens(make_case: MakeCase) -> None:
    """About 19 at once on an H100 by its defaults, whatever their length."""
    plan = make_plan(
        make_case("Qwen/Qwen3.8-27B-FP8", "h100-sxm", "sglang", context=32768, concurrency=4)
    )
    short = next(r for r in plan.capacity.by_context if r.context_tokens == 2048)
    assert 15 <= short.served <= 25
    assert short.divided > 100
