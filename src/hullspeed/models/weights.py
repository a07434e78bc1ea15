"""Weights: a checkpoint's tensors by their Hugging Face names, as float32, one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from hullspeed.arch.model import ModelArch
from hullspeed.errors import CorruptFileError
from hullspeed.kernels.blocks import BlockWeight
from hullspeed.models.quantized import QuantizedTensor

_SHOWN = 5  # names quoted in a message
_BUFFERS = (".rotary_emb.inv_freq",)  # old Llama checkpoints store what is computed here


class Weights(ABC):
    """A checkpoint whose tensors are read when asked for."""

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor of the decoder."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Tensor ``name`` as float32, a fresh copy.

        Raises:
            CorruptFileError: if there is none.
            UnsupportedModelError: if its number format is not read here.
        """

    def expert(self, name: str, index: int) -> Tensor:
        """One expert's share of tensor ``name`` ``[experts, ...]``, as float32."""
        return self.tensor(name)[index].clone()

    def quantized(self, name: str) -> QuantizedTensor | None:
        """The codes and scales of weight ``name``, or ``None`` if it is not kept so.

        For back ends that compute with codes; :meth:`tensor` gives the same weight in float32.

        Raises:
            CorruptFileError: if a part is missing, of another type or shape, or not finite.
        """
        return None

    def blocks(self, name: str) -> BlockWeight | None:
        """Matrix ``name`` as codes in blocks of 32, or ``None`` if it is not kept so."""
        return None

    def frequency_factors(self) -> Tensor | None:
        """Divisors of the rotary frequencies ``[rotary_dim / 2]``, if the weights carry them."""
        return None

    def check(self, arch: ModelArch) -> None:
        """Compare names and shapes with what ``arch`` expects.

        Raises:
            CorruptFileError: naming the tensors that are missing, unexpected or mis-shaped.
        """
        wanted = {spec.name: spec.shape for spec in arch.tensors(extras=False)}
        found = dict(self.shapes())
        missing = wanted.keys() - found.keys()
        spare = {spec.name for extra in arch.extras for spec in extra.tensors}
        if arch.tied_embeddings:
            spare.add("lm_head.weight")  # some checkpoints store the tied head again
        unexpected = {
            name for name in found.keys() - wanted.keys() - spare if not name.endswith(_BUFFERS)
        }
        misshaped = {
            f"{name} {found[name]}, expected {shape}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        }
        for what, names in (
            ("lacks", missing),
            ("mis-shapes", misshaped),
            ("holds unexpected", unexpected),
        ):
            if names:
                raise CorruptFileError(
                    f"the checkpoint {what} {len(names)} tensor(s)",
                    seen=sorted(names)[:_SHOWN],
                    fix="fetch the model again, or check that config and weights belong together",
                )


class TensorWeights(Weights):
    """Weights that are in memory already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the tensors given."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """As float32."""
        if name not in self._tensors:
            raise CorruptFileError("the checkpoint lacks a tensor", seen=name)
        return self._tensors[name].detach().float().clone()
