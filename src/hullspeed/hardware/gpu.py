"""Gpu: one accelerator in numbers."""

from __future__ import annotations

from typing import Literal

import msgspec

from hullspeed.errors import UsageError
from hullspeed.units import GIB


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What one hour of one GPU costs, with where and when the figure was seen."""

    usd_per_hour: float
    date: str
    source: str


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as its driver and its data sheet describe it.

    Attributes:
        name: Exact name in the catalogue.
        memory_bytes: What a process sees as the device's total.
        memory_origin: ``field`` if read in a log of that card, ``derived`` if computed from the
            vendor's size, ``given`` for a custom device, ``detected`` for this machine's own.
        bandwidth_bytes_per_s: Peak memory bandwidth of the data sheet.
        flops_per_s: Dense peak by number format: ``fp32``, ``bf16`` and, where the hardware has
            them, ``fp8``, ``fp4``, ``int8``.
        compute_capability: ``"9.0"`` for CUDA, ``"gfx942"`` for ROCm, empty if unknown.
        interconnect_bytes_per_s: To its peers, both directions together.
        unified: Memory is shared with the operating system.
    """

    name: str
    vendor: str = "nvidia"
    memory_bytes: int
    memory_origin: Literal["field", "derived", "given", "detected"]
    bandwidth_bytes_per_s: float
    flops_per_s: dict[str, float]
    compute_capability: str = ""
    interconnect: str = ""
    interconnect_bytes_per_s: float = 0.0
    unified: bool = False
    price: Price | None = None
    source: str = ""

    @property
    def memory_gib(self) -> float:
        """Memory in GiB."""
        return self.memory_bytes / GIB

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak for ``dtype``; formats the hardware cannot multiply run at its 16-bit rate
        (weights are expanded on the fly, as Marlin does).
        """
        return self.flops_per_s.get(dtype, self.flops_per_s["bf16"])

    def has(self, dtype: str) -> bool:
        """Whether the hardware multiplies ``dtype`` natively."""
        return dtype in self.flops_per_s

    def priced(self, usd_per_hour: float, date: str, source: str) -> Gpu:
        """The same GPU with another price.

        Raises:
            UsageError: for a price that is not above zero.
        """
        if not 0 < usd_per_hour < 10_000:
            raise UsageError(
                "a price per hour must be above 0", seen=usd_per_hour, fix="give US dollars per GPU"
            )
        price = Price(usd_per_hour=usd_per_hour, date=date, source=source)
        return msgspec.structs.replace(self, price=price)
