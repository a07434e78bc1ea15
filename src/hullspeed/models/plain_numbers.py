"""Plain numbers of safetensors files as float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
PLAIN = ("BF16", *_NUMPY)


def as_float32(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """A fresh flat copy of ``raw`` (uint8, flat), whose numbers are of a type in :data:`PLAIN`."""
    if dtype == "BF16":
        out = np.empty(len(raw) // 2, np.float32)
        np.left_shift(raw.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
        return out
    return raw.view(_NUMPY[dtype]).astype(np.float32)
