"""Which weights of a model are quantized, and which stay as they are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hullspeed.arch.model import ModelArch
from hullspeed.arch.tensors import Role, TensorSpec
from hullspeed.errors import UnsupportedModelError
from hullspeed.models.quantize_targets import Target

_QUANTIZED = (Role.LINEAR, Role.EXPERT)
# Linear layers that engines would take for quantized unless told.
_KEPT = (Role.GATE, Role.HEAD, Role.VISION, *_QUANTIZED)

# Weights that vLLM joins into one, in its order; all of a set must be of one format.
MERGED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
_SET_OF = {name: members for members in MERGED for name in members}
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.")


@dataclass(frozen=True)
class Choice:
    """The decision.

    Attributes:
        quantized: Weights to quantize, by name.
        ignore: Modules of linear layers that stay, for the config section.
        reasons: Why, for those that the format does not fit, by module.
    """

    quantized: dict[str, TensorSpec]
    ignore: tuple[str, ...]
    reasons: dict[str, str]


def choose(arch: ModelArch, target: Target) -> Choice:
    """Every linear layer and expert of the decoder that the format fits.

    Embedding, head, routers, other small gates, convolutions, vision and draft layers stay.

    Raises:
        UnsupportedModelError: for fused experts, which no standard format here holds, or if
            nothing is left to quantize.
    """
    wanted = {spec.name: spec for spec in arch.tensors(extras=False) if spec.role in _QUANTIZED}
    for name, spec in wanted.items():
        if len(spec.shape) != 2 or not name.endswith(".weight"):
            raise UnsupportedModelError(
                "experts fused into one tensor are not quantized here",
                seen=name,
                fix="use a checkpoint that keeps each expert's matrices apart",
            )
    reasons = _misfits(wanted.values(), target)
    quantized = {n: s for n, s in wanted.items() if n.removesuffix(".weight") not in reasons}
    if not quantized:
        raise UnsupportedModelError(
            "no weight of this model fits the format",
            seen=next(iter(reasons.items()), None),
            fix="choose another format or a smaller group",
        )
    ignore = [
        spec.name.removesuffix(".weight")
        for spec in arch.tensors()
        if spec.role in _KEPT and spec.name.endswith(".weight") and spec.name not in quantized
    ]
    if arch.tied_embeddings:
        ignore.append(arch.head_name)
    return Choice(quantized, tuple(dict.fromkeys(ignore)), reasons)


def _misfits(specs: Iterable[TensorSpec], target: Target) -> dict[str, str]:
    """By module; one that does not fit keeps those with it that engines join to it."""
    sets: dict[str, list[tuple[str, TensorSpec]]] = defaultdict(list)
    for spec in specs:
        module = spec.name.removesuffix(".weight")
        sets[_set_name(module)].append((module, spec))
    found: dict[str, str] = {}
    for members in sets.values():
        for module, spec in members:
            last = module.rpartition(".")[2]
            merged = last in _SET_OF and last != _SET_OF[last][-1]
            rows, columns = spec.shape[0], spec.shape[1]
            if why := target.misfit(rows, columns, merged=merged):
                found |= {other: f"{module}: {why}" for other, _ in members}
                break
    return found


def _set_name(module: str) -> str:
    """All experts of a layer are one set; so are the members of ``MERGED``."""
    if match := _EXPERT.match(module):
        return match[1]
    parent, _, last = module.rpartition(".")
    return f"{parent}.{'+'.join(_SET_OF.get(last, (last,)))}"
