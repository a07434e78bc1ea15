"""vLLM itself reads what ``hullspeed quantize`` writes.

Needs vLLM's CPU build in an environment of its own and a small checkpoint:
``HULLSPEED_VLLM_PYTHON=~/vllm/bin/python HULLSPEED_VLLM_MODEL=~/smollm2-hf scripts/test-deep``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hullspeed.cli.main import run

PYTHON = os.environ.get("HULLSPEED_VLLM_PYTHON", "")
MODEL = os.environ.get("HULLSPEED_VLLM_MODEL", "")
pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (PYTHON and MODEL), reason="no vLLM environment named"),
]

GENERATE = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=256, enforce_eager=True, max_num_seqs=2)
params = SamplingParams(temperature=0, max_tokens=8)
print("ANSWER", llm.generate(["The capital of France is"], params)[0].outputs[0].text)
"""


# The CPU build has no kernel for 128 x 128 blocks and for packed 8-bit weights.
@pytest.mark.parametrize(
    "options",
    [
        ["--to", "int4", "--group", "32"],
        ["--to", "int8", "--activations", "8"],
        ["--to", "fp8", "--format", "compressed-tensors"],
    ],
    ids=["int4", "int8", "fp8"],
)
def test_vllm_answers_with_it(options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(["quantize", MODEL, str(out), *options, "-q"]) == 0
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip
    done = subprocess.run(
        [PYTHON, "-c", GENERATE, str(out)],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ANSWER  Paris" in done.stdout
