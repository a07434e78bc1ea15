"""docs/serve.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from hullspeed.server.metrics import COUNTERS, GAUGES, HISTOGRAMS
from hullspeed.server.schemas import HARMLESS, NEUTRAL, ChatRequest, CompletionRequest
from hullspeed.server.settings import ServerSettings

DOC = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()


def names(section: str) -> set[str]:
    """The code words between the section's marks."""
    return set(
        re.findall(r"`([^`]+)`", DOC.partition(f"<!-- {section} -->")[2].split("<!-- end")[0])
    )


def test_fields() -> None:
    assert names("harmless") == HARMLESS
    assert names("neutral") == NEUTRAL.keys()
    fields = DOC.partition("## Request fields")[2].partition("No field is dropped")[0]
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__} - {"prompt"}
    assert known <= set(re.findall(r"`(\w+)`", fields))


def test_metrics() -> None:
    listed = {f"vllm:{n.vllm}" for table in (GAUGES, COUNTERS, HISTOGRAMS) for n in table if n.vllm}
    others = {"vllm:request_success", "vllm:admission_rejections", "vllm:cache_config_info"}
    assert names("vllm") == listed | others


def test_error_codes() -> None:
    source = Path(__file__).parents[2] / "src" / "hullspeed"
    code = "".join(path.read_text() for path in (source / "server").glob("*.py"))
    code += (source / "errors.py").read_text()
    raised = set(re.findall(r'\bcode = ?"(\w+)"|\bcode="(\w+)"', code))
    table = DOC.partition("## Errors")[2].partition("A failure before")[0]
    told = set(re.findall(r"`([a-z]+_\w+|loading|draining)`", table)) - {"internals"}
    assert {name for pair in raised for name in pair if name} - told <= {"bad_request"}
    assert not [name for name in told if f'"{name}"' not in code]


def test_limits() -> None:
    defaults = msgspec.structs.asdict(ServerSettings())
    for text in ("10 s, 30 s", "cut off after 60 s", "closed after 30 s", "256; 512", "64 KiB"):
        assert text in DOC
    assert (defaults["header_deadline_s"], defaults["body_deadline_s"]) == (10, 30)
    assert (defaults["write_stall_s"], defaults["keep_alive_s"]) == (60, 30)
    assert (defaults["max_prompts"], defaults["max_sequences"]) == (256, 512)
    assert (defaults["heartbeat_limit_s"], defaults["hang_limit_s"]) == (30, 120)
    assert (defaults["max_restarts"], defaults["restart_window_s"]) == (5, 600)
