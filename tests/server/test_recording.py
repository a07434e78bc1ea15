"""What a server writes down is enough to find the same prefixes again, and holds no text."""

from __future__ import annotations

import json
import os
import random
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hullspeed.clock import VirtualClock
from hullspeed.core.build import build_scheduler
from hullspeed.core.engine import EngineLoop, Limits
from hullspeed.core.executor import CostModelExecutor
from hullspeed.core.request import Sequence
from hullspeed.core.sampling import SamplingParams
from hullspeed.errors import UsageError
from hullspeed.server.recording import BLOCK_TOKENS, Prefixes, Recorder
from hullspeed.server.settings import ServerSettings
from hullspeed.twin.engine import EngineModel
from hullspeed.twin.player import play
from hullspeed.twin.traces import load_trace, write_trace
from support.live_server import live_server
from support.patience import until

TURNS = st.lists(st.integers(0, 2**32), min_size=1, max_size=12)
PAGE_TOKENS = 16


class _OneSecond:
    def seconds(self, shapes: object) -> float:
        return 1.0


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def note(recorder: Recorder, prompt: list[int], output: list[int], **kwargs: Any) -> None:
    given: dict[str, Any] = {
        "salt": b"", "checkpoints": (), "cached_tokens": 0, "end": "length",
    }  # fmt: skip
    recorder.note(prompt, output, arrival_s=time.monotonic(), **given | kwargs)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), hybrid=st.booleans())
