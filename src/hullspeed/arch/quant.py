"""Weight formats: which weights a checkpoint quantizes, how it stores them, and their exact bytes.

A ``WeightFormat`` is read from ``quantization_config`` (or ModelOpt's ``hf_quant_config.json``)
by ``quant_config.py``; ``schemes.py`` says what one quantized matrix is made of. What a format
leaves alone stays in the model's own type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from typing import TYPE_CHECKING

from hullspeed.arch.schemes import PLAIN, Part, Scheme, parts_of
from hullspeed.arch.tensors import Role, TensorSpec

if TYPE_CHECKING:
    from hullspeed.arch.model import ModelArch

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
        kv_scales: Whether each layer has a scale for keys and one for values.
        stored_bytes: Bytes by tensor name as read from the files' headers; wins over all rules.
    """

    name: str = "none"
    scheme: Scheme = PLAIN
    roles: frozenset[Role] = frozenset()
    ignore: Modules = Modules()
    layers: Mapping[str, Scheme] = field(default_factory=dict)
    fp32_names: tuple[str, ...] = ()
    kv_dtype: str | None = None
    kv_scales: bool = False
    stored_bytes: Mapping[str, int] | None = None

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

    def parts(self, spec: TensorSpec, dtype: str) -> Iterator[Part]:
        """The tensors that the checkpoint stores for one weight, by their own names."""
        scheme = self.scheme_of(spec)
        if scheme is PLAIN:
            own = "fp32" if spec.name.rpartition(".")[2] in self.fp32_names else dtype
            yield Part(spec.name, own, spec.shape)
        else:
            yield from parts_of(scheme, spec, dtype)
        if self.kv_scales and spec.name.endswith((".k_proj.weight", ".v_proj.weight")):
            module = spec.name.removesuffix(".weight")
            yield Part(f"{module}.{module[-6]}_scale", "fp32", ())


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
    known = arch.weight_format.stored_bytes
    totals: dict[str, int] = {}
    for part_name, specs in _sections(arch, extras):
        for spec in specs:
            if known is not None:
                size = known.get(spec.name, 0)
            else:
                size = sum(part.nbytes for part in arch.weight_format.parts(spec, arch.dtype))
            key = part_name or _part(arch, spec)
            totals[key] = totals.get(key, 0) + size
    return totals


def _sections(arch: ModelArch, extras: bool) -> Iterator[tuple[str, Iterator[TensorSpec]]]:
    yield "", arch.tensors(extras=False)
    if extras:
        for extra in arch.extras:
            yield extra.name, iter(extra.tensors)


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
