"""The safetensors header reader against the safetensors package, and against files that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from hullspeed.arch.safetensors import merge, parse_header, read_file, read_files
from hullspeed.errors import CorruptFileError, ModelError, SourceError, UnsupportedModelError


def _file(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def _entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.ones((2, 5), np.float16),
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 4), np.int8),
    }
    save_file(arrays, path, metadata={"format": "np"})
    found = read_file(path)
    content = path.read_bytes()
    with safe_open(path, "np") as theirs:
        assert set(found) == set(theirs.keys())
        for name, tensor in found.items():
            expected = theirs.get_slice(name)
            assert list(tensor.shape) == expected.get_shape()
            assert tensor.dtype == expected.get_dtype()
    for name, array in arrays.items():
        tensor = found[name]
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()


_GOOD = {"a": _entry("F32", [2, 2], 0, 16), "b": _entry("U8", [4], 16, 20)}
_CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "length only": (struct.pack("<Q", 10), "ends inside its header"),
    "huge header": (_file({}, length=2**40), "header length"),
    "header past the end": (_file({}, length=100), "ends inside its header"),
    "not JSON": (_file(b"{nope"), "not JSON"),
    "not UTF-8": (_file(b'{"\xff": 1}'), "not JSON"),
    "deep JSON": (_file(b'{"a":' + b"[" * 100_000), "not JSON"),
    "a list": (_file([]), "no JSON object"),
    "name twice": (_file(b'{"a": {}, "a": {}}'), "twice"),
    "no dtype": (_file({"a": {"shape": [], "data_offsets": [0, 0]}}), "without a dtype"),
    "negative shape": (_file({"a": _entry("U8", [-1, -4], 0, 4)}, bytes(4)), "without a dtype"),
    "shape of words": (_file({"a": {**_entry("U8", [], 0, 1), "shape": ["1"]}}), "without a dtype"),
    "shape of floats": (_file({"a": {**_entry("U8", [], 0, 1), "shape": [1.0]}}), "without"),
    "shape of booleans": (_file({"a": {**_entry("U8", [], 0, 1), "shape": [True]}}), "without"),
    "three offsets": (
        _file({"a": {**_entry("U8", [1], 0, 1), "data_offsets": [0, 1, 1]}}),
        "imposs",
    ),
    "offsets reversed": (_file({"a": _entry("U8", [1], 1, 0)}, bytes(1)), "impossible"),
    "unknown dtype": (_file({"a": _entry("F128", [1], 0, 16)}, bytes(16)), "not known"),
    "shape x dtype": (_file({"a": _entry("F32", [2], 0, 4)}, bytes(4)), "not shape x F32"),
    "overflowing shape": (_file({"a": _entry("U8", [2**40] * 3, 0, 4)}, bytes(4)), "not shape"),
    "gap": (
        _file({"a": _entry("U8", [1], 0, 1), "b": _entry("U8", [1], 2, 3)}, bytes(3)),
        "leaves a gap",
    ),
    "overlap": (
        _file({"a": _entry("U8", [2], 0, 2), "b": _entry("U8", [2], 1, 3)}, bytes(3)),
        "overlaps",
    ),
    "data missing": (_file(_GOOD, bytes(19)), "another size"),
    "data too long": (_file(_GOOD, bytes(21)), "another size"),
}


@pytest.mark.parametrize("name", _CASES)
def test_refuses(name: str, tmp_path: Path) -> None:
    content, match = _CASES[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises((CorruptFileError, UnsupportedModelError), match=match) as caught:
        read_file(path)
    assert "bad.safetensors" in str(caught.value)


def test_shards_must_not_repeat_a_name(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / f"{name}.safetensors").write_bytes(_file(_GOOD, bytes(20)))
    with pytest.raises(CorruptFileError, match="two files hold 'a'"):
        read_files(sorted(tmp_path.iterdir()))
    assert merge([]) == {}


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        read_file(tmp_path / "none.safetensors")


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 2**70) | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["a", "dtype", "shape", "data_offsets"]), inner)
        ),
        max_leaves=12,
    )
)
def test_any_json_is_read_or_refused(header: object) -> None:
    raw = json.dumps(header).encode()
    try:
        found = parse_header(raw, 8 + len(raw) + 16, "x")
    except ModelError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) == 16


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_flipped_bytes_never_escape(data: st.DataObject) -> None:
    content = bytearray(json.dumps(_GOOD).encode())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file_bytes = 8 + len(content) + 20
    try:
        found = parse_header(bytes(content), file_bytes, "x")
    except ModelError:
        return
    assert all(t.offset + t.nbytes <= file_bytes for t in found.values())
