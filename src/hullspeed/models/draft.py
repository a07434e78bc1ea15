"""DraftHead: a checkpoint's multi-token-prediction layer, which guesses the token after the next.

Source: ``Qwen3NextMultiTokenPredictor`` in vLLM and the MTP graph of ``qwen35`` in llama.cpp: the
norms of the next token's embedding and of the hidden state, side by side in that order, a
projection, one decoder layer, a norm, and the decoder's own embedding and output head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hullspeed.arch.model import Extra, ModelArch
from hullspeed.errors import EngineError, UnsupportedModelError
from hullspeed.kernels.base import Kernels, KvDtype, KvPages, Linear, RotaryTable
from hullspeed.kernels.batch import Batch
from hullspeed.models.attention import PAGE_TOKENS, Attention
from hullspeed.models.layer import packed_layer
from hullspeed.models.particulars import norm_weight
from hullspeed.models.projection import stacked
from hullspeed.models.rope import Rotation
from hullspeed.models.weights import Weights


class Draft(NamedTuple):
    """What a draft head gives for ``R`` rows.

    Attributes:
        logits: Of the token after the next, float32 ``[R, vocab]``.
        hidden: The row's hidden state for a further guess, float32 ``[R, H]``: give it, with the
            guessed token, at the next position.
    """

    logits: Tensor
    hidden: Tensor


class DraftHead:
    """The layer, with pages of keys and values that lie beside the decoder's.

    Position ``i`` takes the decoder's hidden state there and token ``i + 1``. Its keys and values
    depend on that token: where one sequence continues the pages of another from position ``n``,
    the draft's entry at ``n - 1`` is the other's. Guesses may suffer by it, never what is
    generated.

    Args:
        arch: A model with an MTP layer; see :func:`draft_extra`.
        rotaries: Tables by how heads are rotated.
        table: The decoder's embedding.
        head: The decoder's output head.
        max_context_tokens: Highest position + 1 that will be asked for.

    Raises:
        UnsupportedModelError: if the model has no such layer.
        CorruptFileError: if a weight is missing or cannot be read.
    """

    def __init__(
        self,
        arch: ModelArch,
        weights: Weights,
        kernels: Kernels[Any],
        rotaries: Mapping[Rotation, RotaryTable],
        table: Tensor,
        head: Linear,
        max_context_tokens: int,
    ) -> None:
        (layer,) = draft_extra(arch).layers
        self._kernels, self._eps = kernels, arch.norm_eps
        self._table, self._head = table, head
        self._hidden = arch.hidden
        self._projection = kernels.linear(stacked(weights, ["mtp.fc.weight"], kernels))
        self._embedding_norm, self._hidden_norm, self._norm = (
            norm_weight(weights, arch, f"mtp.{name}.weight")
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        )
        self._layer = packed_layer(layer, arch, rotaries, weights, "mtp.layers.0.", kernels)
        if not isinstance(self._layer.mixer, Attention):
            raise UnsupportedModelError(
                "drafts need a layer of attention", seen=layer.mixer.kind, fix="load without drafts"
            )
        self._attention = self._layer.mixer
        self._bounds = {"vocab": arch.vocab, "context_tokens": max_context_tokens}
        self.allocate_kv(0, PAGE_TOKENS)

    @property
    def kv(self) -> KvPages:
        """Keys and values of the layer."""
        return self._attention.kv

    def allocate_kv(self, n_pages: int, page_tokens: int, dtype: KvDtype = "fp32") -> None:
        """Take fresh pages, of the decoder's number, size and format."""
        self._attention.allocate_kv(n_pages, page_tokens, dtype)
        self._bounds |= {"n_pages": n_pages, "page_tokens": page_tokens}

    def forward(self, batch: Batch, hidden: Tensor) -> Draft:
        """Guesses of ``batch.logits_rows``; writes keys and values of all rows.

        Args:
            batch: As :meth:`Decoder.hidden` took it, but each token is the one after.
            hidden: The decoder's hidden state of each row, or an earlier draft's: ``[T, H]``.

        Raises:
            EngineError: if ``hidden`` is of another size, or the batch out of bounds.
        """
        batch.check(**self._bounds)
        if hidden.shape != (len(batch.tokens), self._hidden):
            raise EngineError(
                "a draft needs the hidden state of every token",
                seen=tuple(hidden.shape),
                fix="this is a fault of the engine; report it",
            )
        kernels, eps = self._kernels, self._eps
        with torch.inference_mode():
            plan = kernels.plan(batch)
            embedded = kernels.embed(self._table, plan.tokens)
            normed = (
                kernels.rms_norm(embedded, self._embedding_norm, eps, None),
                kernels.rms_norm(hidden.contiguous(), self._hidden_norm, eps, None),
            )
            x = self._projection(torch.cat(normed, dim=-1))
            x, delta = self._layer(x, None, plan, plan.logits_rows)
            out = kernels.rms_norm(x, self._norm, eps, delta)
            return Draft(self._head(out), out)


def draft_extra(arch: ModelArch) -> Extra:
    """The model's MTP layer.

    Raises:
        UnsupportedModelError: if it has none, or more than one.
    """
    found = next((extra for extra in arch.extras if extra.name == "mtp"), None)
    if found is None or len(found.layers) != 1:
        raise UnsupportedModelError(
            "drafts need a model with one multi-token-prediction layer",
            seen=f"{arch.family} with {len(found.layers) if found else 0}",
            fix="load it without drafts",
        )
    return found