def test_a_replay_finds_what_the_engine_found(
    seed: int, hybrid: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Conversations and branches of random tokens, one after another, on the production engine
    loop; then the record of them on the twin: the same tokens are cached, request by request.
    """
    rng = random.Random(seed)
    scheduler = build_scheduler(
        n_pages=400, page_tokens=PAGE_TOKENS, max_running=4, step_tokens=64,
        max_context_tokens=1024, n_state_slots=24 if hybrid else 0,
    )  # fmt: skip
    clock = VirtualClock()

    def say(sequence: Sequence) -> int:
        return rng.randrange(3)

    executor = CostModelExecutor(clock, lambda _: 1.0, say)
    loop = EngineLoop(scheduler, executor, clock, Limits(vocab=3, max_context_tokens=1024))
    path = tmp_path_factory.mktemp("record") / "r.jsonl"
    recorder = Recorder(path, limit_bytes=10**7)
    said: list[list[int]] = [[]]
    found = []
    for number in range(14):
        start = rng.choice(said)
        prompt = start[: rng.choice([len(start), rng.randint(0, 200)])]
        prompt = [*prompt, *rng.choices(range(3), k=rng.randint(1, 150))][:900]
        places = tuple(sorted({rng.randint(1, len(prompt)), len(prompt)})) if hybrid else ()
        salt = rng.choice([b"", b"", b"tenant"])
        sampling = SamplingParams(max_tokens=rng.randint(1, 100), ignore_eos=True)
        sequence = loop.add(number, prompt, sampling, salt=salt, checkpoints=places)
        while loop.has_work:
            loop.step()
        said.append(sequence.tokens)
        found.append(sequence.cached_tokens)
        recorder.note(
            prompt, sequence.output, arrival_s=recorder._start_s + 1e5 * number, salt=salt,
            checkpoints=places, cached_tokens=sequence.cached_tokens or 0, end="length",
        )  # fmt: skip
        scheduler.check_integrity()
    workload = load_trace(path, "hullspeed")
    engine = EngineModel(
        n_pages=400, page_tokens=PAGE_TOKENS, max_running=4, step_tokens=64,
        max_context_tokens=1024, state_slots=24 if hybrid else 0,
    )  # fmt: skip
    played = play(engine, _OneSecond(), workload, paranoid=True)
    assert [request.cached_tokens for request in played.served] == found
    assert [row["cached"] for row in rows(path)] == found
    write_trace(workload, path)
    again = play(engine, _OneSecond(), load_trace(path, "hullspeed"))
    assert [request.cached_tokens for request in again.served] == found


def test_equal_prefixes_have_equal_names_and_forks_are_exact() -> None:
    prefixes = Prefixes(b"k")
    text = list(range(200))
    names, fork = prefixes.names(text, b"")
    assert (len(names), fork) == (4, None)
    assert prefixes.names(text, b"") == (names, None)
    other, fork = prefixes.names([*text[:150], *[7] * 50], b"")
    assert other[:2] == names[:2]
    assert not set(other[2:]) & set(names)
    assert fork == (2, names[2], 150 - 2 * BLOCK_TOKENS)
    assert prefixes.names(text[:100], b"")[1] == (1, names[1], 100 - BLOCK_TOKENS)
    # Of several, the one that shares most.
    for n_shared in (12, 17, 5):
        fork = prefixes.names([*text[: 128 + n_shared], 7, n_shared], b"")[1]
        assert fork is not None
        assert (fork[0], fork[2]) == (2, n_shared)


def test_names_of_other_keys_and_tenants_have_nothing_in_common() -> None:
    text = list(range(300))
    one = Prefixes(b"k")
    found = [one.names(text, b"a"), one.names(text, b"b"), Prefixes(b"l").names(text, b"a")]
    assert all(fork is None for _, fork in found)
    assert len({name for names, _ in found for name in names}) == 15


def test_blocks_are_forgotten_oldest_first() -> None:
    prefixes = Prefixes(b"k", max_blocks=4)
    prefixes.names([1] * 300, b"a")
    prefixes.names([2] * 300, b"b")
    assert prefixes.names([1] * 30, b"a")[1] is None
    assert prefixes._n_blocks <= 4 + 1


def test_a_salt_makes_records_comparable(tmp_path: Path) -> None:
    blocks = []
    for name, salt in (("a", ""), ("b", ""), ("c", "s" * 16), ("d", "s" * 16)):
        recorder = Recorder(tmp_path / name, salt=salt, limit_bytes=10_000)
        note(recorder, [1, 2, 3], [4])
        blocks.append(rows(tmp_path / name)[0]["blocks"][0])
    assert len(set(blocks[:3])) == 3
    assert blocks[2] == blocks[3]


def test_the_file_is_new_private_bounded_and_never_half_a_line(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "r.jsonl"
    recorder = Recorder(path, limit_bytes=500, log=told.append)
    for _ in range(9):
        note(recorder, list(range(200)), [1])
    recorder.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert 0 < path.stat().st_size <= 500
    assert all(row["isl"] == 200 for row in rows(path))
    assert len(told) == 1
    assert "--record-limit" in told[0]
    with pytest.raises(UsageError, match="exists"):
        Recorder(path, limit_bytes=1)
    with pytest.raises(UsageError, match="cannot make its file"):
        Recorder(tmp_path / "nowhere" / "r", limit_bytes=1)
    unused = Recorder(tmp_path / "unused", limit_bytes=1)
    unused.close()
    assert not (tmp_path / "unused").exists()


def test_a_full_disk_ends_the_record_and_nothing_else() -> None:
    told: list[str] = []
    recorder = Recorder.__new__(Recorder)
    recorder.__dict__.update(
        _prefixes=Prefixes(b"k"), _path=Path("/dev/full"), _limit_bytes=1000, _log=told.append,
        _written_bytes=1, _start_s=0.0, _file=os.open("/dev/full", os.O_WRONLY),
    )  # fmt: skip
    note(recorder, [1], [2])
    note(recorder, [1], [2])
    assert len(told) == 1
    assert "No space left" in told[0]


def test_requests_of_a_server(tmp_path: Path) -> None:
    """Streamed, whole, several at once, with a tenant's salt, left early; refused ones are not."""
    path = tmp_path / "r.jsonl"
    recorder = Recorder(path, limit_bytes=10**6)
    settings = ServerSettings(port=0)
    with live_server(settings, recorder=recorder) as server, server.client() as client:
        prompt = "a secret that must not be written down " * 4
        body = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/completions", json=body | {"stream": True}).status_code == 200
        assert client.post("/v1/completions", json=body | {"cache_salt": "x"}).status_code == 200
        assert client.post("/v1/completions", json=body | {"n": 2}).status_code == 200
        assert client.post("/v1/completions", json=body | {"max_tokens": -1}).status_code == 400
        long = body | {"max_tokens": 3000, "stream": True}
        with client.stream("POST", "/v1/completions", json=long) as answer:
            next(answer.iter_bytes())
        assert until(lambda: len(rows(path)) >= 6)
    found = rows(path)
    assert [row["end"] for row in found] == ["length"] * 5 + ["abort"]
    assert {row["isl"] for row in found} == {len(prompt)}
    assert [row["osl"] for row in found[:5]] == [5] * 5
    assert 0 < found[5]["osl"] < 3000
    assert found[0]["blocks"] == found[1]["blocks"] == found[3]["blocks"]
    assert not set(found[2]["blocks"]) & set(found[0]["blocks"])
    assert [row["cached"] for row in found[:2]] == [0, len(prompt) - 1]
    assert "secret" not in path.read_text()
    assert set(found[0]) <= {
        "at_s", "isl", "osl", "cached", "end", "block_tokens", "blocks", "fork", "checkpoints",
    }  # fmt: skip
    assert load_trace(path, "hullspeed").n_requests == 6
