"""Measured ceilings: curves, the file that keeps them, the quick stand-in."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hullspeed.hardware.ceilings import (
    Ceilings,
    Curve,
    age_s,
    ceilings_path,
    disturbed,
    keep_ceilings,
    load_ceilings,
    quick_ceilings,
    save_ceilings,
)
from hullspeed.hardware.machine import detect_machine


def test_a_curve_meets_its_points_and_is_flat_beyond_them() -> None:
    curve = Curve((1.0, 4.0, 16.0), (10.0, 40.0, 20.0))
    assert [curve.at(x) for x in (1, 4, 16)] == pytest.approx([10, 40, 20])
    assert curve.at(2) == pytest.approx(20)  # log-log: half way between 1 and 4
    assert curve.at(0.1) == 10
    assert curve.at(1e9) == 20


@given(st.floats(0.01, 1e6))
def test_a_curve_stays_between_its_values(size: float) -> None:
    curve = Curve((1.0, 10.0, 1000.0), (3.0, 7.0, 5.0))
    assert 3.0 - 1e-9 <= curve.at(size) <= 7.0 + 1e-9


@pytest.fixture(scope="module")
def quick() -> Ceilings:
    return quick_ceilings(detect_machine(), budget_s=0.2)


def test_the_quick_measurement_is_physical_and_says_what_it_is(quick: Ceilings) -> None:
    assert quick.source == "quick"
    assert quick.relative_error >= 0.5
    assert any("calibrate" in note for note in quick.notes)
    assert 1e8 < quick.dram_bytes_per_s < 1e13
    fp16, fp32 = (quick.linear_flops_per_s[d] for d in ("fp16", "fp32"))
    # One row is bound by reading weights: half the bytes, twice the rate.
    assert fp16.at(1) == pytest.approx(2 * fp32.at(1))
    assert fp16.at(512) == fp32.at(512)


def test_what_is_kept_is_found_again(quick: Ceilings, tmp_path: Path) -> None:
    machine = detect_machine()
    assert load_ceilings(machine, tmp_path) is None
    save_ceilings(quick, machine, tmp_path)
    assert load_ceilings(machine, tmp_path) == quick
    assert [p.name for p in tmp_path.iterdir()] == [ceilings_path(machine, tmp_path).name]


def test_a_file_of_another_machine_does_not_count(quick: Ceilings, tmp_path: Path) -> None:
    machine = detect_machine()
    foreign = msgspec.structs.replace(quick, fingerprint="0" * 16)
    save_ceilings(foreign, machine, tmp_path)
    assert load_ceilings(machine, tmp_path) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"source": "quick"}', b"\xff\xfe"])
def test_a_damaged_file_is_as_if_there_were_none(data: bytes, tmp_path: Path) -> None:
    machine = detect_machine()
    ceilings_path(machine, tmp_path).write_bytes(data)
    assert load_ceilings(machine, tmp_path) is None


def test_a_disturbed_calibration_does_not_replace_a_good_one(
    quick: Ceilings, tmp_path: Path
) -> None:
    machine = detect_machine()
    good = msgspec.structs.replace(quick, measured_at="2026-01-01T00:00:00Z")
    bad = disturbed(quick, 0.3)
    assert not bad.quiet
    assert bad.relative_error == pytest.approx(quick.relative_error + 0.3)
    assert "30%" in bad.notes[-1]
    _, better = keep_ceilings(bad, machine, tmp_path)
    assert better is None  # there was nothing yet
    _, better = keep_ceilings(good, machine, tmp_path)
    assert better is None
    path, better = keep_ceilings(bad, machine, tmp_path)
    assert better == load_ceilings(machine, tmp_path) == good
    assert path == ceilings_path(machine, tmp_path)
    # One that says more replaces it all the same.
    _, better = keep_ceilings(msgspec.structs.replace(bad, served=True), machine, tmp_path)
    assert better is None
    other = msgspec.structs.replace(bad, threads=good.threads + 1)
    save_ceilings(good, machine, tmp_path)
    assert keep_ceilings(other, machine, tmp_path)[1] is None


def test_the_age_of_a_calibration(quick: Ceilings) -> None:
    assert 0 <= age_s(quick) < 300
    assert age_s(msgspec.structs.replace(quick, measured_at="2020-01-01T00:00:00Z")) > 1e8
