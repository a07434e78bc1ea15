"""StoredParts: the tensors that a checkpoint keeps for one quantized weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Never

import numpy as np
from numpy.typing import NDArray

from hullspeed.arch.safetensors import StoredTensor
from hullspeed.errors import CorruptFileError
from hullspeed.models.plain_numbers import PLAIN, as_float32

_RAW = {"F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "U8": np.uint8, "I8": np.uint8, "I32": np.uint32}
_REFETCH = "fetch the model again, or check that config and weights belong together"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredParts:
    """Reads parts by suffix and refuses those that cannot be.

    Attributes:
        stem: What the parts' names begin with, e.g. ``"model.layers.0.mlp.down_proj."``.
        shape: Of the weight as ``[..., out, in]``.
        find: Where a tensor of that name lies, or ``None``.
        read: Its bytes, uint8 and flat; a view that may be let go of.
    """

    stem: str
    shape: Shape
    find: Callable[[str], StoredTensor | None]
    read: Callable[[StoredTensor], NDArray[np.uint8]]

    @property
    def lead(self) -> Shape:
        """Dimensions before the matrix: the experts."""
        return self.shape[:-2]

    @property
    def rows(self) -> int:
        """Outputs."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """Inputs."""
        return self.shape[-1]

    def has(self, suffix: str) -> bool:
        """Whether the checkpoint stores that part."""
        return self.find(self._name(suffix)) is not None

    def raw(self, suffix: str, shape: Shape, *dtypes: str) -> NDArray[Any]:
        """Codes or packed words ``[*lead, *shape]``: uint8, or uint32 for 32-bit words.

        Raises:
            CorruptFileError: if the part is missing, or of another type or shape.
        """
        stored = self._stored(suffix, (*self.lead, *shape), dtypes)
        found: NDArray[Any] = self.read(stored).view(_RAW[stored.dtype])
        return found.reshape(stored.shape)

    def integers(self, suffix: str, shape: Shape) -> NDArray[np.int64]:
        """A small part of whole numbers."""
        stored = self._stored(suffix, shape, ("I32", "I64"))
        kind = np.int32 if stored.dtype == "I32" else np.int64
        return self.read(stored).view(kind).astype(np.int64).reshape(shape)

    def scales(self, suffix: str, *shapes: Shape) -> NDArray[np.float32]:
        """Scales in plain numbers, of the first of ``shapes`` that has their number of elements.

        Raises:
            CorruptFileError: if the part is missing, of another shape, or not finite.
        """
        stored = self._stored(suffix, None, PLAIN)
        fitting = [
            full
            for shape in shapes
            for full in [(*self.lead, *shape)]
            if stored.shape == full or _squeezed(stored.shape) == _squeezed(full)
        ]
        if not fitting:
            self.corrupt(suffix, f"has a shape other than {shapes[0]}", stored.shape)
        values = as_float32(self.read(stored), stored.dtype).reshape(fitting[0])
        return self.finite(values, suffix)

    def finite(self, values: NDArray[np.float32], suffix: str) -> NDArray[np.float32]:
        """``values``, refused if one is infinite or no number."""
        if not np.isfinite(values).all():
            self.corrupt(suffix, "holds a scale that is not finite", _first_bad(values))
        return values

    def corrupt(self, suffix: str, what: str, seen: object) -> Never:
        """Refuse a part."""
        raise CorruptFileError(f"{self._name(suffix)} {what}", seen=seen, fix=_REFETCH)

    def _name(self, suffix: str) -> str:
        return self.stem + suffix

    def _stored(self, suffix: str, shape: Shape | None, dtypes: tuple[str, ...]) -> StoredTensor:
        stored = self.find(self._name(suffix))
        if stored is None:
            raise CorruptFileError(
                f"the checkpoint lacks {self._name(suffix)}", seen=sorted(dtypes), fix=_REFETCH
            )
        if stored.dtype not in dtypes:
            self.corrupt(suffix, f"is not of type {' or '.join(dtypes)}", stored.dtype)
        if shape is not None and stored.shape != shape:
            self.corrupt(suffix, f"has a shape other than {shape}", stored.shape)
        return stored


def _squeezed(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def _first_bad(values: NDArray[np.float32]) -> float:
    return float(values[~np.isfinite(values)][0])
