"""Start-up failures: each with its own cause and the change that helps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hullspeed.plan.explain_log.explain import explain_log

Log = Callable[..., str]
CAPTURE = "Capturing CUDA graphs (decode, FULL):   0%|          | 0/35 [00:00<?, ?it/s]\n"
READY = "INFO:     Application startup complete.\n"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 784.00 MiB. GPU 0 has a total "
    "capacity of 31.37 GiB of which 512.00 MiB is free.\n"
)

# id, further lines of the log, code, words that the fix must hold, words that `why` must hold
CASES = [
    (
        "S01", "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (969).",
        "EL101", ["--max-num-seqs 969"], ["one block for each decoding sequence"],
    ),
    (
        "S30", "ValueError: To serve at least one request with the models's max seq len (131072), "
        "8.33 GiB KV cache is needed, which is larger than the available KV cache memory (8.29 "
        "GiB). Based on the available memory, the estimated maximum model length is 129600.",
        "EL102", ["--max-model-len 129600"], ["max_model_len"],
    ),
    ("S31", CAPTURE + OOM, "EL105", ["--enforce-eager", "max_cudagraph_capture_size"],
     ["higher utilization makes it worse"]),
    ("S06", CAPTURE + "INFO [x] Graph capturing finished in 7 secs, took 0.71 GiB\n" + READY + OOM,
     "EL106", ["--max-num-batched-tokens"], ["72 KiB"]),
    ("profile", OOM, "EL107", ["--max-num-batched-tokens"], ["sampler"]),
    (
        "S24", "RuntimeError: The NVIDIA driver on your system is too old (found version 12080).",
        "EL109", ["580.65.06", "0.19.1", "cu129"], ["CUDA 12.8", "CUDA 13"],
    ),
    ("S25", "ImportError: libcudart.so.13: cannot open shared object file: No such file",
     "EL110", ["same index"], ["different CUDA"]),
    ("capability", "CUDA error: no kernel image is available for execution on the device",
     "EL111", ["preflight"], ["compute capability"]),
    ("S16", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
     "EL112", ["upgrade"], ["not a matter of memory size"]),
    ("tp", "ValueError: Total number of attention heads (24) must be divisible by tensor parallel "
     "size (16).", "EL113", ["1, 2, 4, 8"], ["heads"]),
    ("flag", "vllm: error: unrecognized arguments: --swap-space 4", "EL114", ["launch --check"],
     ["releases"]),
    ("busy", "ValueError: Free memory on device cuda:0 (27.28/31.86 GiB) on startup is less than "
     "desired GPU memory utilization (0.9, 28.67 GiB).", "EL104",
     ["--gpu-memory-utilization 0.856"], ["whole GPU"]),
    ("graphs", "INFO [x] Estimated CUDA graph memory: 118.65 GiB total\nValueError: No available "
     "memory for the cache blocks.", "EL103",
     ["VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0"], ["118.65"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "more", "code", "fixes", "reasons"), CASES, ids=[c[0] for c in CASES]
)
def test_cause_and_fix(
    case: str, more: str, code: str, fixes: list[str], reasons: list[str], vllm_log: Log
) -> None:
    explanation = explain_log(vllm_log("Qwen/Qwen3.8-27B-FP8", version="0.28.0", more=more))
    assert not explanation.started
    errors = [finding for finding in explanation.findings if finding.severity == "error"]
    assert [finding.code for finding in errors] == [code]
    for word in fixes:
        assert word in errors[0].fix
    for word in reasons:
        assert word in errors[0].why


def test_out_of_memory_while_loading() -> None:
    text = "INFO 05-01 17:08:18 [model.py:1680] Using max model len 32768\n" + OOM
    (finding,) = (f for f in explain_log(text).findings if f.severity == "error")
    assert finding.code == "EL108"


def test_s02_raising_the_utilization_does_not_rescue(vllm_log: Log) -> None:
    """RTX PRO 6000, BF16 at 0.95: 556 blocks of 49 MiB; 1,024 would need 22 GiB more."""
    more = (
        "INFO [gpu_worker.py:1] Free memory on device (94.5/94.97 GiB) on startup.\n"
        "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (556)."
    )
    text = vllm_log(
        "Qwen/Qwen3.8-27B", version="0.27.1", args="{'gpu_memory_utilization': 0.95}", more=more,
        config="tensor_parallel_size=1",
    )  # fmt: skip
    (finding,) = (f for f in explain_log(text).findings if f.code == "EL101")
    assert "does not rescue" in finding.why
    assert finding.evidence["block_mib"] == "49"
    assert finding.fix == "--max-num-seqs 556"


def test_a_log_that_ends_well_has_no_error(vllm_log: Log) -> None:
    explanation = explain_log(vllm_log("Qwen/Qwen3-8B", more=READY))
    assert explanation.started


def test_budget_line_and_the_graph_estimate(vllm_log: Log) -> None:
    """GB300 report: 33.06 GiB set aside for graphs that take 8.57."""
    more = (
        "INFO CUDA graph pool memory: 8.57 GiB (actual), 33.06 GiB (estimated), "
        "difference: 24.49 GiB (285.9%).\n"
        "INFO Free memory on device (274.27/276.62 GiB) on startup. Desired GPU "
        "memory utilization is (0.92, 254.49 GiB). Actual usage is 171.25 GiB for consumed memory "
        "(weights + non-torch), 36.74 GiB for peak activation, and 8.57 GiB for CUDAGraph memory. "
        "Current kv cache memory in use is 46.5 GiB.\n"
    )
    explanation = explain_log(vllm_log("x/Unheard", gib=46.5, more=more))
    checks = {check.name: check for check in explanation.checks}
    assert checks["pool = requested - consumed - peak"].holds
    assert checks["requested = utilization x total"].holds
    graphs = checks["graph estimate is near the actual pool"]
    assert not graphs.holds
    assert "24.49 GiB" in graphs.says
