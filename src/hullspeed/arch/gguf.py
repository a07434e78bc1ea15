"""GGUF files, read without trusting them: metadata, tensor table and lazy views of the data.

Every count, length and offset is checked against the bytes that are really there before it is
used, and nothing is allocated from a declared size. Format: ``ggml/docs/gguf.md``, versions 2
and 3, little-endian. Dimensions are given in torch order (``[out, in]``), the reverse of the
file's.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Never

import numpy as np
import numpy.typing as npt

from hullspeed.arch.ggml import BY_CODE, GgmlType
from hullspeed.arch.mapped import release_pages
from hullspeed.errors import CorruptFileError, SourceError, UnsupportedModelError

Scalar = bool | int | float | str
Value = Scalar | list[Any] | npt.NDArray[Any]

# Real files stay far below these: 1,000 keys, 20,000 tensors, 1 MB chat templates.
MAX_KEYS: Final = 65_536
MAX_TENSORS: Final = 1_000_000
MAX_KEY_BYTES: Final = 65_535  # gguf.md
MAX_STRING_BYTES: Final = 64 * 1024**2
MAX_NAME_BYTES: Final = 256
MAX_DIMS: Final = 4  # GGML_MAX_DIMS
MAX_ALIGNMENT: Final = 65_536
MAX_ARRAY_DEPTH: Final = 3

_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, struct.Struct] = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_PLAIN_DTYPES = {
    "F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2",
    "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
_REFETCH = "fetch the file again"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        shape: Torch order: the last dimension is contiguous.
        offset: Bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int


class GgufFile:
    """An open GGUF file, mapped into memory and closed when the last view of it is gone.

    Attributes:
        path: The file.
        version: 2 or 3.
        metadata: Keys and values; arrays of numbers are numpy arrays, others are lists.
        tensors: By name, in the file's order.

    Raises:
        CorruptFileError: if the file is cut short or contradicts itself.
        UnsupportedModelError: for a version, byte order or tensor type that is not read here.
        SourceError: if there is no such file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 24:
                    raise CorruptFileError(
                        f"{self.path.name} is too short for a GGUF header",
                        seen=f"{size} bytes",
                        fix=_REFETCH,
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise SourceError(
                "cannot open the GGUF file", seen=str(self.path), fix=f"{error.strerror}"
            ) from error
        header = read_header(self._map, len(self._map), self.path.name)
        self.version = header.version
        self.metadata = header.metadata
        self.tensors = header.tensors

    def data(self, name: str) -> memoryview:
        """The raw bytes of a tensor, not copied.

        Raises:
            KeyError: if there is no such tensor.
        """
        tensor = self.tensors[name]
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.nbytes]

    def release(self, name: str) -> None:
        """Let go of the memory of a tensor that has been read; it comes back when touched."""
        tensor = self.tensors[name]
        release_pages(self._map, tensor.offset, tensor.nbytes)

    def array(self, name: str) -> npt.NDArray[Any]:
        """A tensor as a read-only numpy view, not copied.

        Plain types keep their shape (BF16 as ``uint16`` bit patterns). Block types come as
        ``uint8`` with the last dimension in bytes: ``[..., rows, blocks x block_bytes]``.
        """
        tensor = self.tensors[name]
        dtype = _PLAIN_DTYPES.get(tensor.type.name)
        raw = np.frombuffer(self.data(name), dtype=dtype or np.uint8)
        if dtype is not None:
            return raw.reshape(tensor.shape)
        row_bytes = tensor.type.nbytes(tensor.shape[-1])
        return raw.reshape(*tensor.shape[:-1], row_bytes)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the data.

    Attributes:
        data_offset: Where the first tensor may start.
    """

    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    data_offset: int


def read_header(buffer: mmap.mmap | bytes, file_bytes: int, name: str) -> GgufHeader:
    """The header at the start of ``buffer``, which holds all of it.

    Args:
        buffer: The file, or a first part of it.
        file_bytes: Size of the whole file, against which tensor offsets are checked.
        name: For messages.

    Raises:
        CorruptFileError: if the header is cut short or contradicts itself or the file's size.
        UnsupportedModelError: for a version, byte order or tensor type that is not read here.
    """
    cursor = _Cursor(buffer, name)
    version, tensor_count, key_count = _preamble(cursor)
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        key = cursor.string(MAX_KEY_BYTES, "a key")
        if key in metadata:
            cursor.corrupt("holds a metadata key twice", key)
        metadata[key] = _value(cursor, cursor.u32("a value type"), key)
    alignment = _alignment(cursor, metadata)
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = _placed(cursor, infos, data_offset, alignment, file_bytes)
    return GgufHeader(version, MappingProxyType(metadata), MappingProxyType(tensors), data_offset)


class _Cursor:
    """Reads forward in a buffer and refuses to leave it."""

    def __init__(self, buffer: mmap.mmap | bytes, name: str) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.name = name
        self.position = 0

    def corrupt(self, what: str, seen: object) -> Never:
        raise CorruptFileError(f"{self.name} {what}", seen=seen, fix=_REFETCH)

    def require(self, n_bytes: int, what: str) -> None:
        """Refuse unless ``n_bytes`` more bytes are there."""
        left = self.size - self.position
        if n_bytes > left:
            self.corrupt(f"ends inside {what}", f"{n_bytes} bytes declared, {left} left")

    def scalar(self, form: struct.Struct, what: str) -> Any:
        self.require(form.size, what)
        (value,) = form.unpack_from(self.buffer, self.position)
        self.position += form.size
        return value

    def u32(self, what: str) -> int:
        value: int = self.scalar(_SCALARS[4], what)
        return value

    def u64(self, what: str, limit: int) -> int:
        value: int = self.scalar(_SCALARS[10], what)
        if value > limit:
            self.corrupt(f"declares {what} beyond the limit of {limit}", value)
        return value

    def string(self, limit: int, what: str) -> str:
        n_bytes = self.u64(f"the length of {what}", limit)
        self.require(n_bytes, what)
        start, self.position = self.position, self.position + n_bytes
        try:
            return self.buffer[start : self.position].decode()
        except UnicodeDecodeError as error:
            self.corrupt(f"holds text that is not UTF-8 in {what}", str(error))


def _preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    magic = bytes(cursor.buffer[:4])
    if magic != b"GGUF":
        cursor.corrupt("is not a GGUF file: its first four bytes are not 'GGUF'", magic)
    cursor.position = 4
    version = cursor.u32("the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        raise UnsupportedModelError(
            f"{cursor.name} is a big-endian GGUF file"
            if swapped
            else f"{cursor.name} is of a GGUF version that is not read here",
            seen=version,
            fix="convert it to little-endian GGUF version 3",
        )
    tensor_count = cursor.u64("a number of tensors", MAX_TENSORS)
    key_count = cursor.u64("a number of keys", MAX_KEYS)
    # The smallest key takes 13 bytes (length, type, one byte), the smallest tensor info 32.
    cursor.require(13 * key_count + 32 * tensor_count, "the header")
    return version, tensor_count, key_count


def _value(cursor: _Cursor, code: int, key: str, depth: int = 0) -> Value:
    if code == _STRING:
        return cursor.string(MAX_STRING_BYTES, f"the value of {key!r}")
    if code == _ARRAY:
        return _array(cursor, key, depth)
    form = _SCALARS.get(code)
    if form is None:
        cursor.corrupt(f"holds an unknown value type for {key!r}", code)
    value: Scalar = cursor.scalar(form, f"the value of {key!r}")
    return bool(value) if code == _BOOL else value


def _array(cursor: _Cursor, key: str, depth: int) -> Value:
    if depth >= MAX_ARRAY_DEPTH:
        cursor.corrupt(f"nests arrays too deeply in {key!r}", depth)
    code = cursor.u32(f"the element type of {key!r}")
    count = cursor.u64(f"the length of {key!r}", cursor.size)
    if code == _STRING:
        return _strings(cursor, count, key)
    if code == _ARRAY:
        cursor.require(12 * count, f"the array {key!r}")
        return [_array(cursor, key, depth + 1) for _ in range(count)]
    form = _SCALARS.get(code)
    if form is None:
        cursor.corrupt(f"holds an unknown element type in {key!r}", code)
    n_bytes = form.size * count
    cursor.require(n_bytes, f"the array {key!r}")
    raw = cursor.buffer[cursor.position : cursor.position + n_bytes]
    cursor.position += n_bytes
    return np.frombuffer(raw, dtype=np.dtype("?" if code == _BOOL else form.format))


def _strings(cursor: _Cursor, count: int, key: str) -> list[str]:
    """An array of strings; vocabularies have hundreds of thousands, hence the bare loop."""
    cursor.require(8 * count, f"the array {key!r}")
    buffer, size, position = cursor.buffer, cursor.size, cursor.position
    length_at = _SCALARS[10].unpack_from
    found: list[str] = []
    try:
        for _ in range(count):
            start = position + 8
            position = start + length_at(buffer, position)[0]
            if position > size:
                cursor.corrupt(f"ends inside the array {key!r}", f"{position} > {size} bytes")
            found.append(buffer[start:position].decode())
    except struct.error:
        cursor.corrupt(f"ends inside the array {key!r}", f"string {len(found)} of {count}")
    except UnicodeDecodeError as error:
        cursor.corrupt(f"holds text that is not UTF-8 in {key!r}", str(error))
    cursor.position = position
    return found


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):  # type: ignore[operator]
        cursor.corrupt(f"has an alignment that is no power of two up to {MAX_ALIGNMENT}", value)
    return int(value)  # type: ignore[arg-type]


def _tensor_info(cursor: _Cursor) -> GgufTensor:
    """One row of the tensor table; its offset still relative to the data."""
    name = cursor.string(MAX_NAME_BYTES, "a tensor name")
    n_dims = cursor.u32(f"the dimensions of {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        cursor.corrupt(f"gives {name!r} a number of dimensions outside 1..{MAX_DIMS}", n_dims)
    dims = [cursor.u64(f"a dimension of {name!r}", 2**48) for _ in range(n_dims)]
    code = cursor.u32(f"the type of {name!r}")
    offset = cursor.u64(f"the offset of {name!r}", 2**62)
    kind = BY_CODE.get(code)
    if kind is None:
        raise UnsupportedModelError(
            f"{cursor.name} stores {name!r} in a tensor type that is not known here",
            seen=code,
            fix="convert the model to a current GGUF type",
        )
    if min(dims) < 1 or dims[0] % kind.block_elements:
        cursor.corrupt(f"gives {name!r} a shape that {kind.name} cannot hold", dims)
    elements = 1
    for dim in dims:
        elements *= dim
    return GgufTensor(name, tuple(reversed(dims)), kind, offset, kind.nbytes(elements))


def _placed(
    cursor: _Cursor, infos: list[GgufTensor], data_offset: int, alignment: int, file_bytes: int
) -> dict[str, GgufTensor]:
    """The tensors with absolute offsets: inside the file, aligned, none twice, none overlapping."""
    tensors: dict[str, GgufTensor] = {}
    for info in infos:
        if info.name in tensors:
            cursor.corrupt("holds a tensor name twice", info.name)
        if info.offset % alignment:
            cursor.corrupt(f"places {info.name!r} off its alignment of {alignment}", info.offset)
        start = data_offset + info.offset
        if start + info.nbytes > file_bytes:
            cursor.corrupt(
                f"ends before the data of {info.name!r}",
                f"{start} + {info.nbytes} > {file_bytes} bytes",
            )
        tensors[info.name] = GgufTensor(info.name, info.shape, info.type, start, info.nbytes)
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end:
            cursor.corrupt(f"lets {tensor.name!r} overlap {last!r}", tensor.offset)
        end, last = tensor.offset + tensor.nbytes, tensor.name
    return tensors
