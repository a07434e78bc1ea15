"""quantize_checkpoint: a 16-bit safetensors checkpoint to FP8, INT8 or INT4, shard by shard.

Rounding to nearest with a searched scale (``quantize_codes.py``); no calibration data is needed.
The new checkpoint grows in ``<out>.unfinished`` and takes its name when it is whole; a run that was
interrupted goes on behind the last whole shard.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hullspeed.arch.fields import read_json
from hullspeed.arch.headers import renamed
from hullspeed.arch.mapped import MappedFile
from hullspeed.arch.model import ModelArch
from hullspeed.arch.quant import WeightFormat
from hullspeed.arch.quant_config import weight_format
from hullspeed.arch.safetensors import StoredTensor, read_file
from hullspeed.arch.schemes import Part
from hullspeed.arch.tensors import TensorSpec
from hullspeed.errors import CapacityError, CorruptFileError, UnsupportedModelError, UsageError
from hullspeed.models.plain_numbers import PLAIN, as_float32
from hullspeed.models.quantize_choice import Choice, choose
from hullspeed.models.quantize_result import Change, Quantized
from hullspeed.models.quantize_resume import Unfinished
from hullspeed.models.quantize_shard import Entry, ShardWriter
from hullspeed.models.quantize_targets import Target
from hullspeed.sources.files import CHAT_TEMPLATE_NAMES, INDEX_NAME, TOKENIZER_NAMES, ModelFiles
from hullspeed.units import format_bytes

Progress = Callable[[int, int], None]
"""Told of the bytes of the source that are done, and of all."""


def silent(_done_bytes: int, _total_bytes: int) -> None:
    """A progress that tells nobody."""


COPIED = (
    *TOKENIZER_NAMES, *CHAT_TEMPLATE_NAMES, "generation_config.json", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json", "LICENSE", "LICENSE.txt",
    "LICENSE.md", "NOTICE", "USE_POLICY.md",
)  # fmt: skip

_STORED = {
    "bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8": "F8_E4M3", "int8": "I8", "int32": "I32",
    "int64": "I64",
}  # fmt: skip
_CHUNK_WEIGHTS = 4 * 2**20  # weights that one thread takes at a time


class _Shard(NamedTuple):
    """A file to write: its entries; the source's tensors, each with its weight if quantized."""

    source: Path
    entries: list[Entry]
    work: list[tuple[StoredTensor, TensorSpec | None]]

    @property
    def source_bytes(self) -> int:
        """Of the source's tensors."""
        return sum(stored.nbytes for stored, _ in self.work)


class _Meter:
    """Adds up what is done and tells it."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self._progress, self._total, self._done = progress, total_bytes, 0

    def add(self, n_bytes: int) -> None:
        self._done += n_bytes
        self._progress(self._done, self._total)


def quantize_checkpoint(
    files: ModelFiles,
    arch: ModelArch,
    out: Path,
    target: Target,
    *,
    threads: int = 1,
    progress: Progress = silent,
) -> Quantized:
    """Write the quantized checkpoint to the new folder ``out``.

    Memory: the codes of one weight, and for each thread some ten float32 copies of 4 Mi weights.

    Raises:
        UnsupportedModelError: if the source is not plain safetensors, or no weight fits.
        UsageError: if ``out`` exists, or holds an unfinished run of something else.
        CorruptFileError: if the source is damaged or holds weights that are no numbers.
        CapacityError: if the disk has no room.
    """
    config = _plain_config(files, arch)
    if out.exists():
        raise UsageError("the output exists", seen=str(out), fix="name a new folder")
    choice = choose(arch, target)
    config["quantization_config"] = target.section(choice.ignore)
    shards = list(_plan(files, arch, choice, weight_format(config)))
    total = sum(shard.source_bytes for shard in shards)
    meter = _Meter(progress, total)
    changes: list[Change] = []
    resumed = 0
    with Unfinished(out, target, files.weights) as run, ThreadPoolExecutor(threads) as pool:
        _room_for(run.folder, shards)
        for shard in shards:
            name = shard.source.name
            earlier = run.finished(name, shard.entries)
            if earlier is None:
                work = _Work(target, arch.dtype, pool, meter)
                written = work.write(shard, run.folder / name)
                run.record(name, written)
            else:
                written = [Change(*row) for row in earlier]
                resumed += 1
                meter.add(shard.source_bytes)
            changes += written
        _write_side_files(files, config, run.folder, shards)
        run.complete()
    after = sum(entry.nbytes for shard in shards for entry in shard.entries)
    return Quantized(out, target, total, after, tuple(changes), choice.reasons, resumed)


def _plain_config(files: ModelFiles, arch: ModelArch) -> dict[str, Any]:
    """config.json of a source that can be quantized, without what refers to code."""
    if files.kind != "safetensors" or files.config is None:
        raise UnsupportedModelError(
            "only a safetensors checkpoint with its config.json can be quantized",
            seen=files.kind,
            fix="name a 16-bit checkpoint in the Hugging Face layout",
        )
    if arch.quant != "none":
        raise UnsupportedModelError(
            "the source is quantized already", seen=arch.quant, fix="start from its 16-bit original"
        )
    config = read_json(files.config)
    config.pop("auto_map", None)
    return config


def _plan(
    files: ModelFiles, arch: ModelArch, choice: Choice, stored_as: WeightFormat
) -> Iterator[_Shard]:
    """The shards to write, of the names and in the order of the source's."""
    for path in files.weights:
        found = read_file(path)
        names = {stored.name: name for name, stored in renamed(arch, found).items()}
        entries: list[Entry] = []
        work: list[tuple[StoredTensor, TensorSpec | None]] = []
        for stored in found.values():
            spec = choice.quantized.get(names[stored.name])
            work.append((stored, spec))
            if spec is None:
                entries.append(Entry(stored.name, stored.dtype, stored.shape, stored.nbytes))
                continue
            if stored.dtype not in PLAIN or stored.shape != spec.shape:
                raise CorruptFileError(
                    f"{stored.name} is not the plain weight that config.json describes",
                    seen=(stored.dtype, stored.shape),
                    fix="fetch the model again",
                )
            entries += [_entry(stored, spec, part) for part in stored_as.parts(spec, arch.dtype)]
        yield _Shard(path, entries, work)


