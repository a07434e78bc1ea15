from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE

from .mock_endpoint import Truth, mock_endpoint

HULLSPEED = (sys.executable, "-c", "from hullspeed.cli.main import main; main()", "bench")
SMALL = ("--isl", "8", "--osl", "4")


async def bench(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(*HULLSPEED, *arguments, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_json_goes_to_stdout_and_progress_to_stderr() -> None:
    async with mock_endpoint(Truth()) as mock:
        load = ("--concurrency", "1", "2", "--requests", "4", "--json")
        code, out, err = await bench(mock.url, *SMALL, *load)
    assert code == 0, err
    assert [cell["load"] for cell in json.loads(out)["cells"]] == ["closed 1", "closed 2"]
    assert "measuring closed 2" in err


async def test_a_missed_objective_exits_1_and_is_shown() -> None:
    async with mock_endpoint(Truth(ttft_s=0.05)) as mock:
        load = ("--rate", "50", "--requests", "4", "--ttft", "10ms")
        code, out, _ = await bench(mock.url, *SMALL, *load)
    assert code == 1
    assert "0.0% of requests kept the objective" in out


async def test_usage_and_silence_have_their_exit_codes() -> None:
    assert (await bench("http://127.0.0.1:9"))[0] == 3
    assert (await bench("http://127.0.0.1:9", "--isl", "0"))[0] == 2
    assert (await bench("http://127.0.0.1:9", "--ttft", "200"))[0] == 2


async def test_ctrl_c_prints_what_was_measured() -> None:
    async with mock_endpoint(Truth(ttft_s=0.05)) as mock:
        process = await asyncio.create_subprocess_exec(
            *HULLSPEED, mock.url, *SMALL, "--concurrency", "2", "--requests", "2000", "--json",
            stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        while len(mock.prompts) < 10 and process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode == 0, err
    (cell,) = json.loads(out)["cells"]
    assert cell["interrupted"]
    assert cell["ok"] > 0
