"""Whoever imports torch first has bounded how long its idle threads spin: libgomp reads it once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SPY = """
import importlib, os, sys

class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Spy())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module",
    [
        "hullspeed.kernels.cpu.backend",
        "hullspeed.models.decoder",
        "hullspeed.runtime.ceilings",
        "hullspeed.runtime.engine_process",
        "hullspeed.runtime.library",
        "hullspeed.runtime.kv_error",
    ],
)
def test_spinning_is_bounded_before_torch_is_there(module: str) -> None:
    bare = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", _SPY, module],
        env=bare, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip().isdigit(), done.stderr
