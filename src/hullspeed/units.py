"""Bytes, seconds and tokens as people read them, and back.

Bytes are bytes or GiB everywhere; GB appears only where a vendor's figure is quoted.
"""

from __future__ import annotations

import re

from hullspeed.errors import UsageError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_SIZES = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB, "t": 1024**4, "tib": 1024**4,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")


def parse_bytes(text: str) -> int:
    """``"512MiB"``, ``"1.5 GiB"``, ``"24g"`` or ``"80GB"`` as a number of bytes.

    Raises:
        UsageError: for anything else.
    """
    match = _SIZE.match(text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _SIZES:
        raise UsageError("not a size in bytes", seen=text, fix="write 512MiB, 1.5GiB or 80GB")
    return round(float(match.group(1)) * _SIZES[unit])


def parse_seconds(text: str) -> float:
    """``"200ms"``, ``"1.5 s"`` or ``"2min"`` as seconds; a bare number is refused as ambiguous.

    Raises:
        UsageError: for anything else.
    """
    match = _SIZE.match(text)
    scale = _TIMES.get(match.group(2)) if match else None
    if match is None or scale is None:
        raise UsageError("not a time", seen=text, fix="write 200ms, 1.5s or 2min")
    return float(match.group(1)) * scale


def format_bytes(n_bytes: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:,.2f} GiB"


def format_seconds(seconds: float) -> str:
    """``0.0123`` as ``12.3 ms``."""
    size = abs(seconds)
    if size < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if size < 1:
        return f"{seconds * 1e3:.3g} ms"
    if size < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min"


def format_tokens(n_tokens: float) -> str:
    """``381700`` as ``381,700``."""
    return f"{n_tokens:,.0f}"
