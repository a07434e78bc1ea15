"""Decoder: tokens to logits over paged keys and values, for any back end."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hullspeed.arch.mixers import FullAttention
from hullspeed.arch.model import ModelArch
from hullspeed.errors import EngineError
from hullspeed.kernels.base import Kernels, KvDtype
from hullspeed.kernels.batch import Batch
from hullspeed.kernels.blocks import BlockWeight
from hullspeed.models.attention import Attention
from hullspeed.models.delta_net import DeltaNet
from hullspeed.models.draft import DraftHead, draft_extra
from hullspeed.models.layer import DecoderLayer, packed_layer
from hullspeed.models.particulars import norm_weight, option
from hullspeed.models.projection import stacked
from hullspeed.models.rope import Rotation, rotary_table
from hullspeed.models.stored_states import StoredDtype, StoredStates
from hullspeed.models.support import check_supported
from hullspeed.models.weights import Weights


class Decoder:
    """A decoder of any supported family: attention or gated delta rule, dense or with experts.

    Args:
        arch: What the model is.
        weights: Read once, tensor by tensor, and packed; may be closed afterwards.
        kernels: Back end.
        max_context_tokens: Highest position + 1 that will be asked for; the model's unless given.
        draft: Load the multi-token-prediction layer too.

    Attributes:
        draft: The draft head, if asked for; its pages are allocated and copied with the decoder's.

    Raises:
        UnsupportedModelError: if the architecture is not computed here, or has no such layer.
        CorruptFileError: if a weight is missing, unexpected or of the wrong shape.
    """

    def __init__(
        self,
        arch: ModelArch,
        weights: Weights,
        kernels: Kernels[Any],
        *,
        max_context_tokens: int | None = None,
        draft: bool = False,
    ) -> None:
        check_supported(arch)
        weights.check(arch)
        self.arch = arch
        self.max_context_tokens = max_context_tokens or arch.max_context_tokens
        self._kernels = kernels
        self._n_pages = 0
        self._page_tokens = 1
        self._n_state_slots = self._n_stored = self._n_window_pages = 0
        self.draft: DraftHead | None = None
        self._pack(weights, draft)

    def _pack(self, weights: Weights, draft: bool) -> None:
        arch, kernels = self.arch, self._kernels
        final_norm = f"{arch.prefix}{arch.final_norm_name}.weight"
        self._norm = norm_weight(weights, arch, final_norm)
        factors = weights.frequency_factors()
        drafting = draft_extra(arch).layers if draft else ()
        rotations = {
            Rotation.of(layer.mixer, arch)
            for layer in (*arch.layers, *drafting)
            if isinstance(layer.mixer, FullAttention)
        }
        rotaries = {
            r: rotary_table(r.rope(arch), r.dim, self.max_context_tokens, factors)
            for r in rotations
        }

        def packed(i: int) -> DecoderLayer:
            below = f"{arch.prefix}layers.{i}."
            return packed_layer(arch.layers[i], arch, rotaries, weights, below, kernels)

        # Packing runs without the GIL, one weight a thread.
        with ThreadPoolExecutor(kernels.threads) as pool:
            head = pool.submit(self._pack_head, weights)
            self._layers: list[DecoderLayer] = list(pool.map(packed, range(len(arch.layers))))
            head.result()
        if draft:
            self.draft = DraftHead(
                arch, weights, kernels, rotaries, self._embedding, self._head,
                self.max_context_tokens,
            )  # fmt: skip

    def _pack_head(self, weights: Weights) -> None:
        arch = self.arch
        embedding = weights.tensor(f"{arch.prefix}{arch.embedding_name}.weight")
        self._embedding = self._kernels.table(embedding)
        self._embedding_scale = option(arch, "embedding_scale", 1.0)
        if arch.dtype == "bf16":
            # The reference keeps the factor in the type of the embedding.
            self._embedding_scale = float(torch.tensor(self._embedding_scale).bfloat16())
        head: Tensor | BlockWeight = embedding
        if not arch.tied_embeddings or self._kernels.takes_blocks:
            tied = f"{arch.prefix}{arch.embedding_name}"
            name = tied if arch.tied_embeddings else arch.head_name
            head = stacked(weights, [f"{name}.weight"], self._kernels)
        self._head = self._kernels.linear(head)

    @property
    def n_pages(self) -> int:
        """Pages allocated."""
        return self._n_pages

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._page_tokens

    @property
    def n_window_pages(self) -> int:
        """Pages allocated to the layers with a window alone; 0: they share the others' numbers."""
        return self._n_window_pages

    def allocate_kv(
        self,
        n_pages: int,
        page_tokens: int = 64,
        dtype: KvDtype = "fp32",
        *,
        n_window_pages: int = 0,
    ) -> None:
        """Make room for ``n_pages`` pages in every layer (zeroed; earlier content is dropped), or
        for ``n_window_pages`` in those with a window, if that is not 0.

        A page takes 2 x kv_heads x head_dim x page_tokens numbers of ``dtype`` in each attention
        layer, and 2 x kv_heads x page_tokens float32 scales if it is int8 or fp8.
        """
        for mixer in self._attention():
            windowed = mixer.window_tokens and n_window_pages
            mixer.allocate_kv(n_window_pages if windowed else n_pages, page_tokens, dtype)
        self._n_window_pages = n_window_pages
        if self.draft is not None:
            self.draft.allocate_kv(n_pages, page_tokens, dtype)
        self._n_pages, self._page_tokens = n_pages, page_tokens

    def allocate_states(
        self, n_slots: int, n_stored: int = 0, stored_dtype: StoredDtype = "int8"
    ) -> None:
        """Make room for ``n_slots`` recurrent states (zeroed; earlier content is dropped); nothing
        happens in a model without. ``n_stored`` slots after them keep cached states in
        ``stored_dtype``: they are written by :meth:`copy_states` and read by spans.
        """
        for mixer in self._recurrent():
            mixer.allocate_states(n_slots, n_stored, stored_dtype)
        self._n_state_slots, self._n_stored = n_slots, n_stored

    @property
    def n_state_slots(self) -> int:
        """State slots allocated."""
        return self._n_state_slots

    @property
    def is_recurrent(self) -> bool:
        """Whether sequences have a recurrent state."""
        return any(isinstance(layer.mixer, DeltaNet) for layer in self._layers)

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch, write its keys and values to its pages.

        Returns:
            Logits of ``batch.logits_rows``: float32 ``[R, vocab]``, a new tensor.

        Raises:
            EngineError: if the batch does not fit the pages, the context or the vocabulary.
        """
        with torch.inference_mode():
            return self._head(self._hidden(batch, cut=True))

    def hidden(self, batch: Batch) -> Tensor:
        """As :meth:`forward`, but the last hidden state of every token: what :meth:`logits` and a
        draft head take. float32 ``[T, H]``, a new tensor.
        """
        with torch.inference_mode():
            return self._hidden(batch, cut=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states ``[R, H]``: float32 ``[R, vocab]``."""
        with torch.inference_mode():
            return self._head(hidden)

    def _hidden(self, batch: Batch, *, cut: bool) -> Tensor:
        """Of ``batch.logits_rows`` if ``cut``, else of all."""
        if self._n_stored:
            batch = self._with_loaded(batch)
        batch.check(
            vocab=self.arch.vocab,
            n_pages=self._n_pages,
            page_tokens=self._page_tokens,
            context_tokens=self.max_context_tokens,
            n_state_slots=self._n_state_slots if self.is_recurrent else None,
            n_window_pages=self._n_window_pages,
            window_tokens=max((mixer.window_tokens for mixer in self._attention()), default=0),
        )
        kernels, eps = self._kernels, self.arch.norm_eps
        plan = kernels.plan(batch)
        x = kernels.embed(self._embedding, plan.tokens)
        if self._embedding_scale != 1:
            x *= self._embedding_scale
        delta: Tensor | None = None
        for layer in self._layers:
            # Behind the last mixer nothing reads the other rows any more.
            rows = plan.logits_rows if cut and layer is self._layers[-1] else None
            x, delta = layer(x, delta, plan, rows)
        return kernels.rms_norm(x, self._norm, eps, delta)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy page ``sources[i]`` to ``targets[i]`` in every layer that has it, in order.

        Raises:
            EngineError: if a page does not exist or the two differ in length.
        """
        if _checked(sources, targets, self._n_pages, "pages"):
            apart = self._n_window_pages > 0
            kv = [m.kv for m in self._attention() if not (apart and m.window_tokens)]
            if self.draft is not None:
                kv.append(self.draft.kv)
            self._kernels.copy_pages(kv, sources, targets)

    def copy_window_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As :meth:`copy_pages`, among the pages that layers with a window have for themselves.

        Raises:
            EngineError: if a page does not exist or the two differ in length.
        """
        if _checked(sources, targets, self._n_window_pages, "window pages"):
            kv = [mixer.kv for mixer in self._attention() if mixer.window_tokens]
            self._kernels.copy_pages(kv, sources, targets)

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy state ``sources[i]`` to slot ``targets[i]`` in every layer, in order.

        Raises:
            EngineError: if a slot does not exist or the two differ in length.
        """
        n_live = self._n_state_slots
        _checked(sources, sources, n_live, "states")
        if not _checked(sources, targets, n_live + self._n_stored, "states"):
            return
        for source, target in zip(sources, targets, strict=True):
            if target < n_live:
                states = [mixer.states for mixer in self._recurrent()]
                self._kernels.copy_states(states, [source], [target])
            else:
                for stored in self._stored():
                    stored.store(source, target - n_live)

    def _with_loaded(self, batch: Batch) -> Batch:
        """The batch with stored states unpacked to where their spans write."""
        n_live, read, write = self._n_state_slots, batch.read_slots, batch.write_slots
        _checked(
            read[read != -1].tolist(), read[read != -1].tolist(), n_live + self._n_stored, "states"
        )
        spans = np.flatnonzero(read >= n_live).tolist()
        if not spans:
            return batch
        targets = write[spans].tolist()
        _checked(targets, targets, n_live, "states")
        for span, target in zip(spans, targets, strict=True):
            for stored in self._stored():
                stored.load(int(read[span]) - n_live, target)
        return replace(batch, read_slots=np.where(read >= n_live, write, read).astype(np.int32))

    def _stored(self) -> list[StoredStates]:
        return [mixer.stored for mixer in self._recurrent() if mixer.stored is not None]

    def _attention(self) -> list[Attention]:
        return [layer.mixer for layer in self._layers if isinstance(layer.mixer, Attention)]

    def _recurrent(self) -> list[DeltaNet]:
        return [layer.mixer for layer in self._layers if isinstance(layer.mixer, DeltaNet)]


def _checked(sources: Sequence[int], targets: Sequence[int], n: int, what: str) -> bool:
    """Whether there is something to copy."""
    if len(sources) != len(targets) or any(not 0 <= i < n for i in (*sources, *targets)):
        raise EngineError(
            f"cannot copy {what} that do not exist",
            seen=(list(sources), list(targets)),
            fix="this is a fault of the engine; report it",
        )
    return bool(sources)
