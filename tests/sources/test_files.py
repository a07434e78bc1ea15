"""Folders and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hullspeed.errors import CorruptFileError, SourceError
from hullspeed.sources import cache_dir, resolve
from hullspeed.sources.files import shard_names, wanted

_INDEX = "model.safetensors.index.json"


def _touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).write_bytes(b"x")


def _index(root: Path, weight_map: object) -> None:
    (root / _INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_folder(tmp_path: Path) -> None:
    _touch(tmp_path, "config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
    _touch(tmp_path, "generation_config.json", "modeling.py", "consolidated.safetensors")
    files = resolve(str(tmp_path))
    assert files.kind == "safetensors"
    assert files.weights == (tmp_path / "model.safetensors",)
    assert files.chat_template == tmp_path / "chat_template.jinja"
    assert files.tokenizer == (tmp_path / "tokenizer.json",)
    assert len(files.all()) == 5
    assert resolve(str(tmp_path / "config.json")).weights == files.weights


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    _touch(tmp_path, "config.json", "a.safetensors", "b.safetensors", "stale.safetensors")
    _index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"})
    names = [path.name for path in resolve(str(tmp_path)).weights]
    assert names == ["a.safetensors", "b.safetensors"]
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(SourceError, match=r"missing .*b\.safetensors"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "value", ["../a.safetensors", "/a.safetensors", "a\\b.safetensors", "a.bin", 3, None]
)
def test_an_index_names_plain_files(value: object) -> None:
    with pytest.raises(CorruptFileError, match="no plain"):
        shard_names(json.dumps({"weight_map": {"x": value}}).encode(), _INDEX)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"weight_map": []}', b"\xff", b"[" * 10**5])
def test_a_malformed_index(raw: bytes) -> None:
    with pytest.raises(CorruptFileError):
        shard_names(raw, _INDEX)


def test_gguf(tmp_path: Path) -> None:
    _touch(tmp_path, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    files = resolve(str(tmp_path))
    assert files.kind == "gguf"
    assert len(files.weights) == 2
    assert resolve(str(tmp_path / "m-00002-of-00002.gguf")).weights == files.weights
    _touch(tmp_path, "other.gguf")
    with pytest.raises(SourceError, match="several GGUF models"):
        resolve(str(tmp_path))
    assert resolve(str(tmp_path / "other.gguf")).weights == (tmp_path / "other.gguf",)
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(SourceError, match="shards of the GGUF model are missing"):
        resolve(str(tmp_path / "m-00002-of-00002.gguf"))


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no model in the folder"):
        resolve(str(tmp_path))
    _touch(tmp_path, "config.json", "weights.bin")
    with pytest.raises(SourceError, match="no weights in the folder"):
        resolve(str(tmp_path))
    assert resolve(str(tmp_path), need_weights=False).kind == "config"
    with pytest.raises(SourceError, match="not a model file"):
        resolve(str(tmp_path / "weights.bin"))
    with pytest.raises(SourceError, match="no such file or folder"):
        resolve(str(tmp_path / "nothing.gguf"))


def test_never_code_or_folders() -> None:
    for name in ("modeling.py", "model.bin", "a.pt", "sub/config.json", "a.pkl", "README.md"):
        assert not wanted(name)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HULLSPEED_CACHE", "/a")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("HULLSPEED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/b/hullspeed")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "hullspeed"
