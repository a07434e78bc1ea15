"""Picking a back end."""

from __future__ import annotations

from typing import Any

import pytest

from hullspeed.errors import UsageError
from hullspeed.kernels.cpu.backend import CpuKernels
from hullspeed.kernels.load import load_kernels
from hullspeed.kernels.ref import RefKernels


def test_by_name() -> None:
    assert isinstance(load_kernels("ref"), RefKernels)
    assert isinstance(load_kernels("cpu", threads=1), CpuKernels)


@pytest.mark.parametrize(
    "options",
    [{"name": "cuda"}, {"name": "cpu", "weight_dtype": "int8"}, {"name": "cpu", "threads": 0}],
)
def test_what_there_is_not(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        load_kernels(**options)
