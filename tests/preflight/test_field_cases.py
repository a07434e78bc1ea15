"""Public field reports that preflight should have caught, by the id of the case list."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import msgspec

from hullspeed.findings import Finding, Severity
from hullspeed.preflight.ask import Ask
from hullspeed.preflight.chain import check
from hullspeed.preflight.stack import Gpu, Nvidia, Stack, Torch

_SPEC = importlib.util.spec_from_file_location(
    "preflight_field_stacks", Path(__file__).with_name("stacks.py")
)
assert _SPEC is not None and _SPEC.loader is not None
stacks = importlib.util.module_from_spec(_SPEC)
sys.modules["preflight_field_stacks"] = stacks
_SPEC.loader.exec_module(stacks)

ASK, H100 = stacks.healthy("h100")


def on(
    gpu: Gpu | None = None, *, driver: str = "", torch: Torch | None = None, **packages: str
) -> Stack:
    stack: Stack = H100
    nvidia = stack.nvidia
    assert nvidia is not None
    gpus = (gpu,) if gpu else nvidia.gpus
    python = msgspec.structs.replace(
        stack.python,
        packages={**stack.python.packages, **packages},
        torch=torch or stack.python.torch,
    )
    seen = Nvidia(driver=driver or nvidia.driver, driver_cuda="", gpus=gpus)
    return msgspec.structs.replace(stack, python=python, nvidia=seen)


def asked(**changes: Any) -> Ask:
    ask: Ask = msgspec.structs.replace(ASK, **changes)
    return ask


def by_code(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.code: finding for finding in findings}


def card(name: str, capability: str, gib: float) -> Gpu:
    size = int(gib * 1024**3)
    return Gpu(index=0, name=name, compute_capability=capability, total_bytes=size, free_bytes=size)


CU130 = Torch(version="2.11.0+cu130", cuda="13.0", arch_list=("sm_80", "sm_90"))


def test_s24_driver_535_with_a_cuda_13_wheel() -> None:
    """vLLM 0.20.2 from PyPI on R535: the way out on a data-centre GPU is cuda-compat or cu129."""
    stack = on(driver="535.104.05", torch=CU130, vllm="0.20.2")
    finding = by_code(check(asked(), stack))["PF036"]
    assert "cuda-compat-13-0" in finding.fix
    assert "cu129" in finding.fix
    assert "580.65.06" in finding.what


def test_s25_driver_570_with_torch_cu130() -> None:
    stack = on(driver="570.86.15", torch=CU130, vllm="0.20.2")
    finding = by_code(check(asked(), stack))["PF036"]
    assert finding.evidence["offers"] == "12.8"
    assert "0.19.1" in finding.fix


def test_s26_a_cu129_wheel_runs_on_a_12_8_driver() -> None:
    """Minor-version compatibility: told, not refused."""
    cu129 = msgspec.structs.replace(CU130, version="2.11.0+cu129", cuda="12.9", cuda_available=True)
    findings = check(asked(), on(driver="570.86.15", torch=cu129, vllm="0.20.2"))
    seen = by_code(findings)
    assert "PF037" in seen
    assert not any(finding.severity is Severity.ERROR for finding in findings)


def test_s28_block_fp8_on_a_3090_is_not_refused() -> None:
    ask = asked(tensor_parallel=2, memory_share=0.95, weight_bytes_per_gpu=15_400_000_000)
    gpu = card("NVIDIA GeForce RTX 3090", "8.6", 23.56)
    stack = on(gpu)
    assert stack.nvidia is not None
    two = (gpu, msgspec.structs.replace(gpu, index=1))
    stack = msgspec.structs.replace(stack, nvidia=msgspec.structs.replace(stack.nvidia, gpus=two))
    findings = check(ask, stack)
    assert [finding.code for finding in findings] == ["PF047"]
    assert "Marlin" in findings[0].what


def test_s30_a_request_that_does_not_fit_the_pool() -> None:
    finding = by_code(check(asked(context_tokens=131072, pool_tokens=42_000), on()))["PF052"]
    assert "--max-model-len 42000" in finding.fix


def test_s01_and_s02_defaults_that_do_not_start() -> None:
    """1024 sequences by default on a GPU of 70 GiB or more, 969 and 556 blocks."""
    for blocks in (969, 556):
        ask = asked(max_num_seqs=None, pool_blocks=blocks)
        finding = by_code(check(ask, on()))["PF051"]
        assert finding.evidence["max_num_seqs"] == "1024"
        assert f"--max-num-seqs {blocks}" in finding.fix
    ask = asked(max_num_seqs=None, pool_blocks=161)
    small = card("NVIDIA L40S", "8.9", 44.4)
    assert by_code(check(ask, on(small)))["PF051"].evidence["max_num_seqs"] == "256"


def test_s08_mtp_with_prefix_caching_depends_on_the_version() -> None:
    """On by default for hybrids from 0.28; refused only where both are on."""
    both = asked(draft_tokens=3)
    assert "PF045" in by_code(check(both, on()))
    torch = Torch(version="2.11.0+cu130", cuda="13.0", cuda_available=True)
    old = on(torch=torch, vllm="0.24.0")
    assert "PF045" not in by_code(check(both, old))
    assert "PF045" in by_code(check(asked(draft_tokens=3, prefix_caching=True), old))
    assert "PF045" not in by_code(check(asked(draft_tokens=3, prefix_caching=False), on()))


def test_tp_must_divide_24_16_48_and_4_heads() -> None:
    """The 27B hybrid: 1, 2, 4 and 8 work (key-value heads are kept twice at 8), 16 and 3 do not."""
    ask, stack = stacks.healthy("h100x16")
    for tp, works in ((1, True), (2, True), (4, True), (8, True), (3, False), (16, False)):
        found = by_code(check(msgspec.structs.replace(ask, tensor_parallel=tp), stack))
        assert ("PF049" not in found) is works, tp
