"""checks: what plan and simulate refuse alike before they work."""

from __future__ import annotations

import os
from pathlib import Path

from hullspeed.errors import UsageError

_MAX_PRICE = 1e6  # dollars per GPU and hour: more is a slip


def check_writable(path: Path | None, option: str) -> None:
    """Refuse before the work what could not be written after it.

    Raises:
        UsageError: naming ``option`` and the path.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} names a folder", seen=str(path), fix="name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{option}: there is no such folder", seen=str(path.parent))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} cannot be written", seen=str(path), fix="give another path")


def check_price(price: float | None) -> None:
    """Refuse a ``--price`` that cannot be.

    Raises:
        UsageError: with the value.
    """
    if price is not None and not 0 < price < _MAX_PRICE:
        raise UsageError("--price is in dollars per GPU and hour, above 0", seen=price)


def check_load(concurrency: int | None, rate: float | None) -> None:
    """Refuse a load that is closed and open at once.

    Raises:
        UsageError: with both values.
    """
    if concurrency is not None and rate is not None:
        raise UsageError(
            "a load is closed (--concurrency) or open (--rate), not both", seen=(concurrency, rate)
        )


def check_tables(*, on_gpu: bool) -> None:
    """Whether ``--cost tables`` can be answered.

    Raises:
        UsageError: if no GPU is named.
        BrokenStackError: if the tables are not installed.
    """
    from hullspeed.perf.measured_tables import require_tables

    if not on_gpu:
        raise UsageError(
            "the measured tables are of GPUs", seen="--cost tables", fix="name one: --gpu h100-sxm"
        )
    require_tables()
