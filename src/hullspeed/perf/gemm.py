"""GEMM: what products cost beyond their FLOPs: rows padded to tiles, a last wave that is not full,
the share of peak that large ones sustain, and reading weights beside multiplying.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from hullspeed.arch.model import ModelArch
from hullspeed.arch.tensors import Role
from hullspeed.hardware.gpu import Gpu

# Streaming multiprocessors of the full products, from NVIDIA's architecture white papers.
_SMS = {
    "A10": 72, "A30": 56, "A40": 84, "RTX A6000": 84, "A100-40GB-PCIe": 108, "A100-40GB-SXM": 108,
    "A100-80GB-PCIe": 108, "A100-80GB-SXM": 108, "L4": 58, "L40S": 142, "RTX 3090": 82,
    "RTX 4090": 128, "RTX 5090": 170, "RTX 6000 Ada": 142, "RTX PRO 6000": 188, "H100-PCIe": 114,
    "H100-SXM": 132, "H100-NVL": 132, "H200": 132, "H20": 78, "B200": 148, "B300": 148,
    "GH200-96GB": 132, "GH200-144GB": 132, "GB200": 148, "GB300": 148,
}  # fmt: skip
_TILE_ROWS, _TILE_COLUMNS = 128, 128
_SMALL_TILE_ROWS = 16  # the least M of a tensor-core instruction
_HALF_TILE_ROWS = 64  # kernels choose tiles of half the height where that leaves fewer rows empty


_SUSTAINED = Path(__file__).with_name("sustained.toml")


def overlapped(read_s: float, multiply_s: float) -> tuple[float, float]:
    """Shares of reading and of multiplying that a product takes. They overlap but for their ends:
    together they take the root of the sum of their squares, of which each side's own time times its
    share is a part. Where both are equal, measured products take 1.2 to 1.5 times either.
    """
    total = math.hypot(read_s, multiply_s)
    return (read_s / total, multiply_s / total) if total else (1.0, 0.0)


@cache
def sustained_share(compute_capability: str, dtype: str) -> float:
    """Share of a data sheet's dense peak that large products sustain, by architecture and format
    (``sustained.toml``); of an unknown architecture that of the row named ``other``.
    """
    rows = _shares()
    row = rows.get(compute_capability, rows["other"])
    return float(row.get(dtype, row["bf16"]))


@cache
def _shares() -> dict[str, dict[str, float | str]]:
    table: dict[str, dict[str, float | str]] = tomllib.loads(_SUSTAINED.read_text(encoding="utf-8"))
    return table


def padded_rows(rows: int) -> int:
    """Rows that are computed for ``rows`` tokens: whole tiles of 16 up to 128, then of 64."""
    if rows <= 0:
        return 0
    tile = _SMALL_TILE_ROWS if rows <= _TILE_ROWS else _HALF_TILE_ROWS
    return -(-rows // tile) * tile


def wave_factor(gpu: Gpu, arch: ModelArch, tp: int) -> Callable[[int], float]:
    """By how much the last wave of tiles lengthens the layers' products at so many rows: 1 where
    the tiles fill all multiprocessors a whole number of times, or are so few that kernels split
    them along K instead. 1 for a GPU of unknown size.
    """
    sms = _SMS.get(gpu.name, 0)
    if not sms:
        return lambda _rows: 1.0
    layer = arch.layers[len(arch.layers) // 2]
    products = [
        (t.shape[0] // tp if len(t.shape) == 2 else 0, t.elements)
        for part in (layer.mixer, layer.mlp)
        for t in part.tensors(arch.hidden)
        if t.role is Role.LINEAR
    ]
    total = sum(elements for _, elements in products)

    @cache
    def factor(rows: int) -> float:
        if not total or rows <= _TILE_ROWS:
            return 1.0  # few rows are bound by reading, or split along K instead
        weighted = 0.0
        for columns, elements in products:
            across = -(-max(columns, 1) // _TILE_COLUMNS)
            weighted += elements * min(
                _last_wave(-(-rows // height) * across, sms)
                for height in (_TILE_ROWS, _HALF_TILE_ROWS)
            )
        return weighted / total

    return factor


def _last_wave(tiles: int, sms: int) -> float:
    return 1.0 if tiles <= sms else -(-tiles // sms) * sms / tiles
