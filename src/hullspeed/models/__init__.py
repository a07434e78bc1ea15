"""Torch modules and weight loading."""

import hullspeed.kernels  # noqa: F401 # before torch: it bounds how long idle threads spin
