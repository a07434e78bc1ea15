"""The data tables agree with the names that the rest of the project uses, and with themselves."""

from __future__ import annotations

import itertools

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hullspeed.arch import catalogue
from hullspeed.hardware.catalogue import gpus
from hullspeed.models.families import FAMILIES
from hullspeed.preflight import tables
from hullspeed.preflight.case import below

FORMATS = {
    "fp8_tensor", "fp8_block", "compressed_fp8", "compressed_int8", "compressed_int", "awq", "gptq",
    "nvfp4", "mxfp4", "mixed",
}  # fmt: skip


def test_every_family_of_the_catalogue_runs_somewhere() -> None:
    known = set(tables.engines()["vllm"].families)
    assert {catalogue.load(name).family for name in catalogue.names()} <= known
    assert set(tables.engines()["hullspeed"].families) == set(FAMILIES)


def test_formats_are_named_as_the_architecture_names_them() -> None:
    for engine in ("vllm", "sglang", "trtllm"):
        rows = tables.formats(engine)
        assert set(rows) <= FORMATS
        for row in rows.values():
            assert not below(row.native, row.min)
            assert bool(row.fallback) == (row.native != row.min)
    quantized = {catalogue.load(name).quant for name in catalogue.names()} - {"none"}
    assert quantized <= set(tables.formats("vllm"))


@pytest.mark.parametrize("engine", tables.engines())
def test_version_ranges_join_without_overlap(engine: str) -> None:
    rows = tables.engines()[engine].versions
    for first, second in itertools.pairwise(rows):
        assert Version(first.until) <= Version(second.since)
    for row in rows:
        assert Version(row.since) < Version(row.until)
        assert row.source
        for specifier in (row.torch, row.python, *row.pins.values()):
            SpecifierSet(specifier)


def test_newer_cuda_needs_newer_drivers() -> None:
    drivers = tables.cuda().drivers
    for older, newer in itertools.pairwise(sorted(drivers, key=Version)):
        assert below(drivers[older], drivers[newer])
    for major, minimum in tables.cuda().major_minimum.items():
        assert drivers[f"{major}.0"] == minimum


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [("470.10", ""), ("525.60.13", "12.0"), ("535.104.05", "12.2"), ("570.86.15", "12.8"),
     ("580.95.05", "13.0"), ("600.1", "13.2")],
)  # fmt: skip
def test_what_a_driver_offers(driver: str, cuda: str) -> None:
    assert tables.cuda().offered_by(driver) == cuda


def test_every_nvidia_gpu_of_the_catalogue_has_a_first_cuda() -> None:
    for gpu in gpus():
        if gpu.vendor == "nvidia" and gpu.compute_capability:
            assert gpu.compute_capability in tables.cuda().first_cuda, gpu.name
