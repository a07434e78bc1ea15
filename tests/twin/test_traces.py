"""Traces in each format, and rows that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hullspeed.errors import UsageError
from hullspeed.twin.agents import AgentLoad, agent_sessions
from hullspeed.twin.traces import FORMATS, first, load_trace, spread, thinned, write_trace
from hullspeed.twin.workload import Part

MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]}\n'
    '{"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.4799600,3180,8\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:01.017335+00:00,2399,6\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,0,1087,Conversation log\n"
    "118,GPT-4,417,276,693,API log\n"
)
WEKA = (
    "trace,depth,i,t,type,in,out,blocks,prefix_blocks_hit_prev_turn,prefix_blocks_hit_session,"
    "api_time,think_time,stop\n"
    "a,0,0,0.0,n,1000,169,16,0,0,7.34,0.0,tool_use\n"
    "a,0,1,19.0,n,1500,296,24,15,15,9.19,12.0,tool_use\n"
    "b,0,0,0.0,s,640,0,10,0,0,1.0,,end_turn\n"
    "a,1,2,36.0,n,1600,201,25,20,20,8.23,,tool_use\n"
)
OURS = (
    '{"at_s": 1.5, "session": "x", "prompt": [[1, 10], [2, 5]], "osl": 3, "answer": 7}\n\n'
    '{"session": "x", "prompt": [[1, 10], [2, 5], [7, 3], [9, 2]], "osl": 4, "wait_s": 2}\n'
    '{"at_s": 2, "isl": 40, "osl": 1}\n'
)
CUSTOM = (
    '{"prompt": "twelve bytes", "output_tokens": 9}\n{"prompt_tokens": 77, "prompt": "ignored"}\n'
)
SHAREGPT = json.dumps(
    [
        {"id": "1", "conversations": [{"from": "human", "value": "a" * 41},
                                      {"from": "gpt", "value": "b" * 8}]},
        {"id": "2", "conversations": [{"from": "human", "value": "alone"}]},
    ]
)  # fmt: skip
GOOD = {
    "mooncake": MOONCAKE, "azure": AZURE, "burstgpt": BURST, "weka": WEKA, "hullspeed": OURS,
    "custom": CUSTOM, "sharegpt": SHAREGPT,
}  # fmt: skip


def read(tmp_path: Path, kind: str, text: str):  # type: ignore[no-untyped-def]
    path = tmp_path / "trace.txt"
    path.write_text(text, encoding="utf-8")
    return load_trace(path, kind)


def test_mooncake_blocks_are_shared_and_the_grid_is_spread(tmp_path: Path) -> None:
    workload = read(tmp_path, "mooncake", MOONCAKE)
    prompts = [session.turns[0].prompt for session in workload.sessions]
    assert prompts[0] == (Part(1, 512), Part(2, 512), Part(3, 76))
    assert prompts[1] == (Part(1, 512), Part(4, 88))
    assert [session.at_s for session in workload.sessions] == [0.0, 1.5, 3.0]


def test_azure_times_start_at_zero(tmp_path: Path) -> None:
    for text, gap in ((AZURE, 0.5), (AZURE_2024, 1.007405)):
        workload = read(tmp_path, "azure", text)
        assert [s.at_s for s in workload.sessions] == pytest.approx([0.0, gap])
    assert [s.turns[0].isl_tokens for s in workload.sessions] == [2162, 2399]


def test_burstgpt_leaves_failed_requests_out(tmp_path: Path) -> None:
    workload = read(tmp_path, "burstgpt", BURST)
    assert [s.at_s for s in workload.sessions] == [0.0, 113.0]
    assert [s.turns[0].osl_tokens for s in workload.sessions] == [18, 276]


def test_weka_sessions_repeat_what_they_say_they_repeat(tmp_path: Path) -> None:
    workload = read(tmp_path, "weka", WEKA)
    a, b = workload.sessions
    assert [t.isl_tokens for t in a.turns] == [1000, 1500, 1600]
    assert a.turns[1].prompt[0] == Part(a.turns[0].prompt[0].content, 15 * 64)
    assert sum(part.n_tokens for part in a.turns[2].prompt[:-1]) == 20 * 64
    assert a.turns[2].prompt[:2] == (a.turns[1].prompt[0], Part(a.turns[1].prompt[1].content, 320))
    assert [t.wait_s for t in a.turns] == [0.0, 12.0, 0.0]
    assert b.turns[0].osl_tokens == 1


def test_our_own_format(tmp_path: Path) -> None:
    workload = read(tmp_path, "hullspeed", OURS)
    x, alone = workload.sessions
    assert (x.at_s, [t.wait_s for t in x.turns]) == (1.5, [0.0, 2.0])
    assert x.turns[1].prompt[2] == Part(x.turns[0].answer, 3)
    assert alone.turns[0].isl_tokens == 40


def test_prefix_hashes_as_a_server_records_them(tmp_path: Path) -> None:
    rows = (
        '{"at_s": 0, "isl": 150, "osl": 2, "blocks": ["aa", "bb"], "block_tokens": 64}\n'
        '{"at_s": 1, "isl": 128, "osl": 2, "blocks": ["aa", "cc"], "block_tokens": 64}\n'
    )
    one, two = (s.turns[0].prompt for s in read(tmp_path, "hullspeed", rows).sessions)
    assert [part.n_tokens for part in one] == [64, 64, 22]
    assert one[0] == two[0]
    assert len({part.content for part in (*one, *two)}) == 4
    with pytest.raises(UsageError, match="more than isl"):
        read(tmp_path, "hullspeed", rows.replace('"isl": 128, "osl": 2', '"isl": 60, "osl": 3'))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    workload = agent_sessions(AgentLoad(sessions=5, seed=2))
    write_trace(workload, tmp_path / "w.jsonl")
    assert load_trace(tmp_path / "w.jsonl", "hullspeed").sessions == workload.sessions


def test_benchmark_datasets_count_four_bytes_a_token(tmp_path: Path) -> None:
    (session,) = read(tmp_path, "sharegpt", SHAREGPT).sessions
    assert (session.turns[0].isl_tokens, session.turns[0].osl_tokens) == (11, 2)
    one, two = read(tmp_path, "custom", CUSTOM).sessions
    assert (one.turns[0].isl_tokens, one.turns[0].osl_tokens) == (3, 9)
    assert two.turns[0].isl_tokens == 77


@pytest.mark.parametrize(
    ("kind", "text", "row", "what"),
    [
        ("mooncake", MOONCAKE + '{"timestamp": -1}\n', 4, "timestamp"),
        ("mooncake", MOONCAKE.replace("[0, 3]", "[0]"), 2, "2 hash_ids"),
        ("mooncake", MOONCAKE.replace("[0, 3]", '[0, "x"]'), 2, "whole numbers"),
        ("mooncake", MOONCAKE + "{not json\n", 4, "not JSON"),
        ("mooncake", MOONCAKE + "[1]\n", 4, "not a JSON object"),
        ("azure", AZURE + "2023-11-16 18:17:05,12,-3\n", 4, "GeneratedTokens"),
        ("azure", AZURE + "yesterday,12,3\n", 4, "date"),
        ("azure", AZURE + "2023-11-16 18:17:05,12\n", 4, "fields"),
        ("azure", AZURE + "2023-11-16 18:17:02,12,3\n", 4, "earlier"),
        ("azure", AZURE + "2023-11-16 18:17:05,1.5,3\n", 4, "number of tokens"),
        ("azure", "when,what\n1,2\n", 1, "no column 'TIMESTAMP'"),
        ("burstgpt", BURST.replace("417", "nan"), 4, "Request tokens"),
        ("weka", WEKA.replace("12.0", "-12.0"), 3, "think_time"),
        ("hullspeed", OURS + '{"osl": 3}\n', 5, "isl"),
        ("hullspeed", OURS + '{"prompt": [[1, 0]], "osl": 3}\n', 5, "pairs"),
        ("hullspeed", OURS + '{"isl": 4, "osl": 3, "checkpoints": [5]}\n', 5, "checkpoints"),
        ("hullspeed", OURS + '{"isl": true, "osl": 3}\n', 5, "isl"),
        ("custom", CUSTOM + '{"prompt": 3}\n', 3, "not text"),
        ("sharegpt", '[{"conversations": [{"value": "a"}, {"from": "gpt"}]}]', 1, "without text"),
        ("sharegpt", '{"a": 1}', 1, "not a list"),
        ("sharegpt", "nope", 1, "not JSON"),
    ],
)
def test_a_malformed_row_is_named(
    tmp_path: Path, kind: str, text: str, row: int, what: str
) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        read(tmp_path, kind, text)
    assert f"trace.txt, row {row}: " in str(caught.value)
    assert caught.value.exit_code == 2


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_trace(tmp_path / "absent", "azure")
    with pytest.raises(UsageError, match="no rows"):
        read(tmp_path, "azure", AZURE.splitlines()[0] + "\n")
    with pytest.raises(UsageError, match="format"):
        read(tmp_path, "parquet", "")


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), kind=st.sampled_from(sorted(FORMATS)))
def test_damage_is_one_clear_error_or_none(tmp_path: Path, data: st.DataObject, kind: str) -> None:
    raw = bytearray(GOOD[kind].encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = tmp_path / "damaged"
    path.write_bytes(bytes(raw))
    try:
        load_trace(path, kind)
    except UsageError as error:
        assert str(error)


def test_thinning_keeps_sessions_whole_and_first_keeps_the_rate() -> None:
    workload = agent_sessions(AgentLoad(sessions=60, seed=1))
    part = thinned(workload, 100, seed=3)
    assert 100 <= part.n_requests < 120
    assert set(part.sessions) <= set(workload.sessions)
    assert [s.at_s for s in part.sessions] == sorted(s.at_s for s in part.sessions)
    assert part == thinned(workload, 100, seed=3) != thinned(workload, 100, seed=4)
    assert thinned(workload, 10**6) is workload
    assert first(workload, 1).sessions == workload.sessions[:1]
    with pytest.raises(UsageError, match="at least one"):
        thinned(workload, 0)


def test_spreading_keeps_order_and_stays_within_the_step() -> None:
    assert spread([0.0, 0.0, 0.0, 3.0, 9.0, 9.0]) == [0.0, 1.0, 2.0, 3.0, 9.0, 10.5]
    assert spread([4.0, 4.0]) == [4.0, 4.0]


def test_conversations_a_line_as_sglang_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b" * 16}]
    rows = [{"conversations": said}, {"conversations": said[:1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (session,) = load_trace(path, "custom").sessions
    (turn,) = session.turns
    assert (turn.isl_tokens, turn.osl_tokens) == (10, 4)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-05-10 00:00:00.5+00:00,216,5\r\n",
        ),
        ("custom", '{"prompt": "hello"}\n'),
        ("sharegpt", '[{"conversations": [{"value": "a"}, {"value": "b"}]}]'),
    ],
)
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, kind: str, text: str) -> None:
    path = tmp_path / "saved.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_trace(path, kind).n_requests == 1
