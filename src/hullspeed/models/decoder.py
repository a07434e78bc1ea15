"""Decoder: tokens to logits over paged keys and values, for any back end."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hullspeed.arch.model import ModelArch
from hullspeed.errors import EngineError
from hullspeed.kernels.base import Kernels, KvPages
from hullspeed.kernels.batch import Batch
from hullspeed.models.attention import Attention
from hullspeed.models.mlp import GatedMlp
from hullspeed.models.rope import rotary_table
from hullspeed.models.support import attention_of, check_supported, mlp_of
from hullspeed.models.weights import Weights


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: the norms' weights ``[H]``, the mixer and the MLP."""

    input_norm: Tensor
    mixer: Attention
    mlp_norm: Tensor
    mlp: GatedMlp


class Decoder:
    """A dense decoder (Llama, Mistral, Qwen2, Qwen3).

    Args:
        arch: What the model is.
        weights: Read once, tensor by tensor, and packed; may be closed afterwards.
        kernels: Back end.
        max_context_tokens: Highest position + 1 that will be asked for; the model's unless given.

    Raises:
        UnsupportedModelError: if the architecture is not computed here.
        CorruptFileError: if a weight is missing, unexpected or of the wrong shape.
    """

    def __init__(
        self,
        arch: ModelArch,
        weights: Weights,
        kernels: Kernels[Any],
        *,
        max_context_tokens: int | None = None,
    ) -> None:
        check_supported(arch)
        weights.check(arch)
        self.arch = arch
        self.max_context_tokens = max_context_tokens or arch.max_context_tokens
        self._kernels = kernels
        self._n_pages = 0
        self._page_tokens = 1
        self._pack(weights)

    def _pack(self, weights: Weights) -> None:
        arch, kernels = self.arch, self._kernels
        self._norm = weights.tensor(f"{arch.prefix}norm.weight")
        factors = weights.frequency_factors()
        rotaries = {
            dim: rotary_table(arch.rope, dim, self.max_context_tokens, factors)
            for dim in {attention_of(layer).rotary_dim for layer in arch.layers}
        }

        def packed(i: int) -> DecoderLayer:
            layer, below = arch.layers[i], f"{arch.prefix}layers.{i}."
            spec = attention_of(layer)
            mixer = Attention(spec, rotaries, arch.norm_eps, weights, below, kernels)
            mlp = GatedMlp(mlp_of(layer), weights, below, kernels)
            norms = [weights.tensor(f"{below}{name}.weight") for name in layer.norms]
            return DecoderLayer(norms[0], mixer, norms[1], mlp)

        # Packing runs without the GIL, one weight a thread.
        with ThreadPoolExecutor(kernels.threads) as pool:
            head = pool.submit(self._pack_head, weights)
            self._layers = list(pool.map(packed, range(len(arch.layers))))
            head.result()

    def _pack_head(self, weights: Weights) -> None:
        embedding = weights.tensor(f"{self.arch.prefix}embed_tokens.weight")
        self._embedding = self._kernels.table(embedding)
        if not self.arch.tied_embeddings:
            embedding = weights.tensor("lm_head.weight")
        self._head = self._kernels.linear(embedding)

    @property
    def n_pages(self) -> int:
        """Pages allocated."""
        return self._n_pages

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._page_tokens

    def allocate_kv(self, n_pages: int, page_tokens: int = 64) -> None:
        """Make room for ``n_pages`` pages in every layer (zeroed; earlier content is dropped).

        A page takes ``arch.kv_bytes_per_token("fp32") * page_tokens`` bytes over all layers.
        """
        for layer in self._layers:
            layer.mixer.allocate_kv(n_pages, page_tokens)
        self._n_pages, self._page_tokens = n_pages, page_tokens

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch, write its keys and values to its pages.

        Returns:
            Logits of ``batch.logits_rows``: float32 ``[R, vocab]``, a new tensor.

        Raises:
            EngineError: if the batch does not fit the pages, the context or the vocabulary.
        """
        batch.check(
            vocab=self.arch.vocab,
            n_pages=self._n_pages,
            page_tokens=self._page_tokens,
            context_tokens=self.max_context_tokens,
        )
        with torch.inference_mode():
            return self._forward(batch)

    def _forward(self, batch: Batch) -> Tensor:
        kernels, eps = self._kernels, self.arch.norm_eps
        plan = kernels.plan(batch)
        x = kernels.embed(self._embedding, plan.tokens)
        delta: Tensor | None = None
        for layer in self._layers:
            h = kernels.rms_norm(x, layer.input_norm, eps, delta)
            delta = layer.mixer(h, plan)
            if layer is self._layers[-1] and len(batch.logits_rows) < len(batch.tokens):
                # Nothing reads the other rows any more.
                x, delta = x[plan.logits_rows], delta[plan.logits_rows]
            h = kernels.rms_norm(x, layer.mlp_norm, eps, delta)
            delta = layer.mlp(h)
        return self._head(kernels.rms_norm(x, self._norm, eps, delta))

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy page ``sources[i]`` to ``targets[i]`` in every layer, in order.

        Raises:
            EngineError: if a page does not exist or the two differ in length.
        """
        pages = [*sources, *targets]
        if len(sources) != len(targets) or any(not 0 <= p < self._n_pages for p in pages):
            raise EngineError(
                "cannot copy pages that do not exist",
                seen=(list(sources), list(targets)),
                fix="this is a fault of the engine; report it",
            )
        if pages:
            self._kernels.copy_pages(self._kv(), sources, targets)

    def _kv(self) -> list[KvPages]:
        return [layer.mixer.kv for layer in self._layers]
