"""A hub model without its weights: configuration and the headers of the weight files.

Enough to size a model before anything is downloaded. Each safetensors header is read by HTTP
range; at most its own length is transferred. Honours ``HF_ENDPOINT``, ``HF_TOKEN`` and
``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import httpx2
from huggingface_hub import get_token

from hullspeed.errors import CorruptFileError, SourceError
from hullspeed.sources.files import INDEX_NAME, shard_names
from hullspeed.sources.hub import split

MAX_JSON_BYTES: Final = 64 * 1024**2
MAX_HEADER_BYTES: Final = 100_000_000
_FIRST_BYTES = 256 * 1024  # most headers fit: one request instead of two
_CONNECTIONS = 8
_TIMEOUT_S = 20.0
_ENDPOINT = "https://huggingface.co"
_RANGE = re.compile(r"^bytes \d+-\d+/(\d+)$")


@dataclass(frozen=True, slots=True)
class RemoteHeader:
    """The JSON header of one safetensors file, as bytes, and the size of the whole file."""

    name: str
    raw: bytes
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """What the hub holds of a model, without its weights.

    Attributes:
        config: config.json as bytes; the other files likewise, ``None`` where there is none.
        headers: One for each safetensors file; empty if the model has none.
        transferred_bytes: Bytes of all bodies received.
    """

    repo: str
    revision: str | None
    config: bytes
    generation_config: bytes | None
    quant_config: bytes | None
    headers: tuple[RemoteHeader, ...]
    transferred_bytes: int


def read_remote(reference: str) -> RemoteModel:
    """Configuration and headers of ``ORG/NAME[@REVISION]``.

    Raises:
        SourceError: if the model is unknown, closed to this user or out of reach.
        CorruptFileError: if what the hub sends contradicts itself.
    """
    repo, _, revision = split(reference)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise SourceError(
            "the hub is switched off by HF_HUB_OFFLINE", seen=repo, fix="unset it, or pull first"
        )
    token = get_token()
    # A compressed body would make ranges and lengths mean something else.
    headers = {"Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    endpoint = os.environ.get("HF_ENDPOINT", _ENDPOINT).rstrip("/")
    base_url = f"{endpoint}/{repo}/resolve/{revision or 'main'}/"
    with httpx2.Client(
        base_url=base_url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S
    ) as client:
        return _Reader(client, repo).model()


class _Reader:
    """Reads the files of one repository, keeping count of the bytes."""

    def __init__(self, client: httpx2.Client, repo: str) -> None:
        self.client = client
        self.repo = repo
        self.revision: str | None = None
        self.transferred_bytes = 0

    def model(self) -> RemoteModel:
        config = self.file("config.json")
        if config is None:
            raise SourceError(
                "the model has no config.json", seen=self.repo, fix="name a transformers model"
            )
        index = self.file(INDEX_NAME)
        names = shard_names(index, INDEX_NAME) if index else ("model.safetensors",)
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            found = list(pool.map(self.header, names))
        if index and None in found:
            missing = names[found.index(None)]
            raise SourceError("a shard named in the index is missing", seen=missing)
        return RemoteModel(
            repo=self.repo,
            revision=self.revision,
            config=config,
            generation_config=self.file("generation_config.json"),
            quant_config=self.file("hf_quant_config.json"),
            headers=tuple(header for header in found if header),
            transferred_bytes=self.transferred_bytes,
        )

    def file(self, name: str) -> bytes | None:
        """A whole small file, or ``None`` if there is none."""
        response, body = self.get(name, MAX_JSON_BYTES + 1)
        if response is None:
            return None
        if len(body) > MAX_JSON_BYTES:
            raise CorruptFileError(f"{name} is larger than 64 MiB", seen=self.repo)
        return body

    def header(self, name: str) -> RemoteHeader | None:
        """The header of a safetensors file, or ``None`` if there is no such file."""
        response, body = self.get(name, _FIRST_BYTES, first=0)
        if response is None:
            return None
        file_bytes = _file_bytes(response, name)
        length = int.from_bytes(body[:8], "little")
        if not 2 <= length <= MAX_HEADER_BYTES or 8 + length > file_bytes:
            raise CorruptFileError(
                f"{name} declares a header that cannot be", seen=f"{length} of {file_bytes} bytes"
            )
        if len(body) < 8 + length:
            _, rest = self.get(name, 8 + length - len(body), first=len(body))
            body += rest
        if len(body) < 8 + length:
            raise CorruptFileError(f"{name} ends inside its header", seen=f"{len(body)} bytes")
        return RemoteHeader(name, body[8 : 8 + length], file_bytes)

    def get(
        self, name: str, n_bytes: int, first: int | None = None
    ) -> tuple[httpx2.Response | None, bytes]:
        """At most ``n_bytes`` of a file, from byte ``first`` if given; ``None`` if it is not there.

        The stream is closed after the bytes asked for, so a server that ignores ranges cannot
        send the weights.
        """
        wanted = {} if first is None else {"Range": f"bytes={first}-{first + n_bytes - 1}"}
        try:
            with self.client.stream("GET", name, headers=wanted) as response:
                if response.status_code == 404 and "EntryNotFound" in _code(response):
                    return None, b""
                if response.is_error:
                    raise self.refused(name, response)
                skip = (first or 0) if response.status_code != 206 else 0
                body = _take(response.iter_bytes(), skip + n_bytes)[skip:]
        except httpx2.HTTPError as error:
            raise SourceError(
                "the hub is out of reach",
                seen=f"{type(error).__name__}: {error}",
                fix="check the network and HF_ENDPOINT, or plan from a local folder",
            ) from error
        self.transferred_bytes += len(body)
        self.revision = response.headers.get("X-Repo-Commit", self.revision)
        return response, body

    def refused(self, name: str, response: httpx2.Response) -> SourceError:
        """What a status code of the hub means for the user."""
        status, code = response.status_code, _code(response)
        if code == "GatedRepo" or status == 403:
            return SourceError(
                "the model is gated",
                seen=self.repo,
                fix="accept its terms on the hub and set HF_TOKEN",
            )
        if code == "RevisionNotFound":
            return SourceError("no such revision", seen=self.repo, fix="check the @REVISION")
        if status in (401, 404):
            return SourceError(
                "no such model on the hub, or it is private",
                seen=self.repo,
                fix="check the name; for a private model set HF_TOKEN",
            )
        return SourceError(f"the hub did not give {name}", seen=status, fix="try again later")


def _code(response: httpx2.Response) -> str:
    """The hub's own error code. A 404 without one is a plain server's: the file is not there."""
    return str(response.headers.get("X-Error-Code", "EntryNotFound"))


def _file_bytes(response: httpx2.Response, name: str) -> int:
    """Size of the whole file, from the range or, where ranges are ignored, its length."""
    match = _RANGE.match(response.headers.get("Content-Range", ""))
    if match:
        return int(match[1])
    length = response.headers.get("Content-Length", "")
    if response.status_code == 206 or not length.isdecimal():
        raise SourceError(f"the hub does not say how large {name} is", fix="pull the model instead")
    return int(length)


def _take(chunks: Iterator[bytes], n_bytes: int) -> bytes:
    """The first ``n_bytes`` of a stream."""
    body = bytearray()
    for chunk in chunks:
        body += chunk
        if len(body) >= n_bytes:
            break
    return bytes(body[:n_bytes])
