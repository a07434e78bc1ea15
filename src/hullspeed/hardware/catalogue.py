"""Catalogue: every GPU we know, by exact name; unknown or ambiguous names are refused."""

from __future__ import annotations

import difflib
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from hullspeed.errors import UsageError
from hullspeed.hardware.gpu import Gpu, Price
from hullspeed.units import GIB, parse_bytes

_FILE = Path(__file__).with_name("catalogue.toml")
_NOISE = ("nvidia", "geforce", "tesla", "amd")
_CUSTOM_KEYS = ("memory", "bandwidth", "bf16", "fp8", "fp4", "fp32", "int8", "cc", "price", "link")


def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalogue, in file order."""
    return tuple({gpu.name: gpu for gpu in _load()[0].values()}.values())


def find_gpu(name: str) -> Gpu:
    """The GPU of exactly this name or alias, spelling of spaces, dashes and case aside; or a
    ``custom:`` specification.

    ``custom:memory=48GiB,bandwidth=864,bf16=362,fp8=733,price=0.8`` describes a device that the
    catalogue lacks: memory as a size, bandwidth and link in GB/s, formats in dense TFLOP/s, price
    in dollars per hour.

    Raises:
        UsageError: for a name that is unknown or that several GPUs share.
    """
    if name.lower().startswith("custom:"):
        return _custom(name)
    by_name, groups = _load()
    key = _normal(name)
    if key in by_name:
        return by_name[key]
    if key in groups:
        several = ", ".join(groups[key])
        raise UsageError(
            "several GPUs go by this name", seen=name, fix=f"name one exactly: {several}"
        )
    raise UsageError("unknown GPU", seen=name, fix=_nearest(key))


def load_prices(path: Path) -> dict[str, Price]:
    """A user's prices file: ``[prices]`` of ``"GPU name" = dollars``, with ``date`` and ``source``.

    Raises:
        UsageError: if the file cannot be read as such.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prices file: {error}", seen=str(path)) from error
    table = data.get("prices")
    if not isinstance(table, dict) or not table:
        raise UsageError(
            "the prices file has no [prices] table",
            seen=str(path),
            fix='write [prices]\n"H200" = 3.5',
        )
    found: dict[str, Price] = {}
    for name, usd in table.items():
        if isinstance(usd, bool) or not isinstance(usd, int | float):
            raise UsageError(f"the price of {name} is not a number", seen=usd)
        gpu = find_gpu(name).priced(
            float(usd), str(data.get("date", "undated")), str(data.get("source", str(path)))
        )
        found[gpu.name] = gpu.price  # type: ignore[assignment]  # priced() always sets it
    return found


def _normal(name: str) -> str:
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    for word in _NOISE:
        key = key.replace(word, "")
    return key


def _nearest(key: str) -> str:
    by_name, groups = _load()
    near = difflib.get_close_matches(key, [*by_name, *groups], n=4, cutoff=0.5)
    names = dict.fromkeys(by_name[k].name if k in by_name else groups[k][0] for k in near)
    hint = f"nearest: {', '.join(names)}; " if names else ""
    spec = "custom:memory=48GiB,bandwidth=864,bf16=362"
    return f"{hint}see `hullspeed plan --list-gpus`, or describe it: {spec}"


@cache
def _load() -> tuple[dict[str, Gpu], dict[str, list[str]]]:
    data = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    by_name: dict[str, Gpu] = {}
    groups: dict[str, list[str]] = {}
    for row in data["gpu"]:
        gpu = _gpu(row, data["prices"])
        for name in (row["name"], *row.get("aliases", ())):
            by_name[_normal(name)] = gpu
        for group in row.get("groups", ()):
            groups.setdefault(_normal(group), []).append(gpu.name)
    return by_name, groups


def _gpu(row: dict[str, Any], prices: dict[str, dict[str, str]]) -> Gpu:
    price = None
    if "price_usd_hour" in row:
        price = Price(usd_per_hour=row["price_usd_hour"], **prices[row["price"]])
    return Gpu(
        name=row["name"],
        vendor=row.get("vendor", "nvidia"),
        memory_bytes=round(row["memory_gib"] * GIB),
        memory_origin=row["memory_origin"],
        bandwidth_bytes_per_s=row["bandwidth_gb_s"] * 1e9,
        flops_per_s={dtype: tflops * 1e12 for dtype, tflops in row["tflops"].items()},
        compute_capability=row["compute_capability"],
        interconnect=row["interconnect"],
        interconnect_bytes_per_s=row["interconnect_gb_s"] * 1e9,
        unified=row.get("unified", False),
        price=price,
        source=row["source"],
    )


def _custom(text: str) -> Gpu:
    fields: dict[str, str] = {}
    for part in text.partition(":")[2].split(","):
        key, equals, value = part.partition("=")
        key = key.strip().lower()
        if not equals or key not in _CUSTOM_KEYS or key in fields:
            raise UsageError(
                "cannot read this custom GPU", seen=part, fix=f"use {', '.join(_CUSTOM_KEYS)}"
            )
        fields[key] = value.strip()
    for needed in ("memory", "bandwidth", "bf16"):
        if needed not in fields:
            raise UsageError(f"a custom GPU needs {needed}", seen=text)
    flops: dict[str, float] = {
        dtype: _positive(dtype, fields[dtype]) * 1e12
        for dtype in ("fp32", "bf16", "fp8", "fp4", "int8")
        if dtype in fields
    }
    flops.setdefault("fp32", flops["bf16"] / 8)
    memory_bytes = parse_bytes(fields["memory"])
    if memory_bytes < 2**28:
        raise UsageError("a custom GPU needs a size with its unit", seen=fields["memory"])
    gpu = Gpu(
        name="custom",
        vendor="custom",
        memory_bytes=memory_bytes,
        memory_origin="given",
        bandwidth_bytes_per_s=_positive("bandwidth", fields["bandwidth"]) * 1e9,
        flops_per_s=flops,
        compute_capability=fields.get("cc", ""),
        interconnect="given" if "link" in fields else "pcie4",
        interconnect_bytes_per_s=_positive("link", fields.get("link", "64")) * 1e9,
        source="given on the command line",
    )
    if "price" in fields:
        return gpu.priced(_positive("price", fields["price"]), "now", "given on the command line")
    return gpu


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise UsageError(f"{name} of a custom GPU must be a number above 0", seen=text)
    return value
