"""The catalogue: exact names, honest rows, prices that can be changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hullspeed.errors import UsageError
from hullspeed.hardware.catalogue import find_gpu, gpus, load_prices
from hullspeed.units import GIB

ASKED = (
    "A10", "A30", "A40", "A100-40GB-PCIe", "A100-40GB-SXM", "A100-80GB-PCIe", "A100-80GB-SXM", "L4",
    "L40S", "RTX 3090", "RTX 4090", "RTX 5090", "RTX 6000 Ada", "RTX PRO 6000", "H100-PCIe",
    "H100-SXM", "H100-NVL", "H200", "H20", "B200", "B300", "GH200-96GB", "GB200", "GB300",
    "MI300X", "MI325X", "DGX Spark",
)  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_every_gpu_asked_for_is_there_by_name(name: str) -> None:
    assert find_gpu(name).name == name


def test_rows_are_whole_and_plausible() -> None:
    for gpu in gpus():
        assert gpu.source, gpu.name
        assert 20 < gpu.memory_gib < 300, gpu.name
        # A byte can be read once per 25 to 3,000 multiply-adds on every card ever sold here.
        intensity = gpu.flops_per_s["bf16"] / gpu.bandwidth_bytes_per_s
        assert 30 < intensity < 700, (gpu.name, intensity)
        for wide, narrow in (("bf16", "fp8"), ("fp8", "fp4")):
            if gpu.has(narrow) and gpu.has(wide):
                ratio = gpu.flops_per_s[narrow] / gpu.flops_per_s[wide]
                assert 1.9 < ratio < 4.1, (gpu.name, narrow)
        assert gpu.interconnect_bytes_per_s > 0
        if gpu.price is not None:
            assert re.fullmatch(r"20\d\d-\d\d", gpu.price.date)


def test_native_formats_follow_the_compute_capability() -> None:
    for gpu in gpus():
        if gpu.vendor != "nvidia":
            continue
        capability = float(gpu.compute_capability)
        assert gpu.has("fp8") == (capability >= 8.9), gpu.name
        assert gpu.has("fp4") == (capability >= 10.0), gpu.name


def test_a_format_without_units_multiplies_at_the_16_bit_rate() -> None:
    a40 = find_gpu("A40")
    assert a40.peak_flops_per_s("fp8") == a40.flops_per_s["bf16"]


def test_memory_is_what_a_process_sees_not_what_is_on_the_box() -> None:
    assert find_gpu("RTX 5090").memory_gib == pytest.approx(31.4)
    assert find_gpu("RTX 3090").memory_gib == pytest.approx(23.56)
    assert find_gpu("H100-SXM").memory_gib == pytest.approx(79.2)
    assert find_gpu("RTX PRO 6000").memory_gib == pytest.approx(94.97)
    assert find_gpu("B300").memory_gib < 270  # sold as 288 GB


@pytest.mark.parametrize("spelling", ["a40", "A 40", "NVIDIA A40", "nvidia-a40"])
def test_spelling_aside_a_name_is_exact(spelling: str) -> None:
    assert find_gpu(spelling).name == "A40"


def test_a40_is_never_a_smaller_card() -> None:
    """Case P11: a fuzzy match made a 16 GiB card of an A40."""
    assert find_gpu("A40").memory_gib > 44
    with pytest.raises(UsageError, match="unknown GPU") as caught:
        find_gpu("A4")
    assert "A40" in caught.value.fix
    assert "L4" in caught.value.fix


@pytest.mark.parametrize("name", ["H100", "A100", "A100-80GB", "h100 80gb"])
def test_a_name_that_several_share_is_refused_with_them(name: str) -> None:
    with pytest.raises(UsageError, match="several GPUs") as caught:
        find_gpu(name)
    assert caught.value.fix.count(",") >= 1
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["", "x", "H1000", "gtx 1080", "💥", "A" * 500])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        find_gpu(name)


def test_a_custom_gpu() -> None:
    gpu = find_gpu("custom:memory=48GiB,bandwidth=864,bf16=362,fp8=733,price=0.8,cc=8.9")
    assert gpu.memory_bytes == 48 * GIB
    assert gpu.bandwidth_bytes_per_s == 864e9
    assert gpu.peak_flops_per_s("fp8") == 733e12
    assert gpu.price is not None
    assert gpu.price.usd_per_hour == 0.8


@pytest.mark.parametrize(
    "text",
    [
        "custom:",
        "custom:memory=48GiB",
        "custom:memory=48GiB,bandwidth=864",
        "custom:memory=48,bandwidth=864,bf16=362",
        "custom:memory=48GiB,bandwidth=-1,bf16=362",
        "custom:memory=48GiB,bandwidth=864,bf16=nan",
        "custom:memory=48GiB,bandwidth=864,bf16=362,bf16=1",
        "custom:memory=48GiB,bandwidth=864,bf16=362,colour=red",
        "custom:memory=48GiB,bandwidth=864,bf16=362,price=0",
    ],
)
def test_a_custom_gpu_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError):
        find_gpu(text)


def test_prices_of_the_user_win(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(
        'date = "2026-11-30"\nsource = "our contract"\n[prices]\n"H200" = 2.5\na40 = 1\n'
    )
    prices = load_prices(path)
    assert prices["H200"].usd_per_hour == 2.5
    assert prices["A40"].source == "our contract"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prices = 3",
        "[prices]",
        "[prices",
        '[prices]\n"H200" = "2"',
        "[prices]\nH300 = 2",
        "[prices]\nA40 = -1",
        "[prices]\nA40 = true",
    ],
)
def test_a_prices_file_that_cannot_be(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(UsageError):
        load_prices(path)


def test_a_prices_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_prices(tmp_path / "none.toml")
