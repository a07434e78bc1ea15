"""What the API process and the engine process say to each other (msgspec, never pickle).

Frames on the socketpair: 4-byte little-endian length, then one msgpack-encoded message. A decoder
rejects unknown tags, so nothing but these types can arrive.
"""

from __future__ import annotations

import msgspec

from hullspeed.core.sampling import SamplingParams

MAX_FRAME_BYTES = 64 * 1024 * 1024


class Submit(msgspec.Struct, tag="submit", frozen=True, kw_only=True):
    """Run one prompt once. ``id`` is chosen by the API process and unique for its life."""

    id: int
    prompt: list[int]
    sampling: SamplingParams
    priority: int = 0
    salt: bytes = b""
    checkpoints: tuple[int, ...] = ()


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Stop these requests; their pages are free within one step. Unknown ids are ignored."""

    ids: list[int]


class ClearCache(msgspec.Struct, tag="clear_cache", frozen=True):
    """Forget all cached prefixes that no running request uses."""


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End the process now; the API process has drained it already."""


ToEngine = Submit | Cancel | ClearCache | Shutdown


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded, for ``/v1/models``, limits and the report.

    Attributes:
        eos_token_ids: Union of every end token the model's files name.
        kv_bytes_per_token: In the layers that see the whole context, where others have pages of
            their own.
        n_pages: Pages of these layers.
        n_state_slots: Recurrent states that fit, running and cached; 0 for models without.
        n_window_pages: Pages that layers with a window have for themselves; 0 for models without.
        window_tokens: What these layers see.
        skipped: Parts of the checkpoint that were not loaded.
    """

    name: str
    family: str
    vocab: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    param_count: int
    weight_bytes: int
    kv_bytes_per_token: int
    page_tokens: int
    n_pages: int
    max_running: int
    step_tokens: int
    threads: int
    kernels: str
    weight_dtype: str
    n_state_slots: int = 0
    state_bytes: int = 0
    n_window_pages: int = 0
    window_page_bytes: int = 0
    window_tokens: int = 0
    skipped: tuple[str, ...] = ()

    @property
    def keeps_ends(self) -> bool:
        """Whether prefixes are found only where an end state was saved: recurrent states, or the
        last window. Then places of a prompt are worth naming.
        """
        return self.n_state_slots > 0 or self.n_window_pages > 0


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Progress of start-up; ``share`` in 0..1."""

    stage: str
    share: float


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine takes requests from now on."""

    info: ModelInfo
    load_s: float


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New tokens of one request.

    Attributes:
        logprobs: One per token when asked for: (logprob, ((token, logprob), ...)).
        cached_tokens: Prompt tokens found in the cache; sent with the first token.
        finish: Why the request ended ("stop", "length", "cancelled", "error"), on its last delta.
        error: What went wrong, when ``finish`` is ``"error"``.
        error_type: Its class in ``errors``: ``"RequestError"`` and below are the client's fault.
        queue_s: Seconds from arrival to first scheduling; sent with the first token.
    """

    id: int
    tokens: list[int]
    logprobs: list[tuple[float, tuple[tuple[int, float], ...]]] | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    error: str | None = None
    queue_s: float | None = None
    error_type: str | None = None


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """Everything that one step produced."""

    deltas: list[Delta]


class EngineStats(msgspec.Struct, tag="stats", frozen=True, kw_only=True):
    """Heartbeat: sent at least every 250 ms, also while idle, and after each busy second.

    ``*_total`` count since start. Tokens unless the name says otherwise. ``window_pages_*`` are of
    the layers with a window, where they have pages of their own.
    """

    steps_total: int
    running: int
    waiting: int
    pages_free: int
    pages_cached: int
    pages_used: int
    pages_total: int
    preemptions_total: int
    prefix_queried_total: int
    prefix_hit_total: int
    prompt_tokens_total: int
    generated_tokens_total: int
    step_tokens_last: int
    step_s_last: float
    window_pages_used: int = 0
    window_pages_total: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of pages that running sequences hold, 0 to 1: of the kind that is scarcer."""
        windows = self.window_pages_used / max(1, self.window_pages_total)
        return max(self.pages_used / max(1, self.pages_total), windows)


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot go on; the process ends after this. ``exit_code`` as in ``errors``."""

    error: str
    exit_code: int


FromEngine = Loading | Ready | Outputs | EngineStats | Failed
