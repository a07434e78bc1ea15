"""Old commands: what is wrong is found, and today's form is itself sound."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.cli.launch import _as_lines
from hullspeed.errors import UsageError
from hullspeed.findings import Severity
from hullspeed.launch.check import check_codes, check_text, quoted, walk
from hullspeed.launch.oldcommand import read_commands

SEEDS = Path(__file__).with_name("seeds.sh").read_text(encoding="utf-8")


def codes(text: str, version: str | None = None) -> list[str]:
    return [finding.code for finding in walk(check_text(text, version))]


def by_code(text: str, code: str) -> dict[str, str]:
    (finding,) = [one for one in walk(check_text(text)) if one.code == code]
    return {**finding.evidence, "what": finding.what, "fix": finding.fix}


def test_three_deployments_are_found_in_one_script() -> None:
    assert [one.engine for one in check_text(SEEDS)] == ["vllm", "sglang", "trtllm"]


def test_the_vllm_deployment() -> None:
    vllm = check_text(SEEDS)[0]
    assert [one.code for one in vllm.findings] == ["LC002", "LC014", "LC007", "LC008"]
    assert "unrecognized arguments: true" in vllm.findings[0].why
    words = shlex.split(vllm.today)
    assert words[words.index("vllm/vllm-openai:v0.33.0") + 1] == "Qwen/Qwen3.6-27B"
    assert "--enable-chunked-prefill" not in words
    assert "true" not in words
    assert "~/.cache/huggingface:/root/.cache/huggingface" in vllm.today


def test_the_sglang_deployment() -> None:
    sglang = check_text(SEEDS)[1]
    found = [one.code for one in sglang.findings]
    assert found == ["LC006", "LC004", "LC010", "LC003", "LC007", "LC008"]
    trap = sglang.findings[1]
    assert trap.what == "--enable-flashinfer is read as --enable-flashinfer-allreduce-fusion"
    assert "--attention-backend flashinfer" in trap.fix
    assert "radix-eviction-policy lru" in sglang.findings[3].why
    assert "sglang serve --model-path Qwen/Qwen3.6-27B" in sglang.today
    for wrong in ("--enable-flashinfer", " lru", "fp8_e5m2", "launch_server", ":latest"):
        assert wrong not in sglang.today


def test_the_tensorrt_deployment() -> None:
    trt = check_text(SEEDS)[2]
    assert {one.code for one in trt.findings} == {"LC009", "LC012"}
    assert [one.evidence["tool"] for one in trt.findings if one.code == "LC009"] == [
        "convert_checkpoint.py", "trtllm-build",
    ]  # fmt: skip
    command, _, config = trt.today.partition("\n\n# serve.yaml\n")
    assert command == "trtllm-serve ./Qwen-27B-Instruct --config serve.yaml"
    written = yaml.safe_load(config)
    assert written["max_batch_size"] == 64
    assert written["max_seq_len"] == 16384
    assert written["kv_cache_config"]["dtype"] == "fp8"
    assert written["kv_cache_config"]["tokens_per_block"] == 64


@pytest.mark.parametrize("at", [0, 1])
def test_today_s_form_has_no_finding(at: int) -> None:
    assert codes(check_text(SEEDS)[at].today) == []
    assert codes(check_text(SEEDS)[2].today.partition("\n\n")[0]) == []


@pytest.mark.parametrize(
    ("command", "code", "fix"),
    [
        ("vllm serve m --swap-space 4", "LC001", "leave it out"),
        ("vllm serve m --guided-decoding-backend xgrammar", "LC001",
         "--structured-outputs-config.backend xgrammar"),
        ("vllm serve m --num-scheduler-steps 8", "LC001", "leave it out"),
        ("vllm serve m --task generate", "LC001", "--runner generate"),
        ("vllm serve m --enable-reasoning --reasoning-parser qwen3", "LC001", "reasoning-parser"),
        ("vllm serve m --max-model-length 100", "LC001", "did you mean --max-model-len"),
        ("vllm serve m --mamba-cache-mode align", "LC005", "leave it out"),
        ("vllm serve m --max-num-seqs many", "LC011", "a whole number"),
        ("vllm serve m --max-num-seqs", "LC011", "a whole number"),
        ("vllm serve m --mamba-ssm-cache-dtype int4", "LC003", "one of the values"),
        ("vllm serve", "LC013", "vllm serve MODEL"),
        ("vllm serve m --enforce-eager false", "LC002", "--no-enforce-eager"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "LC006", "vllm serve MODEL"),
        ("python3 -m vllm.entrypoints.api_server --model m", "LC006", "vllm serve MODEL"),
        ("sglang serve --model-path m --disable-cuda-graph", "LC005", "cuda-graph-backend-decode"),
        ("sglang serve --model-path m --mamba-scheduler-strategy no_buffer", "LC001",
         "--mamba-radix-cache-strategy no_buffer"),
        ("trtllm-serve m --backend tensorrt", "", ""),
        ("vllm serve m --trust-remote-code", "LC015", "leave it out"),
        ("trtllm-serve m --trust_remote_code", "LC015", "leave it out"),
        ("vllm serve m --api-key secret", "LC016", "VLLM_API_KEY"),
        ("sglang serve --model-path m --api-key secret", "LC016", "variable"),
        ("sglang serve --model-path m --api-key $KEY", "", ""),
        ("transformers serve --quantization awq", "LC003", "one of the values"),
    ],
)  # fmt: skip
def test_one_fault_at_a_time(command: str, code: str, fix: str) -> None:
    if code:
        assert code in codes(command)
        assert fix in by_code(command, code)["fix"]
    else:
        assert codes(command) == []


def test_the_version_decides() -> None:
    assert codes("vllm serve m --disable-log-requests", "0.32.0") == ["LC001"]
    assert codes("vllm serve m --disable-log-requests", "0.33.0") == []
    assert codes("vllm serve m --prefix-match-unit 16", "0.21.0") == ["LC001"]
    assert codes("vllm serve m --prefix-match-unit 16", "0.33.0") == []
    assert codes("trtllm-serve m --backend tensorrt", "1.3.0rc20") == ["LC003"]
    with pytest.raises(UsageError, match=r"known from 0\.19"):
        check_text("vllm serve m", "0.9.1")


def test_the_image_s_tag_names_the_version() -> None:
    (one,) = check_text("docker run --gpus all vllm/vllm-openai:v0.20.2 m --disable-log-requests")
    assert one.version == "0.20.2"
    assert [finding.code for finding in one.findings] == ["LC001"]
    assert "vllm/vllm-openai:v0.20.2" in one.today


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve Qwen/Qwen3-32B --tensor_parallel_size 2 -q fp8",
        'vllm serve m --speculative-config \'{"method":"mtp","num_speculative_tokens":3}\'',
        "vllm serve m --speculative-config.method mtp --no-enable-prefix-caching",
        "vllm serve m --max-model-len 32k --max-num-batched-tokens=8192 --middleware a",
        "VLLM_USE_DEEP_GEMM=0 vllm serve Qwen/Qwen3.8-27B-FP8 --kv-cache-dtype fp8",
        "sglang serve Qwen/Qwen3-8B --tp 2 --mem-fraction-static 0.8",
        "transformers serve --continuous-batching --port 8001",
        "docker run -it --rm -p 80:80 lmsysorg/sglang:v0.5.23 sglang serve --model-path m",
    ],
)
def test_sound_commands_have_no_finding(command: str) -> None:
    assert codes(command) == []


@pytest.mark.parametrize("text", ["", "echo hello", "docker run nginx", "python train.py"])
def test_text_without_an_engine_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="no engine"):
        read_commands(text)


def test_unbalanced_quotes_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="quotes"):
        read_commands("vllm serve 'm")


def test_codes_are_complete() -> None:
    for name, code in check_codes().items():
        assert name.startswith("LC")
        assert code.title and code.what and code.why and code.fix
        assert code.severity in (Severity.ERROR, Severity.WARNING)


def test_quoting_leaves_the_home_directory_open() -> None:
    assert quoted("~/a b:/c") == "~/'a b:/c'"
    assert quoted('{"a": 1}') == "'{\"a\": 1}'"


def test_the_page_lists_every_code_by_its_title() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
    for name, code in check_codes().items():
        assert f"| {name} | {code.title} |" in page


def test_the_page_s_example_is_what_the_command_prints() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
    example = page.split("```\n$ ")[1].split("```")[0].rstrip()
    command, _, printed = example.partition("\n")
    (one,) = check_text(shlex.split(command)[3])
    assert "\n".join(_as_lines(one)).rstrip() == printed


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["vllm", "serve", "sglang", "docker", "run", "--gpus", "all", "-p", "8000:8000",
                 "vllm/vllm-openai", "python", "-m", "vllm.entrypoints.openai.api_server", "--tp",
                 "--max-num-seqs", "--enable-prefix-caching", "--no-enable-prefix-caching", "true",
                 "--speculative-config.method", "trtllm-build", "--kv-cache-dtype", "-1", "0.9"]
            ),
            st.text(max_size=8),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_any_words_are_checked_or_refused(words: list[str]) -> None:
    try:
        checked = check_text(" ".join(words))
    except UsageError:
        return
    for one in checked:
        assert one.today
        assert all("{" not in finding.fix or "{" in " ".join(words) for finding in one.findings)
