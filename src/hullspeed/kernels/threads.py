"""Threads that wait without taking a core from others."""

from __future__ import annotations

import os

# A libgomp worker spins about 3 ms after each parallel region unless told otherwise; on a machine
# whose cores are all in use that delays whoever needs the core, the other thread pool (numba's)
# included. 10,000 turns (some 20 us) still bridge the gap from one kernel to the next.
_SPIN_TURNS = "10000"


def limit_spinning() -> None:
    """Bound how long idle OpenMP threads spin. Has an effect only before torch is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_TURNS)
