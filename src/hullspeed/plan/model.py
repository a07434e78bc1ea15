"""PlannedModel: a model by name, as the planner needs it: architecture and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hullspeed.arch.model import ModelArch
from hullspeed.arch.quant import WeightFormat, weight_breakdown
from hullspeed.arch.schemes import Scheme
from hullspeed.arch.tensors import Role
from hullspeed.memory.budget import WeightBytes
from hullspeed.memory.ours import held_weights

_EXTRAS = ("mtp", "vision")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model to plan for.

    Attributes:
        name: As the engine is told it.
        weights: Bytes by part, as the checkpoint stores them.
        source: Where the architecture was read.
    """

    name: str
    arch: ModelArch
    weights: WeightBytes
    source: str

    @classmethod
    def of(cls, name: str, arch: ModelArch, source: str) -> PlannedModel:
        """With the bytes that ``arch`` stores."""
        return cls(name, arch, stored_weights(arch), source)

    def embedded(self, weight_dtype: str) -> PlannedModel:
        """The same model as the embedded engine holds it."""
        return replace(self, weights=held_weights(self.arch, weight_dtype))

    def with_fp8_weights(self) -> PlannedModel:
        """The same model with its layers' matrices in FP8 blocks of 128 x 128, as official FP8
        checkpoints hold them: embedding, head, gates, convolutions and vision stay in 16 bit.
        """
        scheme = Scheme("fp8_block", bits=8, block=(128, 128), scale_dtype="bf16")
        stored = WeightFormat(
            name="fp8_block", scheme=scheme, roles=frozenset({Role.LINEAR, Role.EXPERT})
        )
        arch = replace(self.arch, quant=stored.name, weight_format=stored)
        return PlannedModel.of(f"{self.name} in FP8", arch, "derived: FP8 blocks of 128 x 128")


def stored_weights(arch: ModelArch) -> WeightBytes:
    """Bytes of the checkpoint: decoder, MTP layer and vision tower apart."""
    parts = weight_breakdown(arch)
    return WeightBytes(
        decoder=sum(size for name, size in parts.items() if name not in _EXTRAS),
        mtp=parts.get("mtp", 0),
        vision=parts.get("vision", 0),
        replicated=parts.get("norms", 0),
        source=f"every tensor of the checkpoint, {arch.quant} weights"
        if arch.quant != "none"
        else f"every tensor of the checkpoint in {arch.dtype}",
    )