def _entry(stored: StoredTensor, spec: TensorSpec, part: Part) -> Entry:
    """The part under the name that the source's own prefix gives it."""
    suffix = part.name.removeprefix(spec.name.removesuffix("weight"))
    name = stored.name.removesuffix("weight") + suffix
    return Entry(name, _STORED[part.dtype], part.shape, part.nbytes)


def _room_for(folder: Path, shards: list[_Shard]) -> None:
    needed = sum(
        e.nbytes for s in shards if not (folder / s.source.name).exists() for e in s.entries
    )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CapacityError(
            f"the disk has no room for {format_bytes(needed)}",
            seen=format_bytes(free),
            fix="free space, or name a folder on another disk",
        )


@dataclass(frozen=True)
class _Work:
    """What turns weights into parts."""

    target: Target
    dtype: str
    pool: ThreadPoolExecutor
    meter: _Meter

    def write(self, shard: _Shard, path: Path) -> list[Change]:
        """One shard, tensor by tensor."""
        source = MappedFile(shard.source)
        entries = iter(shard.entries)
        changes: list[Change] = []
        with ShardWriter(path, shard.entries) as writer:
            for stored, spec in shard.work:
                raw = source.bytes(stored.offset, stored.nbytes)
                if spec is None:
                    writer.write(next(entries).name, raw)
                else:
                    parts, change = self._quantize(stored, raw)
                    stem = stored.name.removesuffix("weight")
                    for entry in islice(entries, len(parts)):
                        writer.write(entry.name, parts[entry.name.removeprefix(stem)])
                    changes.append(change)
                source.release(stored.offset, stored.nbytes)
                self.meter.add(stored.nbytes)
        return changes

    def _quantize(
        self, stored: StoredTensor, raw: NDArray[np.uint8]
    ) -> tuple[dict[str, NDArray[np.uint8]], Change]:
        """One weight, some rows a thread; all its parts as bytes."""
        rows, columns = stored.shape
        tall = self.target.block[0] if self.target.block else 1
        step = max(_CHUNK_WEIGHTS // columns // tall, 1) * tall
        row_bytes = stored.nbytes // rows

        def piece(top: int) -> _Piece:
            weight = as_float32(raw[top * row_bytes : (top + step) * row_bytes], stored.dtype)
            if not np.isfinite(weight).all():
                raise CorruptFileError(
                    f"{stored.name} holds weights that are not finite",
                    seen=f"rows from {top}",
                    fix="fetch the model again",
                )
            weight = weight.reshape(-1, columns)
            encoded = self.target.encode(weight, self.dtype)
            off = encoded.value.dequantize()
            off -= weight
            return _Piece(encoded.parts, _squares(off), _squares(weight))

        pieces = list(self.pool.map(piece, range(0, rows, step)))
        parts = {
            suffix: np.concatenate([piece.parts[suffix] for piece in pieces])
            for suffix in pieces[0].parts
        }
        if self.target.packed:
            parts["weight_shape"] = np.array([rows, columns], np.int64).view(np.uint8)
        after = sum(part.nbytes for part in parts.values())
        error = math.sqrt(math.fsum(piece.error for piece in pieces))
        norm = math.sqrt(math.fsum(piece.norm for piece in pieces))
        relative = error / norm if norm else 0.0
        return parts, Change(stored.name, stored.shape, stored.nbytes, after, relative, norm)


class _Piece(NamedTuple):
    """Some rows: the parts' bytes, and the sums of squares of the error and of the weights."""

    parts: dict[str, NDArray[np.uint8]]
    error: float
    norm: float


def _squares(values: NDArray[np.float32]) -> float:
    """Sum of squares; row by row in float32, then in float64."""
    return float(np.einsum("ij,ij->i", values, values).sum(dtype=np.float64))


def _write_side_files(
    files: ModelFiles, config: dict[str, Any], folder: Path, shards: list[_Shard]
) -> None:
    """Configuration, tokenizer, licence and the index of shards; never code."""
    for name in COPIED:
        if (files.root / name).is_file():
            shutil.copyfile(files.root / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(shards) > 1 or shards[0].source.name != "model.safetensors":
        index = {
            "metadata": {"total_size": sum(e.nbytes for s in shards for e in s.entries)},
            "weight_map": {e.name: s.source.name for s in shards for e in s.entries},
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
