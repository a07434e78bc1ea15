"""What the comparison of servers counts, judges and starts."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import side_by_side
from side_by_side import Figure, Load, Measured, Server, Side, call, compare, median, report

from hullspeed.bench import BenchSpec, Cell

NOBODY = "http://127.0.0.1:1"
TESTS = str(Path(__file__).parents[1])
SERVER = f"""
import asyncio, sys
sys.path.insert(0, {TESTS!r})
from bench.mock_endpoint import Truth, mock_endpoint

async def main():
    async with mock_endpoint(Truth()) as mock:
        print(mock.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def measured(side: str, value: float, foreign: float = 0.0, load: str = "a") -> Measured:
    return Measured(side, load, {"tok/s": value}, foreign, ["valid"])


def never(_cells: list[Cell]) -> float:
    raise AssertionError("nothing is read here")


async def nothing(_url: str) -> list[Cell]:
    return []


def load_of(figure: Figure) -> dict[str, Load]:
    return {"a": Load("one stream", nothing, (figure,))}


@pytest.mark.parametrize(
    ("figure", "ours", "peer", "good"),
    [
        (Figure("x", never, bar=0.8), 8.0, 10.0, True),
        (Figure("x", never, bar=0.8), 7.9, 10.0, False),
        (Figure("x", never, bar=1.2, at_least=False), 12.0, 10.0, True),
        (Figure("x", never, bar=1.2, at_least=False), 12.1, 10.0, False),
        (Figure("x", never, bar=0.04, at_least=False, absolute=True), 0.039, 0.0001, True),
        (Figure("x", never, bar=0.04, at_least=False, absolute=True), 0.041, 10.0, False),
        (Figure("x", never), 0.001, 10.0, True),
    ],
)
def test_bars(figure: Figure, ours: float, peer: float, good: bool) -> None:
    assert figure.good(ours, peer) is good


def test_rounds_of_a_busy_machine_count_only_if_there_are_no_others() -> None:
    quiet, busy = measured("x", 10, 0.12), measured("x", 2, 0.13)
    assert median([quiet, busy], "tok/s") == (10, 1)
    assert median([busy, busy], "tok/s") == (2, 0)


@pytest.mark.parametrize(
    ("ours", "peer", "foreign", "held", "said"),
    [
        (9.0, 10.0, 0.0, True, ">= 0.83 held"),
        (8.0, 10.0, 0.0, False, ">= 0.83 missed"),
        (9.0, 10.0, 0.5, False, "too busy"),
    ],
)
def test_report(
    ours: float, peer: float, foreign: float, held: bool, said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    figure = Figure("tok/s", never, bar=0.83)
    rounds = [measured("ours", ours), measured("peer", peer, foreign)]
    assert report("t", rounds, load_of(figure), ["ours", "peer"]) is held
    out = capsys.readouterr().out
    assert said in out
    assert f"{ours / peer:.2f}" in out
    assert "a: one stream" in out


def test_a_bar_against_a_peer_is_not_judged_alone(capsys: pytest.CaptureFixture[str]) -> None:
    figures = (
        Figure("tok/s", never, bar=99.0),
        Figure("tok/s", never, bar=9.5, absolute=True),
    )
    rounds = [measured("ours", 9.0)]
    assert report("t", rounds, load_of(figures[0]), ["ours"])
    assert not report("t", rounds, load_of(figures[1]), ["ours"])
    assert "ours >= 9.5 missed" in capsys.readouterr().out


class FakeSide(Side):
    """A mock endpoint. It takes a free port and prints its URL, into its log."""

    log: Path

    @property
    def url(self) -> str:
        said = self.log.read_text().split() if self.log.exists() else []
        return next((word for word in reversed(said) if word.startswith("http:")), NOBODY)

    @url.setter
    def url(self, _value: str) -> None: ...


def fake_side(log: Path) -> Side:
    side = FakeSide(log.stem, (sys.executable, "-c", SERVER), NOBODY)
    object.__setattr__(side, "log", log)
    return side


def test_sides_take_turns_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[psutil.Process] = []
    order = []

    def recorded(side: Side, name: str, load: Load, server: psutil.Process) -> Measured:
        assert not any(process.is_running() for process in alive)
        alive[:] = [server]
        order.append((side.name, name))
        return measured(side.name, 1.0, load=name)

    monkeypatch.setattr(side_by_side, "measure", recorded)
    sides = [fake_side(tmp_path / f"{name}.log") for name in ("x", "y")]
    figure = Figure("tok/s", never)
    results = compare(sides, load_of(figure), 2, tmp_path)
    assert order == [("x", "a"), ("y", "a"), ("y", "a"), ("x", "a")]
    assert [m.side for m in results] == ["x", "y", "y", "x"]
    assert not alive[0].is_running()


def test_a_load_is_run_against_a_server_and_its_figures_read(tmp_path: Path) -> None:
    side = fake_side(tmp_path / "x.log")

    def ok(cells: list[Cell]) -> float:
        return float(cells[0].ok)

    load = side_by_side.bench_load(
        "three",
        lambda url: [BenchSpec(url=url, isl_tokens=4, osl_tokens=1, concurrency=(1,), requests=3)],
        (Figure("ok", ok), Figure("TTFT s", lambda cells: cells[0].ttft_s.p50)),
    )
    with Server(side, tmp_path / "x.log") as server:
        result = side_by_side.measure(side, "a", load, server)
    assert not server.is_running()
    assert result.values["ok"] == 3
    assert 0 < result.values["TTFT s"] < math.inf
    assert result.foreign >= 0


def test_a_server_that_ends_at_once_is_said(tmp_path: Path) -> None:
    side = Side("broken", (sys.executable, "-c", "print('no')"), NOBODY)
    with (
        pytest.raises(SystemExit, match=r"broken ended; see .*log"),
        Server(side, tmp_path / "log"),
    ):
        pass
    assert (tmp_path / "log").read_text() == "no\n"


def test_a_step_that_fails_says_what_it_printed() -> None:
    call(sys.executable, "-c", "print('fine')")
    with pytest.raises(SystemExit, match=r"(?s)import sys.*what went wrong"):
        call(sys.executable, "-c", "import sys; print('what went wrong'); sys.exit(3)")
