"""Reading: every pattern on its own example, prefixes, wraps, ranks, versions, bad input."""

from __future__ import annotations

import pytest

from hullspeed.errors import UsageError
from hullspeed.plan.explain_log.facts import facts_of
from hullspeed.plan.explain_log.reader import LinePattern, line_patterns, read_log


@pytest.mark.parametrize("row", line_patterns(), ids=lambda row: f"{row.engine}-{row.name}")
def test_every_pattern_reads_its_example(row: LinePattern) -> None:
    match = row.pattern.search(row.example)
    assert match is not None
    # each field of the meaning is a field of the line
    parsed = read_log(row.example)
    events = [event for event in parsed.events if event.name == row.name]
    assert events
    assert "?" not in events[0].meaning
    assert events[0].kind == row.kind


def test_no_pattern_reads_a_line_of_another_kind() -> None:
    """An example is recognised by its own kind and by the other parts of the same sentence only."""
    together = {
        frozenset({"free_at_start", "requested", "usage", "kv_advice", "kv_gib"}),
        frozenset({"too_long", "longest"}),
        frozenset({"oom", "oom_state"}),
        frozenset({"config", "version"}),
        frozenset({"tokens", "kv_dtype"}),
    }
    for row in line_patterns():
        names = {p.name for p in line_patterns() if p.pattern.search(row.example)}
        assert names == {row.name} or any(names <= group for group in together), row.example


def test_prefixes_colours_and_ranks() -> None:
    line = "Available KV cache memory: 12.26 GiB"
    text = "\n".join(
        (
            f"2026-08-22 06:42:13.100 | \x1b[36m(Worker_TP0 pid=223)\x1b[0;0m INFO [x.py:1] {line}",
            "qwen-1  | (Worker_TP1 pid=238) INFO 08-22 04:42:13 [gpu_worker.py:563] "
            "Available KV cache memory: 12.24 GiB",
            f"qwen-1  | (Worker_TP0 pid=223) INFO 08-22 04:42:14 {line}",
        )
    )
    log = read_log(text)
    assert log.ranks == 2
    assert [event.count for event in log.named("kv_gib")] == [2, 1]
    facts = facts_of(log)
    assert (facts.tp, facts.kv_gib) == (2, 12.24)


def test_a_wrapped_sentence_is_read_once() -> None:
    text = (
        "ValueError: To serve at least one request with the model's max seq len (65536), (2.45 GiB "
        "KV\ncache is needed, which is larger than the available KV cache memory (1.9 GiB). Based "
        "on the\navailable memory, the estimated maximum model length is 48384.\n"
    )
    log = read_log(text)
    assert [event.name for event in log.events] == ["too_long", "longest"]


def test_old_wordings_only_at_their_version() -> None:
    old = "INFO 01-30 03:19:14 kv_cache_utils.py:395] # GPU blocks: 1381"
    assert read_log(old).named("blocks")
    banner = "INFO 05-01 [utils.py:299]   █▄█▀ █     █  version 0.20.0\n"
    assert not read_log(banner + old).named("blocks")


def test_development_builds_have_no_rules_version() -> None:
    text = "INFO [core.py] Initializing a V1 LLM engine (v0.1.dev19754+g3a0914114) with config: m=1"
    log = read_log(text)
    assert (log.version, log.rules_version) == ("0.1.dev19754+g3a0914114", None)
    assert read_log(text.replace("0.1.dev19754+g3a0914114", "dev")).rules_version is None


def test_arguments_of_both_kinds_of_line() -> None:
    log = read_log(
        "INFO [utils.py:233] non-default args: {'model': 'Qwen/Qwen3.6-27B-FP8', 'max_model_len': "
        "262144, 'max_num_seqs': 8, 'speculative_config': {'method': 'mtp', "
        "'num_speculative_tokens': 3}, 'mamba_block_size': 8192, 'enforce_eager': True}\n"
        "INFO [core.py:109] Initializing a V1 LLM engine (v0.27.1) with config: model='x', "
        "speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=3), "
        "dtype=torch.bfloat16, tensor_parallel_size=2, kv_cache_dtype=fp8_e5m2, "
        "enable_prefix_caching=True"
    )
    facts = facts_of(log)
    assert facts.model == "Qwen/Qwen3.6-27B-FP8"
    assert (facts.draft_tokens, facts.draft_model, facts.tp) == (3, False, 2)
    assert (facts.kv_dtype, facts.prefix_caching, facts.eager) == ("fp8_e5m2", True, True)
    assert (facts.max_model_len, facts.max_num_seqs, facts.mamba_block_flag) == (262144, 8, 8192)


def test_an_external_drafter_is_recognised() -> None:
    log = read_log(
        "INFO [core.py:109] Initializing a V1 LLM engine (v0.28.0) with config: model='Q', "
        "speculative_config=SpeculativeConfig(method='dflash', model='z-lab/d', num_spec_tokens=15)"
    )
    assert facts_of(log).draft_model


@pytest.mark.parametrize("text", ["", "   \n", "hello\nworld\n", "\x00\x01\x02"])
def test_bad_input_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        read_log(text)


def test_long_lines_and_large_logs_stay_fast() -> None:
    import time

    text = "x" * 150_000 + "\n" + "INFO noise line of a server\n" * 20_000
    text += "Available KV cache memory: 6.67 GiB\n"
    start = time.process_time()
    assert read_log(text).n_lines == 20_002
    # A third of a second on one core of 2023; a search that turns back at each byte takes hours.
    assert time.process_time() - start < 60
