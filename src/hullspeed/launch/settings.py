"""Settings: what is to be launched, in words that every engine's own flags are derived from."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu
from hullspeed.launch.flagtable import ENGINES, FlagTable
from hullspeed.launch.versions import newest

_NAME = re.compile(r"^[A-Za-z0-9/.~][\w./:@+~-]*$")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A launch. ``None`` leaves a choice to the engine.

    Attributes:
        model: Hub name, or a path on the machine that serves.
        version: Engine version; the newest whose flags are known when ``None``.
        gpu: Name in the hardware catalogue; needed where a scheduler must be asked for one.
        nodes: Machines that one copy of the model spans.
        replicas: Independent copies behind one address.
        context_tokens: Longest request, prompt and output.
        step_tokens: Tokens of one engine step (chunk of prefill).
        memory_share: The engine's own knob; three meanings, see ``hullspeed.memory``.
        kv_cache_bytes: Pool per GPU in place of a share, where the engine takes one (vLLM).
        state_dtype: Of a hybrid model's recurrent state.
        draft_tokens: Speculative tokens per step from the model's own MTP layer.
        text_only: Leave a vision tower out.
        extra: Further flags, checked against the engine's table.
    """

    model: str
    engine: str = "vllm"
    version: str | None = None
    revision: str | None = None
    served_name: str | None = None
    gpu: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    nodes: int = 1
    replicas: int = 1
    context_tokens: int | None = None
    max_num_seqs: int | None = None
    step_tokens: int | None = None
    memory_share: float | None = None
    kv_cache_bytes: int | None = None
    kv_dtype: str | None = None
    state_dtype: str | None = None
    prefix_caching: bool | None = None
    draft_tokens: int = 0
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    text_only: bool = False
    eager: bool = False
    continuous_batching: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    extra: tuple[str, ...] = ()

    @property
    def engine_version(self) -> str:
        """The version asked for, or the newest whose flags are known."""
        return self.version or newest(self.engine)

    @property
    def gpus(self) -> int:
        """GPUs of one copy of the model, on all its nodes."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def gpus_per_node(self) -> int:
        """GPUs that one machine gives."""
        return self.gpus // self.nodes

    @property
    def slug(self) -> str:
        """A name for services and files: lower case, dashes, at most 50 characters."""
        name = (self.served_name or self.model).rstrip("/").rpartition("/")[2].lower()
        return re.sub(r"[^a-z0-9]+", "-", name).strip("-")[:50].strip("-") or "model"

    def with_(self, **changes: Any) -> Settings:
        """A copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def checked(self) -> Settings:
        """These settings, after refusing what cannot be.

        Raises:
            UsageError: for an unknown engine, version or GPU, a number below its least, or
                settings that contradict each other.
        """
        if self.engine not in ENGINES:
            raise UsageError(
                "this engine cannot be launched", seen=self.engine, fix=f"use {', '.join(ENGINES)}"
            )
        FlagTable(self.engine, self.engine_version)  # refuses a version outside the table
        if not _NAME.match(self.model):
            raise UsageError(
                "not a model name or path", seen=self.model, fix="write ORG/NAME or a path"
            )
        if self.gpu is not None:
            find_gpu(self.gpu)
        self._numbers()
        self._contradictions()
        return self

    def _numbers(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "nodes", "replicas", "context_tokens",
                     "max_num_seqs", "step_tokens", "kv_cache_bytes"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                label = name.replace("_", " ")
                raise UsageError(f"{label} must be 1 or more", seen=value, fix=f"raise {label}")
        if self.draft_tokens < 0:
            raise UsageError("draft tokens cannot be negative", seen=self.draft_tokens)
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise UsageError(
                "a memory share lies above 0 and at most 1", seen=self.memory_share,
                fix="e.g. 0.92 for 92 %",
            )  # fmt: skip
        if not 1 <= self.port <= 65535:
            raise UsageError("port out of range", seen=self.port, fix="use 1 to 65535")

    def _contradictions(self) -> None:
        if self.gpus % self.nodes:
            raise UsageError(
                f"{self.gpus} GPUs do not divide over {self.nodes} nodes", seen=self.nodes,
                fix="let tensor parallel x pipeline parallel be a multiple of the nodes",
            )  # fmt: skip
        seqs, step = self.max_num_seqs, self.step_tokens
        if seqs is not None and step is not None and step < seqs:
            raise UsageError(
                f"a step of {step} tokens cannot hold one token of each of {seqs} sequences",
                seen=step, fix=f"give a step of {seqs} tokens or more",
            )  # fmt: skip
        if self.memory_share is not None and self.kv_cache_bytes is not None:
            raise UsageError(
                "a memory share and a pool in bytes contradict each other", fix="give one of them"
            )
        if any("trust" in word and "remote" in word for word in self.extra):
            raise UsageError(
                "code from a model's repository is not run", seen=" ".join(self.extra),
                fix="use a model of a family that the engine knows by itself",
            )  # fmt: skip
        if self.engine == "transformers" and (self.gpus > 1 or self.nodes > 1):
            raise UsageError(
                "transformers serve runs on one GPU", seen=self.gpus,
                fix="use vllm or sglang for more",
            )  # fmt: skip
