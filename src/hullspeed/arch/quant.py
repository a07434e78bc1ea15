"""Weight formats: which weights a checkpoint quantizes, how it stores them, and their exact bytes.

A ``WeightFormat`` is read from ``quantization_config`` (or ModelOpt's ``hf_quant_config.json``)
by ``quant_config.py``; ``schemes.py`` says what one quantized matrix is made of. What a format
leaves alone stays in the model's own type.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from hullspeed.arch.schemes import PLAIN, Part, Scheme, parts_of
from hullspeed.arch.tensors import Role, TensorSpec

if TYPE_CHECKING:
    from hullspeed.arch.model import Layer, ModelArch

LINEARS = frozenset({Role.LINEAR, Role.EXPERT})
EVERY_LINEAR = frozenset({Role.LINEAR, Role.EXPERT, Role.GATE, Role.HEAD, Role.VISION})


@dataclass(frozen=True)
class Modules:
    """A list of module names as quantization configs write them.

    A plain entry means that module and all below it, and also every module of that last name;
    ``re:`` entries are regular expressions matched from the start; ``*`` is a wildcard.
    """

    entries: tuple[str, ...] = ()

    @cached_property
    def _plain(self) -> frozenset[str]:
        return frozenset(e for e in self.entries if not e.startswith("re:") and "*" not in e)

    @cached_property
    def _patterns(self) -> tuple[Callable[[str], object], ...]:
        regexes = [e[3:] for e in self.entries if e.startswith("re:")]
        globs = [e for e in self.entries if not e.startswith("re:") and "*" in e]
        # A glob names a module; what lies below it goes with it.
        sources = regexes + [translate(e).removesuffix(r"\Z") + r"(\..*)?\Z" for e in globs]
        return tuple(re.compile(source).match for source in sources)

    def __contains__(self, module: object) -> bool:
        if not isinstance(module, str):
            return False
        if any(match(module) for match in self._patterns):
            return True
        if not self._plain:
            return False
        words = module.split(".")
        return any(
            ".".join(words[start:end]) in self._plain
            for start in range(len(words))
            for end in range(len(words), start, -1)
        )


@dataclass(frozen=True)
class WeightFormat:
    """How a checkpoint stores its weights.

    Attributes:
        name: ``"none"``, ``"fp8_block"``, ``"awq"``, ``"gptq"``, ``"nvfp4"``, ``"mxfp4"``,
            ``"gguf"``, ``"mixed"``, ...
        scheme: Of the weights with a role in ``roles`` outside ``ignore``.
        ignore: Modules left in the model's own type.
        layers: Modules with a scheme of their own, in place of ``scheme`` (mixed precision).
        fp32_names: Last words of names that stay in fp32 whatever the model's type.
        kv_dtype: KV cache format that the checkpoint declares, if any.
        kv_scales: Where each layer keeps a scale for keys and one for values: ``"modelopt"``
            (beside ``k_proj``'s weight), ``"compressed"`` (in the attention module), or nowhere.
        stored_bytes: Bytes by tensor name as read from the files' headers; wins over all rules.
        stored_types: GGUF type by tensor name, of a model in that format.
    """

    name: str = "none"
    scheme: Scheme = PLAIN
    roles: frozenset[Role] = frozenset()
    ignore: Modules = Modules()
    layers: Mapping[str, Scheme] = field(default_factory=dict)
    fp32_names: tuple[str, ...] = ()
    kv_dtype: str | None = None
    kv_scales: Literal["", "modelopt", "compressed"] = ""
    stored_bytes: Mapping[str, int] | None = None
    stored_types: Mapping[str, str] | None = None

    def scheme_of(self, spec: TensorSpec) -> Scheme:
        """How one weight is stored."""
        if self.name == "none" or not _is_matrix(spec):
            return PLAIN
        module = spec.name.removesuffix(".weight")
        if self.layers:
            return next((self.layers[m] for m in _upwards(module) if m in self.layers), PLAIN)
        if spec.role not in self.roles or module in self.ignore:
            return PLAIN
        return self.scheme

    def tells_apart(self, what: str) -> bool:
        """Whether rules or known sizes name single ``layers`` or ``experts`` by their number."""
        if self.stored_bytes is not None:
            return True
        names = (*self.ignore.entries, *self.layers)
        return any(re.search(rf"{what}\\?\.[\d(\[]", name) for name in names)

    def parts(self, spec: TensorSpec, dtype: str) -> Iterator[Part]:
        """The tensors that the checkpoint stores for one weight, by their own names."""
        scheme = self.scheme_of(spec)
        if scheme is PLAIN:
            own = "fp32" if spec.name.rpartition(".")[2] in self.fp32_names else dtype
            yield Part(spec.name, own, spec.shape)
        else:
            yield from parts_of(scheme, spec, dtype)
        if self.kv_scales and spec.name.endswith((".k_proj.weight", ".v_proj.weight")):
            module, letter = spec.name.removesuffix(".weight"), spec.name[-len("k_proj.weight")]
            if self.kv_scales == "modelopt":
                yield Part(f"{module}.{letter}_scale", "fp32", ())
            else:
                yield Part(f"{module.rpartition('.')[0]}.{letter}_scale", dtype, (1,))


def _upwards(module: str) -> Iterator[str]:
    """The module, its parent, and so on."""
    while module:
        yield module
        module = module.rpartition(".")[0]


UNQUANTIZED = WeightFormat()


def stored_parts(arch: ModelArch, *, extras: bool = True) -> Iterator[tuple[TensorSpec, Part]]:
    """Every tensor of the checkpoint beside the weight it belongs to."""
    for spec in arch.tensors(extras=extras):
        for part in arch.weight_format.parts(spec, arch.dtype):
            yield spec, part


def weight_bytes(arch: ModelArch, *, extras: bool = True) -> int:
    """Bytes of all weights as the checkpoint stores them, scales included, headers not.

    Args:
        arch: The model.
        extras: Count the vision tower and the multi-token-prediction layer too.
    """
    return sum(weight_breakdown(arch, extras=extras).values())


def weight_breakdown(arch: ModelArch, *, extras: bool = True) -> dict[str, int]:
    """Bytes by part: ``embedding``, ``lm_head``, ``attention`` (and other mixers), ``mlp``,
    ``experts``, ``norms`` and each extra by name, scales with their weights.
    """
    totals: dict[str, int] = {}
    for spec, times in _counted(arch):
        key = _part(arch, spec)
        totals[key] = totals.get(key, 0) + times * _stored_bytes(arch, spec)
    for extra in arch.extras if extras else ():
        totals[extra.name] = sum(_stored_bytes(arch, spec) for spec in extra.tensors)
    return totals


def _stored_bytes(arch: ModelArch, spec: TensorSpec) -> int:
    stored = arch.weight_format
    if stored.stored_bytes is not None:
        return stored.stored_bytes.get(spec.name, 0)
    return sum(part.nbytes for part in stored.parts(spec, arch.dtype))


def _counted(arch: ModelArch) -> Iterator[tuple[TensorSpec, int]]:
    """The decoder's weights, each with the number of times it occurs: layers and experts that
    the format does not tell apart are alike, and a large model has tens of thousands of them.
    """
    yield from ((spec, 1) for spec in arch.outer_tensors())
    layers_differ = arch.weight_format.tells_apart("layers")
    experts_differ = arch.weight_format.tells_apart("experts")
    for i, layer, times in _layers(arch, apart=layers_differ):
        for spec in layer.tensors(arch.hidden):
            expert = _EXPERT.search(spec.name)
            copies = times
            if expert and not experts_differ:
                if expert[1] != "0":
                    continue
                copies = times * getattr(layer.mlp, "experts", 1)
            yield spec.under(f"{arch.prefix}layers.{i}."), copies


def _layers(arch: ModelArch, *, apart: bool) -> Iterator[tuple[int, Layer, int]]:
    """Number, layer and how often it occurs."""
    if apart:
        yield from ((i, layer, 1) for i, layer in enumerate(arch.layers))
    else:
        for layer, times in Counter(arch.layers).items():
            yield arch.layers.index(layer), layer, times


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def _part(arch: ModelArch, spec: TensorSpec) -> str:
    if spec.role in (Role.EMBEDDING, Role.HEAD):
        return "embedding" if spec.role is Role.EMBEDDING else "lm_head"
    if spec.role is Role.EXPERT or ".experts." in spec.name:
        return "experts"
    if spec.role is Role.NORM:
        return "norms"
    below = spec.name.removeprefix(arch.prefix).split(".")
    return "mlp" if any(word in _MLP_WORDS for word in below) else "attention"


_MLP_WORDS = frozenset(
    {"mlp", "feed_forward", "block_sparse_moe", "up_proj", "down_proj", "gate_proj", "gate"}
    | {"shared_experts", "shared_expert"}
)


def _is_matrix(spec: TensorSpec) -> bool:
    """Weights of linear layers, fused experts among them; not embeddings, norms or convolutions."""
    if spec.role is Role.EXPERT:
        return True
    return len(spec.shape) == 2 and spec.name.endswith(".weight") and "embed" not in spec.name
