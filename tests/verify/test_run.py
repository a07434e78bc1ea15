from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE

import msgspec
import pytest

from hullspeed.errors import EngineError, UsageError
from hullspeed.findings import Severity
from hullspeed.verify import Outcome, VerifyReport, run
from hullspeed.verify.compare import difference
from hullspeed.verify.completion import Completion, TokenLogprob, read
from hullspeed.verify.endpoint import Answer, Request

from .fake_endpoint import fake_endpoint

HULLSPEED = (sys.executable, "-c", "from hullspeed.cli.main import main; main()", "verify")


async def verify(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(*HULLSPEED, *arguments, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_the_report_is_json() -> None:
    async with fake_endpoint("bad_total") as fake:
        report = await run(fake.url + "/v1/", only=["v004", "V008"])
    assert not report.passed
    assert [check.code for check in report.checks] == ["V004", "V008"]
    assert msgspec.json.decode(msgspec.json.encode(report), type=VerifyReport) == report


async def test_unknown_codes_and_silence_are_errors() -> None:
    with pytest.raises(UsageError, match="no such check"):
        await run("http://127.0.0.1:9", only=["V999"])
    with pytest.raises(EngineError, match="nothing answers"):
        await run("http://127.0.0.1:9")


async def test_command_line() -> None:
    async with fake_endpoint("stop_included") as fake:
        code, out, err = await verify(fake.url, "--only", "V001", "V007")
        assert code == 1
        assert "V001 ok" in out
        assert "V007 FAIL" in out
        assert "curl -sN" in out
        assert "V007 failed" in err
        code, out, err = await verify(fake.url, "--only", "V001", "--json", "-q")
        assert code == 0
        assert json.loads(out)["checks"][0]["outcome"] == "passed"
        assert err == ""
    assert (await verify("http://127.0.0.1:9"))[0] == 3
    assert (await verify("http://127.0.0.1:9", "--only", "nonsense"))[0] == 2


@pytest.mark.parametrize("only", [(), ("V016", "V017")])
async def test_an_endpoint_that_dies_is_a_finding_and_not_a_row_of_passes(
    only: tuple[str, ...],
) -> None:
    async with fake_endpoint() as fake:
        left = False

        def leave(_line: str) -> None:
            nonlocal left
            if not left:
                left = True
                fake.leave()

        report = await run(fake.url, only=["V001", *only] if only else (), progress=leave)
    assert not report.passed
    assert report.count(Outcome.PASSED) == 1
    assert report.count(Outcome.SKIPPED) >= len(report.checks) - 3
    assert "ConnectError" in str(report.findings)


def completion(text: str, margins: list[float] | None = None) -> Completion:
    found = Completion(Answer(Request("", None)), valid=True, text=text)
    if margins is not None:
        found.logprobs = [
            TokenLogprob(token, -0.1, {token: -0.1, "other": -0.1 - margin})
            for token, margin in zip(text.split(), margins, strict=True)
        ]
    return found


def test_only_near_ties_may_branch() -> None:
    reference = completion("a b c", [1.0, 0.05, 1.0])
    assert difference(reference, completion("a x y", [1.0, 1.0, 1.0])) is None
    found = difference(reference, completion("x y z", [1.0, 1.0, 1.0]))
    assert found is not None
    assert found[1] is Severity.ERROR
    assert "no near tie" in found[0]


def test_without_logprobs_an_early_branch_is_worse_than_a_late_one() -> None:
    reference = completion("the same words for a long time, then this")
    early = difference(reference, completion("other words"))
    late = difference(reference, completion("the same words for a long time, then that"))
    assert early is not None
    assert late is not None
    assert (early[1], late[1]) == (Severity.ERROR, Severity.WARNING)
    assert difference(reference, reference) is None


def test_curl_lines_name_the_key_and_do_not_show_it() -> None:
    curl = Request("http://h/v1/completions", {"prompt": "it's"}).curl
    assert "$HULLSPEED_API_KEY" in curl
    assert """'{"prompt":"it'"'"'s"}'""" in curl
    assert Request("http://h/metrics", None).curl == "curl -s http://h/metrics"


@pytest.mark.parametrize("body", [None, [], {"choices": None}, {"choices": []}, {"error": {}}])
def test_what_is_no_completion_is_not_valid(body: object) -> None:
    answer = Answer(Request("", None), status=200, json=body)
    assert not read(answer).valid
