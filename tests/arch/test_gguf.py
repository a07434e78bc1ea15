"""The GGUF reader against the gguf package, and against files that lie."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hullspeed.arch.ggml import BY_CODE
from hullspeed.arch.gguf import GgufFile, read_header
from hullspeed.errors import CorruptFileError, ModelError, SourceError, UnsupportedModelError
from support import gguf_files as make


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((6, 64)).astype(np.float32)
    half = rng.standard_normal((2, 3, 32)).astype(np.float16)
    writer = reference.GGUFWriter(path, "qwen3")
    writer.add_uint32("qwen3.block_count", 28)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    writer.add_bool("flag", True)
    writer.add_array("tokens", ["<s>", "hello", "Ġwörld"])
    writer.add_array("scores", [0.5, -1.0])
    writer.add_tensor("plain", plain)
    writer.add_tensor("half", half)
    blocks = reference.quants.quantize(plain, reference.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blocks", blocks, raw_dtype=reference.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile(path)
    assert file.metadata["general.architecture"] == "qwen3"
    assert file.metadata["qwen3.block_count"] == 28
    assert file.metadata["flag"] is True
    assert file.metadata["tokens"] == ["<s>", "hello", "Ġwörld"]
    np.testing.assert_array_equal(file.metadata["scores"], np.float32([0.5, -1.0]))  # type: ignore[arg-type]
    assert file.tensors["half"].shape == (2, 3, 32)
    np.testing.assert_array_equal(file.array("plain"), plain)
    np.testing.assert_array_equal(file.array("half"), half)
    np.testing.assert_array_equal(file.array("blocks"), blocks)
    assert file.array("blocks").shape == (6, 64 // 32 * 20)
    theirs = {t.name: t for t in reference.GGUFReader(path).tensors}
    for name, tensor in file.tensors.items():
        assert tensor.offset == theirs[name].data_offset
        assert tensor.nbytes == theirs[name].n_bytes == len(file.data(name))


def test_block_table_is_the_references() -> None:
    known = {t.value: reference.GGML_QUANT_SIZES[t] for t in reference.GGMLQuantizationType}
    assert {code: kind[2:] for code, kind in BY_CODE.items()} == known


def test_small_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(make.small())
    file = GgufFile(path)
    assert list(file.metadata["numbers"]) == [7, 8, 9]  # type: ignore[arg-type]
    assert file.metadata["words"] == ["a", "é"]
    assert file.array("a").shape == (3, 4)
    assert file.array("b").tolist() == list(range(8))
    with pytest.raises(ValueError, match="read-only"):
        file.array("b")[0] = 1


_A = make.tensor("a", (4,), 0, 0)
_CASES = {
    "empty": (b"", "too short"),
    "magic": (make.gguf(magic=b"GGML"), "not a GGUF file"),
    "version 1": (make.gguf(version=1), "version"),
    "big-endian": (make.gguf(version=0x03000000), "big-endian"),
    "huge key count": (make.gguf(n_keys=2**63), "number of keys"),
    "more keys than bytes": (make.gguf(n_keys=60_000), "ends inside the header"),
    "huge tensor count": (make.gguf(n_tensors=2**64 - 1), "number of tensors"),
    "huge key": (make.gguf([struct.pack("<Q", 2**40) + bytes(16)]), "length of a key"),
    "huge string": (
        make.gguf([make.key("k", 8, struct.pack("<Q", 2**62))], data=bytes(64)),
        "length of the value of 'k'",
    ),
    "string past the end": (
        make.gguf([make.key("k", 8, struct.pack("<Q", 10_000))], data=bytes(64)),
        "ends inside the value of 'k'",
    ),
    "key not UTF-8": (make.gguf([make.key(b"\xff\xfe", 4, bytes(4))]), "not UTF-8"),
    "unknown value type": (make.gguf([make.key("k", 13, bytes(8))]), "unknown value type"),
    "key twice": (make.gguf([make.u32("k", 1), make.u32("k", 2)]), "key twice"),
    "huge array": (
        make.gguf([make.key("k", 9, struct.pack("<IQ", 4, 2**61))], data=bytes(64)),
        "length of 'k'",
    ),
    "array past the end": (
        make.gguf([make.key("k", 9, struct.pack("<IQ", 10, 20))], data=bytes(64)),
        "ends inside the array",
    ),
    "string array past the end": (
        make.gguf([make.key("k", 9, struct.pack("<IQQ", 8, 3, 1000))], data=bytes(30)),
        "ends inside the array",
    ),
    "deep arrays": (
        make.gguf([make.key("k", 9, struct.pack("<IQ", 9, 1) * 5)], data=bytes(64)),
        "too deeply",
    ),
    "no dimensions": (make.gguf([], [make.tensor("a", (), 0, 0)], bytes(64)), "dimensions"),
    "five dimensions": (
        make.gguf([], [make.tensor("a", (1,) * 5, 0, 0)], bytes(64)),
        "dimensions outside",
    ),
    "dimension zero": (make.gguf([], [make.tensor("a", (0, 4), 0, 0)], bytes(64)), "cannot hold"),
    "overflowing shape": (
        make.gguf([], [make.tensor("a", (2**32, 2**32), 0, 0)], bytes(64)),
        "ends before the data",
    ),
    "huge dimension": (make.gguf([], [make.tensor("a", (2**63,), 0, 0)], bytes(64)), "dimension"),
    "half a block": (make.gguf([], [make.tensor("a", (48,), 3, 0)], bytes(64)), "cannot hold"),
    "unknown tensor type": (make.gguf([], [make.tensor("a", (4,), 99, 0)], bytes(64)), "not known"),
    "offset past the end": (
        make.gguf([], [make.tensor("a", (4,), 0, 2**40)], bytes(64)),
        "ends before the data",
    ),
    "offset wraps": (
        make.gguf([], [make.tensor("a", (4,), 0, 2**64 - 32)], bytes(64)),
        "offset",
    ),
    "data cut short": (make.gguf([], [make.tensor("a", (64,), 0, 0)], bytes(64)), "ends before"),
    "off its alignment": (make.gguf([], [make.tensor("a", (4,), 0, 4)], bytes(64)), "alignment"),
    "overlap": (make.gguf([], [_A, make.tensor("b", (4,), 0, 0)], bytes(64)), "overlap"),
    "tensor twice": (make.gguf([], [_A, _A], bytes(64)), "name twice"),
    "alignment zero": (make.gguf([make.u32("general.alignment", 0)]), "alignment"),
    "alignment three": (make.gguf([make.u32("general.alignment", 3)]), "alignment"),
    "alignment huge": (make.gguf([make.u32("general.alignment", 2**31)]), "alignment"),
    "alignment a word": (make.gguf([make.text("general.alignment", "x")]), "alignment"),
}


@pytest.mark.parametrize("name", _CASES)
def test_refuses(name: str, tmp_path: Path) -> None:
    content, match = _CASES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises((CorruptFileError, UnsupportedModelError), match=match) as caught:
        GgufFile(path)
    assert caught.value.fix


def test_refuses_every_cut() -> None:
    """A file cut anywhere is either refused or cut in the padding behind the last tensor."""
    whole = make.small()
    for length in range(24, len(whole)):
        with pytest.raises(CorruptFileError):
            read_header(whole[:length], length, "cut.gguf")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        GgufFile(tmp_path / "none.gguf")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_flipped_bytes_never_escape(data: st.DataObject) -> None:
    """Any bytes changed: a header that is consistent with the file, or a ModelError."""
    content = bytearray(make.small())
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    try:
        header = read_header(bytes(content), len(content), "x.gguf")
    except ModelError:
        return
    for tensor in header.tensors.values():
        assert tensor.offset + tensor.nbytes <= len(content)


@pytest.mark.deep
def test_many_broken_files_never_escape() -> None:
    """Splices, cuts and flips of a good header by the hundred thousand, from one seed."""
    rng = np.random.default_rng(20261130)
    good = make.small()
    refused = 0
    for _ in range(100_000):
        content = bytearray(good)
        for _ in range(rng.integers(1, 8)):
            at = int(rng.integers(0, len(content)))
            kind = rng.integers(0, 4)
            if kind == 0:
                content[at] ^= int(rng.integers(1, 256))
            elif kind == 1:
                content[at : at + 8] = struct.pack("<Q", int(rng.integers(0, 2**63)))
            elif kind == 2:
                del content[at:]
            else:
                content[at:at] = content[: int(rng.integers(0, 40))]
            if len(content) < 24:
                break
        try:
            header = read_header(bytes(content), len(content), "x.gguf")
        except ModelError:
            refused += 1
            continue
        for tensor in header.tensors.values():
            assert tensor.offset + tensor.nbytes <= len(content)
    assert refused > 50_000


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_behind_a_good_start(tail: bytes) -> None:
    content = b"GGUF" + struct.pack("<I", 3) + tail
    try:
        read_header(content, len(content), "x.gguf")
    except ModelError:
        return
