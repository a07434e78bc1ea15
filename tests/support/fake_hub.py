"""A Hugging Face hub of one folder, on loopback."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What it serves, how, and what it was asked for."""

    root: Path
    repo: str = "org/model"
    ranges: bool = True
    gated: bool = False
    url: str = ""
    sent_bytes: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)


@contextmanager
def fake_hub(root: Path, **settings: object) -> Iterator[FakeHub]:
    hub = FakeHub(root, **settings)  # type: ignore[arg-type]

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, *, body: bool = True) -> None:
        hub = self.state
        path = self.path.partition("?")[0]
        hub.requests.append((self.command, path))
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.gated:
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"}, body=body)
        if path.startswith("/api/"):
            return self.api(path, body=body)
        match = re.match(r"^/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<name>.+)$", path)
        if match is None or match["repo"] != hub.repo:
            return self.answer(401, b"", {"X-Error-Code": "RepoNotFound"}, body=body)
        if match["rev"] not in ("main", COMMIT):
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"}, body=body)
        file = hub.root / match["name"]
        if not file.is_file():
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)
        return self.content(file.read_bytes(), body=body)

    def api(self, path: str, *, body: bool) -> None:
        hub = self.state
        if not path.startswith(f"/api/models/{hub.repo}"):
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)
        names = sorted(p.relative_to(hub.root).as_posix() for p in hub.root.rglob("*.*"))
        if "/tree/" in path:
            entries: object = [
                {"type": "file", "path": n, "size": (hub.root / n).stat().st_size, "oid": "0" * 40}
                for n in names
            ]
        else:
            siblings = [{"rfilename": n} for n in names]
            entries = {"id": hub.repo, "modelId": hub.repo, "sha": COMMIT, "siblings": siblings}
        kind = {"Content-Type": "application/json"}
        return self.answer(200, json.dumps(entries).encode(), kind, body=body)

    def content(self, data: bytes, *, body: bool) -> None:
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        wanted = re.match(r"^bytes=(\d+)-(\d*)$", self.headers.get("Range", ""))
        if wanted is None or not self.state.ranges:
            return self.answer(200, data, headers, body=body)
        first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
        part = data[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return self.answer(206, part, headers, body=body)

    def answer(self, status: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            try:
                self.wfile.write(data)
                self.state.sent_bytes += len(data)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has what it wanted
