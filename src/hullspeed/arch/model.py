"""ModelArch: what a model is, in numbers. No torch, no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from hullspeed.arch.mixers import Mixer
from hullspeed.arch.mlps import Mlp
from hullspeed.arch.quant import UNQUANTIZED, WeightFormat
from hullspeed.arch.tensors import Role, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        scaling: The checkpoint's own scaling parameters (``rope_type`` and its fields), if any.
    """

    theta: float
    scaling: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: a mixer, an MLP and the norms around them."""

    mixer: Mixer
    mlp: Mlp
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")

    def tensors(self, hidden: int) -> Iterator[TensorSpec]:
        """The weights of the layer, named below it."""
        yield from self.mixer.tensors(hidden)
        yield from self.mlp.tensors(hidden)
        for name in self.norms:
            yield TensorSpec(f"{name}.weight", (hidden,), Role.NORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Weights beside the decoder: a vision tower, a multi-token-prediction layer.

    Attributes:
        layers: Decoder layers among them that keep KV or state when the part is used (MTP).
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    layers: tuple[Layer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArch:
    """A decoder-only language model.

    Attributes:
        family: Key of ``families``: ``"llama"``, ``"qwen3"``, ``"qwen3_5"``, ...
        prefix: Name of the decoder in the checkpoint, ``"model."`` unless nested.
        embedding_name: Name of the embedding below the prefix.
        final_norm_name: Name of the last norm below the prefix.
        head_name: Name of the output head.
        dtype: The 16- or 32-bit type of unquantized weights.
        quant: Name of the weight format (``"none"``, ``"fp8_block"``, ``"awq"``, ``"gguf"``, ...).
        weight_format: The format in full: which weights it holds how; see ``quant``.
        options: Family particulars that the decoder needs (embedding scale, soft caps, ...).
    """

    family: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    tied_embeddings: bool
    norm_eps: float
    rope: Rope
    max_context_tokens: int
    dtype: str = "bf16"
    quant: str = "none"
    weight_format: WeightFormat = UNQUANTIZED
    prefix: str = "model."
    embedding_name: str = "embed_tokens"
    final_norm_name: str = "norm"
    head_name: str = "lm_head"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    extras: tuple[Extra, ...] = ()
    options: dict[str, object] = field(default_factory=dict)

    def tensors(self, *, extras: bool = True) -> Iterator[TensorSpec]:
        """Every weight of the checkpoint with its full name."""
        embedding, *rest = self.outer_tensors()
        yield embedding
        for i, layer in enumerate(self.layers):
            for tensor in layer.tensors(self.hidden):
                yield tensor.under(f"{self.prefix}layers.{i}.")
        yield from rest
        if extras:
            for extra in self.extras:
                yield from extra.tensors

    def outer_tensors(self) -> Iterator[TensorSpec]:
        """The embedding, the last norm and, unless tied, the output head."""
        embed = (self.vocab, self.hidden)
        yield TensorSpec(f"{self.prefix}{self.embedding_name}.weight", embed, Role.EMBEDDING)
        norm = f"{self.prefix}{self.final_norm_name}.weight"
        yield TensorSpec(norm, (self.hidden,), Role.NORM)
        if not self.tied_embeddings:
            yield TensorSpec(f"{self.head_name}.weight", embed, Role.HEAD)

    def param_count(self, *, extras: bool = True) -> int:
        """Number of parameters, exact to the tensor."""
        # Layers repeat, and with experts each has thousands of tensors: count each kind once.
        in_layers = sum(
            times * sum(tensor.elements for tensor in layer.tensors(self.hidden))
            for layer, times in Counter(self.layers).items()
        )
        beside = (t for extra in self.extras for t in extra.tensors) if extras else ()
        return in_layers + sum(t.elements for t in chain(self.outer_tensors(), beside))

    def kv_bytes(self, context_tokens: int, dtype: str) -> int:
        """Bytes of keys and values of one sequence of ``context_tokens`` tokens."""
        return sum(layer.mixer.kv_bytes(context_tokens, dtype) for layer in self.layers)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes that one more token adds in the layers that keep every token; a sliding window
        that is full adds none.
        """
        longest = self.max_context_tokens
        return self.kv_bytes(longest + 1, dtype) - self.kv_bytes(longest, dtype)

    def state_bytes(self, state_dtype: str, conv_dtype: str, draft_tokens: int = 0) -> int:
        """Bytes of recurrent state of one sequence, at any length."""
        return sum(
            layer.mixer.state_bytes(state_dtype, conv_dtype, draft_tokens) for layer in self.layers
        )

    def params_per_token(self) -> int:
        """Parameters that multiply each token: linears, chosen experts and the output head; the
        embedding is a look-up.
        """
        return sum(self._layer_params(layer) for layer in self.layers) + self.vocab * self.hidden

    def flops(self, n_tokens: int, context_tokens: int, n_logits: int | None = None) -> int:
        """FLOPs of ``n_tokens`` new tokens after ``context_tokens``; ``n_logits`` of them (all
        unless given) go through the output head.
        """
        n_logits = n_tokens if n_logits is None else n_logits
        body = sum(self._layer_params(layer) for layer in self.layers)
        mixing = sum(layer.mixer.flops(n_tokens, context_tokens) for layer in self.layers)
        return 2 * body * n_tokens + 2 * self.vocab * self.hidden * n_logits + mixing

    def _layer_params(self, layer: Layer) -> int:
        mixing = (t for t in layer.mixer.tensors(self.hidden) if t.role in (Role.LINEAR, Role.GATE))
        return sum(t.elements for t in mixing) + layer.mlp.params_per_token(self.hidden)
