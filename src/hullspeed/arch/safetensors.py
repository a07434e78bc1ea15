"""Safetensors headers: every tensor's name, type, shape and place, without reading a weight.

A file is an 8-byte little-endian header length, a JSON object, and the data. The header must
describe the data exactly: no gap, no overlap, shape x type equal to the bytes. Format:
https://github.com/huggingface/safetensors#format. Remote files are read by the same parser
from a byte range.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Never, TypeGuard

from hullspeed.errors import CorruptFileError, SourceError, UnsupportedModelError

MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the reference implementation
MAX_DIMS: Final = 8
LENGTH_BYTES: Final = 8
_REFETCH = "fetch the file again"

# bits per element; names as in the reference implementation
DTYPE_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
        dtype: As the file says it: ``"BF16"``, ``"F8_E4M3"``, ``"I32"``, ...
        offset: Bytes from the start of ``file``.
        file: Path or name of the file that holds it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: str


def read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, by name in the order of the data.

    Raises:
        CorruptFileError: if the file is cut short or contradicts itself.
        UnsupportedModelError: for an element type that is not known here.
        SourceError: if the file cannot be opened.
    """
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            header_bytes = header_length(file.read(LENGTH_BYTES), file_bytes, path.name)
            raw = file.read(header_bytes)
    except OSError as error:
        raise SourceError(
            "cannot open the safetensors file", seen=str(path), fix=f"{error.strerror}"
        ) from error
    return parse_header(raw, file_bytes, path.name, file=str(path))


def read_files(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of all shards together.

    Raises:
        CorruptFileError: as :func:`read_file`, and if two shards hold the same name.
    """
    return merge(read_file(path) for path in paths)


def merge(shards: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Several files' tensors in one table.

    Raises:
        CorruptFileError: if two files hold the same name.
    """
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in shard.items():
            if name in found:
                raise CorruptFileError(
                    f"two files hold {name!r}",
                    seen=[found[name].file, tensor.file],
                    fix="remove the stale shard or fetch the model again",
                )
            found[name] = tensor
    return found


def header_length(first_bytes: bytes, file_bytes: int, name: str) -> int:
    """Length of the JSON header, from the first eight bytes of a file of ``file_bytes``.

    Raises:
        CorruptFileError: if it cannot be.
    """
    if len(first_bytes) < LENGTH_BYTES:
        _corrupt(name, "is too short for a safetensors header", f"{file_bytes} bytes")
    (length,) = struct.unpack_from("<Q", first_bytes)
    if not 2 <= length <= MAX_HEADER_BYTES:
        _corrupt(name, f"declares a header length outside 2..{MAX_HEADER_BYTES}", length)
    if LENGTH_BYTES + length > file_bytes:
        _corrupt(name, "ends inside its header", f"{length} bytes declared, file {file_bytes}")
    return int(length)


def parse_header(
    raw: bytes, file_bytes: int, name: str, *, file: str = ""
) -> dict[str, StoredTensor]:
    """The tensors that the JSON header ``raw`` of a file of ``file_bytes`` bytes describes.

    Raises:
        CorruptFileError: if the header is no valid JSON or contradicts the data.
        UnsupportedModelError: for an element type that is not known here.
    """
    entries = _entries(raw, name)
    entries.pop("__metadata__", None)
    data_start = LENGTH_BYTES + len(raw)
    tensors = [
        _tensor(key, value, data_start, name, file or name) for key, value in entries.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the one before" if tensor.offset < end else "leaves a gap before it"
            _corrupt(name, f"has a tensor that {what}", tensor.name)
        end += tensor.nbytes
    if end != file_bytes:
        _corrupt(name, "has data of another size than its header says", f"{end} != {file_bytes}")
    return {tensor.name: tensor for tensor in tensors}


def _corrupt(name: str, what: str, seen: object) -> Never:
    raise CorruptFileError(f"{name} {what}", seen=seen, fix=_REFETCH)


def _entries(raw: bytes, name: str) -> dict[str, Any]:
    """A JSON object whose keys are all different."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            _corrupt(name, "holds a name twice", twice)
        return table

    try:
        entries = json.loads(raw, object_pairs_hook=unique)
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        _corrupt(name, "has a header that is not JSON", str(error))
    if not isinstance(entries, dict):
        _corrupt(name, "has a header that is no JSON object", type(entries).__name__)
    return entries


def _tensor(key: str, value: object, data_start: int, name: str, file: str) -> StoredTensor:
    fields = value if isinstance(value, dict) else {}
    dtype, shape = fields.get("dtype"), fields.get("shape")
    offsets = fields.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets):
        _corrupt(name, f"describes {key!r} without a dtype, shape and data_offsets", value)
    if len(offsets) != 2 or offsets[0] > offsets[1] or len(shape) > MAX_DIMS:
        _corrupt(name, f"gives {key!r} an impossible shape or place", value)
    if dtype not in DTYPE_BITS:
        raise UnsupportedModelError(
            f"{name} stores {key!r} in an element type that is not known here",
            seen=dtype,
            fix=f"known types: {', '.join(sorted(DTYPE_BITS))}",
        )
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    nbytes = offsets[1] - offsets[0]
    if bits != 8 * nbytes:
        _corrupt(name, f"gives {key!r} {nbytes} bytes, which is not shape x {dtype}", shape)
    return StoredTensor(key, dtype, tuple(shape), data_start + offsets[0], nbytes, file)


def _naturals(value: object) -> TypeGuard[list[int]]:
    """A list of integers of 0 to 2^48, as every shape and offset is."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= 2**48 for item in value
    )
